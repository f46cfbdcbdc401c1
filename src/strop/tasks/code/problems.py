"""Rows of published data sets whose problems are answered by a program: MBPP, HumanEval and APPS."""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from itertools import chain
from typing import Any

from strop.rollout import Split
from strop.spec.template import fill, list_names
from strop.tasks.code.extraction import Import, body_of, names_of, parse, scope_of, statements_of, used_names
from strop.tasks.code.row_tests import read_table
from strop.tasks.rows.layout import DataSet, Row, bad_row
from strop.tasks.rows.row_task import text_of

_MAX_TESTS_BYTES = 8 << 20
"""Few problems have larger tests, which each verdict sends to a sandbox."""


def read_statements(row: Row, data: DataSet) -> tuple[dict[str, Any], Any]:
    """Return fields of a row whose tests are statements, and its tests.

    The program must define what they use of the reference, which is `whole`. The first tests are `shown`.
    Raises: DataError naming the row, if it is malformed.
    """
    asked = [name for name in list_names(data.prompt) if name != "shown"]
    columns = list_names("".join([data.head, data.setup, *data.tests]))
    texts = {name: text_of(row, name, "") for name in columns}
    texts |= {name: text_of(row, name) for name in (*asked, str(data.answer))}
    texts = {name: text.replace("\r\n", "\n") for name, text in texts.items()}
    shown, *hidden = ([fill(one, texts)] if "{" in one else _texts(row, one) for one in data.tests)
    code, own, tests = texts[str(data.answer)], fill(data.setup, texts), [*shown, *chain(*hidden)]
    head, used = fill(data.head, texts) or statements_of(own, Import), scope_of("\n".join([own, *tests]))
    # What the reference imports for itself may be missing here.
    needed = {*used.reads, "*"}
    brought = [one for one in body_of(code) if isinstance(one, Import) and names_of(one).binds & needed]
    setup = "".join(f"{ast.unparse(one)}\n" for one in brought) + own
    defined = scope_of(head + code).binds - scope_of(statements_of(head + code, Import)).binds
    first, beside = scope_of("\n".join(shown)), scope_of(setup)
    called = used_names("\n".join(shown)), used_names("\n".join(tests)), sorted(beside.reads - beside.binds)
    known = {*dir(builtins), *defined, *first.binds, *beside.binds}
    is_python = all(map(parse, [setup, *tests])) and any("assert" in one for one in [setup, *tests])
    imported = re.findall(
        r"^(?:from|import) (\w+)", statements_of("\n".join([setup, *tests]), Import), re.MULTILINE
    )
    is_known = is_python and {*imported} <= sys.stdlib_module_names
    if not is_known or defined.isdisjoint(first.reads) or not (first.reads <= known or "*" in beside.binds):
        using = sorted({*first.reads, *imported})
        raise bad_row(
            f"{row.place}: tests use {using[:5]}, {data.answer} defines {sorted(defined)[:5]}",
            allowed=f"Python without packages in {', '.join(texts)}; tests of a name of {data.answer}",
        )
    fields = {
        **{name: texts[name].strip("\n") for name in asked},
        str(data.answer): code,
        "head": head,
        "shown": "\n".join(shown),
        "whole": fence(head + code),
    }
    names = [name for name in dict.fromkeys(chain(*called)) if name in defined]
    return fields, {"source": head, "names": names, "setup": setup, "tests": tests}


def read_apps(row: Row) -> tuple[dict[str, Any], Any] | str:
    """Return fields of a row of APPS, and its table; or why it is left out. Raises: as `read_statements`."""
    question, columns = text_of(row, "question"), ("starter_code", "input_output", "solutions")
    starter, text, solutions = (text_of(row, column, "") for column in columns)
    text = text.strip() or '{"inputs": [], "outputs": []}'
    try:
        tests = read_table(text)
        references = json.loads(solutions.strip() or "[]")
        if not isinstance(references, list) or not all(isinstance(one, str) for one in references):
            raise ValueError("solutions that are no texts")
    except (ValueError, TypeError, RecursionError) as error:
        raise bad_row(
            f"{row.place} is not in the schema of APPS: {error}",
            allowed="JSON: `input_output` with `inputs` and `outputs` of one length, `solutions` of texts",
        ) from error
    if len(text) > _MAX_TESTS_BYTES:
        return "tests too large"
    # A program with a constant output passes a single test.
    if tests.num_tests < (least := 2 if row.split is Split.TRAIN else 1):
        return f"fewer than {least} tests"
    form = "Write a program that reads from standard input and writes to standard output."
    for name in tests.names:
        form = f"Write a function `{name}`; it is called with the arguments, and returns the result."
    starter = f"\n\nBegin with this code:\n\n```python\n{starter}\n```" if starter else ""
    whole = fence(references[0]) if references else None
    return {"question": question, "starter": starter, "form": form, "whole": whole}, text


def fence(code: str) -> str:
    """Return code in a fenced block, as tasks request it."""
    return f"```python\n{code.strip(chr(10))}\n```"


def _texts(row: Row, column: str) -> list[str]:
    """Return a column of texts; a missing one is empty. Raises: DataError naming the row."""
    values = row.values.get(column) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise bad_row(f"{row.place} has {column}={values!r:.60}", "a list of texts")
    return [value.replace("\r\n", "\n") for value in values]
