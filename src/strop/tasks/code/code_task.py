"""Problems answered by a program, in the schemas of MBPP, HumanEval and APPS, judged by their tests.

A TOML file of `presets` says of each data set where its files are and how its problems are posed.
"""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from itertools import chain
from typing import Literal

from strop.rollout import Example, Outcome, Split, make_example
from strop.spec.task import CodeTaskSection
from strop.spec.template import fill, list_names
from strop.tasks.code.extraction import (
    WALL_S,
    Import,
    fence,
    judge_reply,
    scope_of,
    statements_of,
    used_names,
)
from strop.tasks.code.judge import JudgeJob
from strop.tasks.code.row_tests import read_table
from strop.tasks.rows.layout import DataSet, Row, bad_row
from strop.tasks.rows.row_task import PublishedRows, RowTask, text_of

_MAX_WALL_S, _TEST_S = 60.0, 3.0
"""Of tables of inputs and outputs: most time for all tests, each of which adds a second; time of one test."""
_MAX_TESTS_BYTES = 8 << 20
"""Few problems have larger tests, which each verdict sends to a sandbox."""
_VERIFIER = "python-programs-4"


class CodeSpec(CodeTaskSection, PublishedRows):
    """Problems in the columns of MBPP, HumanEval (for evaluation only) or APPS."""

    name: Literal["mbpp", "humaneval", "apps"]


class CodeTask(RowTask):
    """Right if every test passes; `tests_passed_frac` is the share that did. A challenge test is not shown.

    Programs that are tested by tables of inputs and outputs may import numpy; one that does has no score if
    the sandbox cannot mount it. Items with fewer than two such tests, held-out ones without any, and items
    with more than 8 MiB of them are left out.
    """

    _spec: CodeSpec

    def __init__(self, spec: CodeSpec) -> None:
        super().__init__(spec, _VERIFIER)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Run the tests over the reply's program. Raises: like `judge_reply`."""
        fields, head = example.fields, example.fields.get("head", "")
        # Without its names an example has no score.
        given = {
            key: fields[key] for key in {"names", *(JudgeJob.__dataclass_fields__.keys() & fields.keys())}
        }
        job = JudgeJob(source=head, wall_s=WALL_S, **given)
        if job.input_output:
            wall_s = min(_MAX_WALL_S, WALL_S + job.num_tests)
            job = replace(job, wall_s=wall_s, test_s=_TEST_S)
        return await judge_reply(text, job, self._spec, head)

    def entry_point(self, example: Example) -> str:
        """Return the name of the function that is called; '': the program runs as a whole."""
        return str(next(iter(example.fields["names"]), ""))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the reference program: fenced, and as it ends or goes on a prompt in plain text."""
        if example.answer is None:
            return ()
        return fence(example.fields.get("head", "") + example.answer), example.answer + self._data.ending

    def to_example(self, row: Row) -> Example | str:
        """Read a row in the schema of its data set."""
        return _to_example(row, self.name, self._data) if self._data.tests else _to_apps(row)


def _to_example(row: Row, task: str, data: DataSet) -> Example:
    """Read a row whose tests are statements; what they use of the reference, the program must define."""
    # The prompt shows tests beside columns.
    asked = [name for name in list_names(data.prompt) if name != "shown"]
    texts = {
        name: text_of(row, name, "") for name in list_names(data.head + data.setup + "".join(data.tests))
    }
    texts |= {name: text_of(row, name) for name in (*asked, str(data.answer))}
    texts = {name: text.replace("\r\n", "\n") for name, text in texts.items()}
    shown, *hidden = ([fill(one, texts)] if "{" in one else _texts(row, one) for one in data.tests)
    code, own, tests = texts[str(data.answer)], fill(data.setup, texts), [*shown, *chain(*hidden)]
    head, setup = fill(data.head, texts) or statements_of(own, Import), statements_of(code, Import) + own
    defined = scope_of(head + code).binds - scope_of(statements_of(head + code, Import)).binds
    first, beside = scope_of("\n".join(shown)), scope_of(setup)
    called = used_names("\n".join(shown)), used_names("\n".join(tests)), sorted(beside.reads - beside.binds)
    known = {*dir(builtins), *defined, *first.binds, *beside.binds}
    if defined.isdisjoint(first.reads) or not (first.reads <= known or "*" in beside.binds):
        raise bad_row(
            f"{row.place}: tests use {sorted(first.reads)[:5]}, {data.answer} defines {sorted(defined)[:5]}",
            allowed=f"Python in {', '.join(texts)}, and tests of a name that {data.answer} defines",
        )
    fields = {
        **{name: texts[name].strip("\n") for name in asked},
        "head": head,
        "names": [name for name in dict.fromkeys(chain(*called)) if name in defined],
        "setup": setup,
        "tests": tests,
        "num_tests": len(tests),
        "shown": "\n".join(shown),
    }
    return make_example(task, fields, code)


def _to_apps(row: Row) -> Example | str:
    question, columns = text_of(row, "question"), ("starter_code", "input_output", "solutions")
    starter, text, solutions = (text_of(row, column, "") for column in columns)
    try:
        # Some tests have numbers with more digits than Python parses by default; the judge parses them.
        tests = read_table(json.loads(text.strip() or '{"inputs": [], "outputs": []}', parse_int=len))
        references = json.loads(solutions.strip() or "[]")
        if not all(isinstance(reference, str) for reference in references):
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
    fields = {
        "question": question,
        "starter": f"\n\nBegin with this code:\n\n```python\n{starter}\n```" if starter else "",
        "form": form,
        "names": list(tests.names),
        "num_tests": tests.num_tests,
        "input_output": text,
    }
    return make_example("apps", fields, references[0] if references else None)


def _texts(row: Row, column: str) -> list[str]:
    """Return a column of texts; a missing one is empty. Raises: DataError naming the row."""
    values = row.values.get(column)
    values = [] if values is None else values
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise bad_row(f"{row.place} has {column}={values!r:.60}", "a list of texts")
    return [value.replace("\r\n", "\n") for value in values]
