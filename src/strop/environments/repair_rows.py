"""Rows of repositories and the logs of their tests: SWE-bench, SWE-Gym, R2E and similar data sets."""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from strop.rollout import Example, make_example
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading


def _decode(value: Any) -> Any:
    """Read a column that may be JSON; Arrow fills keys of other rows with None."""
    value = json.loads(value) if isinstance(value, str) else value
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_decode)]
_Table = Annotated[dict[str, Any], BeforeValidator(_decode)]
_FIELDS = ("instance_id", "problem_statement", "image", "repository", "folder", "base_commit")
"""The columns that are an example's fields. The others are its answer, which the model does not see."""


def _named(*columns: str) -> Any:
    return Field(default="", validation_alias=AliasChoices(*columns))


class RepairRow(BaseModel):
    """The columns of a row; of an example's answer, those that are hidden from the model."""

    model_config = ConfigDict(populate_by_name=True)

    instance_id: str = ""
    problem_statement: str = ""
    image: str = _named("image", "docker_image", "image_name")
    repository: str = ""
    folder: str = ""
    base_commit: str = _named("base_commit", "commit_hash")
    test_command: str = _named("test_command", "test_cmd")
    """Empty: the run file's command."""
    test_patch: str = ""
    """A diff that adds the tests."""
    hidden_tests: Annotated[dict[str, str], BeforeValidator(_decode)] = {}
    """Test files by path."""
    hidden_paths: _Names = ()
    """Paths of the repository or the image that only the grader has."""
    fail_to_pass: _Names = Field(default=(), alias="FAIL_TO_PASS")
    pass_to_pass: _Names = Field(default=(), alias="PASS_TO_PASS")
    patch: str = ""
    """A correct diff, for the self-test."""
    expected_output_json: _Table = {}
    install_config: _Table = {}

    @classmethod
    def of(cls, example: Example) -> RepairRow:
        """Read an example's answer."""
        return cls.model_validate_json(example.answer or "{}")


def to_example(row: Row) -> Example:
    """Convert a row to an example. Raises: DataError naming the row, if a column is missing or malformed."""
    try:
        read = RepairRow.model_validate({k: v for k, v in row.values.items() if v not in (None, "")})
    except ValidationError as error:
        first = error.errors()[0]
        detail = f"{row.place}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise bad_row(detail, "texts; lists of texts and tables, or these as JSON") from error
    expected = tuple(name for name, status in read.expected_output_json.items() if status == "PASSED")
    read = read.model_copy(
        update={
            "instance_id": read.instance_id or row.place,
            "repository": os.path.expanduser(read.repository),
            "test_command": read.test_command or read.install_config.get("test_cmd") or "",
            "pass_to_pass": read.pass_to_pass or expected,
        }
    )
    if not read.problem_statement.strip():
        raise bad_row(f"{row.place} has no problem_statement", "a text that is not empty")
    if not read.fail_to_pass and not read.pass_to_pass:
        fault = f"{row.place} names no tests, and code under test can end their command with 0"
        raise bad_row(fault, "names in FAIL_TO_PASS, PASS_TO_PASS or expected_output_json")
    answer = read.model_dump(mode="json", exclude={*_FIELDS, "expected_output_json", "install_config"})
    fields = read.model_dump(mode="json", include={*_FIELDS})
    return make_example("repo-repair", fields, json.dumps(answer, sort_keys=True))


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
