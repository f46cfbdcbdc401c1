"""Rows of SWE-bench, SWE-Gym, R2E and their like as examples: what a model may see, and what it may not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from strop.rollout import Example, make_example
from strop.tasks.rows.layout import Row, bad_row
from strop.tasks.rows.row_task import optional_text, require_texts, wrong_type

IMAGE_COLUMNS = ("image", "docker_image", "image_name")
_COMMAND_COLUMNS = ("test_command", "test_cmd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """What decides, and no model sees: it stands in an example's answer, not in its fields."""

    test_command: str
    """Empty: the run file's."""
    test_patch: str
    """A diff that brings the tests; maybe empty."""
    hidden_tests: dict[str, str]
    """Files that bring the tests, by path."""
    hidden_paths: tuple[str, ...]
    """What of the repository or the image the grader alone has."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    """Without names in either, the exit code of the command decides."""
    patch: str
    """A right diff, for the self-test; maybe empty."""

    @classmethod
    def of(cls, example: Example) -> Hidden:
        """Read an example's answer."""
        found = json.loads(example.answer or "{}")
        lists = ("hidden_paths", "fail_to_pass", "pass_to_pass")
        return cls(**{**found, **{name: tuple(found[name]) for name in lists}})


def to_example(row: Row) -> Example:
    """Return a row as an example. Raises: DataError naming the row, if a column is missing or malformed."""
    (problem,) = require_texts(row, "problem_statement")
    image = _first_text(row, IMAGE_COLUMNS)
    expected = _table(row, "expected_output_json")
    hidden = Hidden(
        test_command=_first_text(row, _COMMAND_COLUMNS)
        or _table(row, "install_config").get("test_cmd")
        or "",
        test_patch=optional_text(row, "test_patch"),
        hidden_tests={name: str(text) for name, text in _table(row, "hidden_tests").items()},
        hidden_paths=_names(row, "hidden_paths"),
        fail_to_pass=_names(row, "FAIL_TO_PASS"),
        pass_to_pass=_names(row, "PASS_TO_PASS") or tuple(n for n, s in expected.items() if s == "PASSED"),
        patch=optional_text(row, "patch"),
    )
    fields = {
        "instance_id": _first_text(row, ("instance_id",)) or row.place,
        "problem_statement": problem,
        "image": image,
        "repository": os.path.expanduser(optional_text(row, "repository")),
        "folder": optional_text(row, "folder"),
        "base_commit": _first_text(row, ("base_commit", "commit_hash")),
    }
    return make_example("repo-repair", fields, json.dumps(asdict(hidden), sort_keys=True))


def _first_text(row: Row, columns: tuple[str, ...]) -> str:
    return next((text for column in columns if (text := optional_text(row, column))), "")


def _table(row: Row, column: str) -> Mapping[str, Any]:
    found = _read_json(row, column, "a table, or one as JSON")
    if found is not None and not isinstance(found, dict):
        raise wrong_type(row, column, "a table, or one as JSON")
    # What Arrow has no value for in this row.
    return {name: value for name, value in (found or {}).items() if value is not None}


def _names(row: Row, column: str) -> tuple[str, ...]:
    allowed = "a list of texts, or one as JSON"
    found = _read_json(row, column, allowed)
    if found is not None and not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
        raise wrong_type(row, column, allowed)
    return tuple(found or ())


def _read_json(row: Row, column: str, allowed: str) -> Any:
    value = row.values.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise bad_row(f"{row.place} has a {column} that is no JSON ({error})", allowed) from error
