"""Rows of repositories and the logs of their tests: SWE-bench, SWE-Gym, R2E and similar data sets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from strop.rollout import Example, make_example
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, optional_text, require_texts, wrong_type

_IMAGE_COLUMNS = ("image", "docker_image", "image_name")
_COMMAND_COLUMNS = ("test_command", "test_cmd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """The grading data of a row, hidden from the model: part of an example's answer, not of its fields."""

    test_command: str
    """Empty: the run file's command."""
    test_patch: str
    """A diff that adds the tests; maybe empty."""
    hidden_tests: dict[str, str]
    """Test files by path."""
    hidden_paths: tuple[str, ...]
    """Paths of the repository or the image that only the grader has."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    patch: str
    """A correct diff, for the self-test; maybe empty."""

    @classmethod
    def of(cls, example: Example) -> Hidden:
        """Read an example's answer."""
        values = json.loads(example.answer or "{}")
        lists = ("hidden_paths", "fail_to_pass", "pass_to_pass")
        return cls(**{**values, **{name: tuple(values[name]) for name in lists}})


def to_example(row: Row) -> Example:
    """Convert a row to an example. Raises: DataError naming the row, if a column is missing or malformed."""
    (problem,) = require_texts(row, "problem_statement")
    image = _first_text(row, _IMAGE_COLUMNS)
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
    if not hidden.fail_to_pass and not hidden.pass_to_pass:
        fault = f"{row.place} names no tests, and code under test can end their command with 0"
        raise bad_row(fault, "names in FAIL_TO_PASS, PASS_TO_PASS or expected_output_json")
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
    allowed = "a table, or one as JSON"
    table = _read_json(row, column, allowed)
    if table is not None and not isinstance(table, dict):
        raise wrong_type(row, column, allowed)
    # Arrow fills keys of other rows with None.
    return {name: value for name, value in (table or {}).items() if value is not None}


def _names(row: Row, column: str) -> tuple[str, ...]:
    allowed = "a list of texts, or one as JSON"
    names = _read_json(row, column, allowed)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise wrong_type(row, column, allowed)
    return tuple(names or ())


def _read_json(row: Row, column: str, allowed: str) -> Any:
    value = row.values.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise bad_row(f"{row.place} has a {column} that is no JSON ({error})", allowed) from error


_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|SKIPPED|XPASS) +(\S.*)$")
_UNITTEST = re.compile(
    r"^(test\w* \([\w.]+\))(?:\n.*)? \.\.\. (ok|FAIL|ERROR|skipped|expected failure)", re.MULTILINE
)
_GOOD = frozenset({"PASSED", "XFAIL", "ok", "expected failure"})


def read_passed(log: str) -> dict[str, bool]:
    """Return from a log whether each test passed, under each name that data sets use for it.

    Reads logs of pytest with -rA, and of unittest and Django with -v 2. pytest's `a/b.py::C::test_d[x y]`
    also counts under its part before the first space, and as `C.test_d[x y]`. The code under test can write
    to the log, too: of several results of a test the worst counts.
    """
    log = _STYLE.sub("", log)
    results = [(match[2], match[1]) for line in log.splitlines() if (match := _PYTEST.match(line.rstrip()))]
    results += [(match[1], match[2]) for match in _UNITTEST.finditer(log)]
    passed: dict[str, bool] = {}
    for name, status in results:
        # A failure's message follows the name.
        whole = name if status in _GOOD else name.partition(" - ")[0]
        within = ".".join(whole.split("::")[1:])
        for alias in {whole, whole.split()[0] if "::" in whole else whole, within or whole}:
            passed[alias] = passed.get(alias, True) and status in _GOOD
    return passed


READING = RowReading(
    layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",), is_unknown=True),
    to_example=to_example,
    question=lambda example: f"{example.fields['instance_id']}\n{example.fields['problem_statement']}",
)
