"""Programming contests in the schema of APPS: whole programs, or functions of a given name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import SOURCE_HELP, CodeTaskSection, TrainingRows
from strop.tasks.code.extraction import (
    SPARE_VERIFY_S,
    compiles,
    defines,
    extract_python,
    fence,
    judged_outcome,
    no_code_outcome,
)
from strop.tasks.code.python_judge import JudgeJob, JudgeMode, judge_for
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import (
    RowReading,
    RowTask,
    SplitExamples,
    optional_text,
    read_examples,
    require_texts,
)
from strop.tasks.task import ProgramForm, TaskLimits

_MAX_REPLY_TOKENS = 2048
_MIN_TESTS = {Split.TRAIN: 2, Split.HELD_OUT: 1}
"""A program with a constant output passes a single test."""
_ALLOWED_PACKAGES = ("numpy",)
_MAX_TESTS_BYTES = 8 << 20
"""Larger tests do not fit into the messages between a pool and its workers; few problems have them."""
_TEST_S = 3.0
_BASE_WALL_S = 5.0
_MAX_WALL_S = 60.0
_PROMPT = "{question}{starter}\n\n{trailer} Answer with one fenced block of Python code."
_STARTER = "\n\nBegin with this code:\n\n```python\n{starter}\n```"
_STDIN = "Write a program that reads from standard input and writes to standard output."
_FUNCTION = "Write a function `{name}`; it is called with the arguments, and returns the result."
_BASE_OPENING = "\n\n```python\n"
_BASE_STOP_STRINGS = ("\n```",)
"""In plain text the prompt opens the fence, and the closing fence ends the reply."""
_VERIFIER = "python-io-3"


class AppsSpec(CodeTaskSection, TrainingRows):
    """Programming contests, in the columns of APPS."""

    name: Literal["apps"]
    source: Unhashed[str] = Field(
        default="codeparrot/apps",
        min_length=1,
        description=SOURCE_HELP.format("codeparrot/apps"),
    )
    difficulty: Literal["introductory", "interview", "competition"] | None = Field(
        default=None,
        description="Only problems that the data calls so. none = all.",
        json_schema_extra=expert("the easy problems alone are a task for small models"),
    )


class Apps(RowTask):
    """Right if every test passes; `tests_passed_frac` is the share that did.

    Items with `fn_name` are tested by calls, all others as programs. Training items with fewer than two
    tests, held-out ones without any, and items with more than 8 MiB of them are left out: `left_out`.
    Programs may import numpy; one that does has no score if the sandbox cannot mount it.
    """

    is_costly = True

    _spec: AppsSpec

    def __init__(self, spec: AppsSpec) -> None:
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS,
            base_stop_strings=_BASE_STOP_STRINGS,
            verify_limit_s=_MAX_WALL_S + SPARE_VERIFY_S,
        )
        super().__init__(
            spec,
            _READING,
            limits,
            source=spec.source,
            prompt="".join((_PROMPT, _STARTER, _STDIN, _FUNCTION, _BASE_OPENING)),
            verifier=_VERIFIER,
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of examples by kind of test, and of items left out; reads the data."""
        splits = self._splits
        formats = Counter(
            "functions" if example.fields["fn_name"] else "programs"
            for example in (*splits.train, *splits.held_out)
        )
        return {**formats, **{f"items left out, {reason}": n for reason, n in splits.left_out.items()}}

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the problem with its starter code and the kind of test."""
        fields = example.fields
        starter = _STARTER.format(starter=fields["starter_code"]) if fields["starter_code"] else ""
        trailer = _FUNCTION.format(name=fields["fn_name"]) if fields["fn_name"] else _STDIN
        content = _PROMPT.format(question=fields["question"], starter=starter, trailer=trailer)
        return pose(content, base=content + _BASE_OPENING, thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Run all tests over the reply's code.

        Raises: SandboxError if this host has no sandbox of the required level, or the judge in it failed;
            SandboxRefused with kind packages if it cannot mount numpy for a program that imports it.
        """
        fields = example.fields
        name = fields["fn_name"]
        code = extract_python(text, (name,) if name else ())
        if code is None or not (defines(code, name) if name else compiles(code)):
            return no_code_outcome(code)
        job = JudgeJob(
            source=code,
            mode=JudgeMode.CALLS if name else JudgeMode.PROGRAMS,
            names=(name,) if name else (),
            input_output=fields["input_output"],
            num_tests=fields["num_tests"],
            wall_s=min(_MAX_WALL_S, _BASE_WALL_S + fields["num_tests"]),
            test_s=_TEST_S,
            packages=_ALLOWED_PACKAGES,
        )
        return judged_outcome(code, await judge_for(self._spec, job))

    def program_form(self, example: Example) -> ProgramForm:
        """Return the function that is called; None: the program runs as a whole."""
        return ProgramForm(entry_point=example.fields["fn_name"])

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the first reference solution, if the item has one."""
        return () if example.answer is None else (fence(example.answer),)

    def _read_splits(self) -> SplitExamples:
        # `num_train` and `num_held_out` apply to the remaining items.
        splits = read_examples(self._reading, self._source)
        left_out: Counter[str] = Counter()
        kept: dict[Split, list[Example]] = {Split.TRAIN: [], Split.HELD_OUT: []}
        for split, examples in kept.items():
            for example in splits.of(split):
                reason = self._why_left_out(example, split)
                if reason is None:
                    examples.append(example)
                else:
                    left_out[reason] += 1
        return SplitExamples(
            train=tuple(kept[Split.TRAIN][: self._spec.num_train]),
            held_out=tuple(kept[Split.HELD_OUT][: self._spec.num_held_out]),
            left_out=dict(left_out),
        )

    def _why_left_out(self, example: Example, split: Split) -> str | None:
        fields = example.fields
        if self._spec.difficulty not in {None, fields["difficulty"]}:
            return "another difficulty"
        if fields["num_tests"] < _MIN_TESTS[split]:
            return f"fewer than {_MIN_TESTS[split]} tests"
        return "tests too large" if len(fields["input_output"]) > _MAX_TESTS_BYTES else None


def _to_example(row: Row) -> Example:
    (question,) = require_texts(row, "question")
    input_output = optional_text(row, "input_output")
    tests = _parse(row, "input_output", input_output, {})
    solutions = _parse(row, "solutions", optional_text(row, "solutions"), [])
    if not isinstance(tests, dict):
        raise _malformed(row, "input_output", "a table")
    inputs, outputs, fn_name = tests.get("inputs", []), tests.get("outputs", []), tests.get("fn_name")
    is_sound = (
        isinstance(inputs, list)
        and isinstance(outputs, list)
        and len(inputs) == len(outputs)
        and isinstance(fn_name, str | None)
        and (fn_name is None or all(isinstance(arguments, list) for arguments in inputs))
        and isinstance(solutions, list)
        and all(isinstance(solution, str) for solution in solutions)
    )
    if not is_sound:
        raise _malformed(row, "input_output or solutions", "lists that belong together")
    fields = {
        "question": question,
        "starter_code": optional_text(row, "starter_code"),
        "difficulty": optional_text(row, "difficulty"),
        "fn_name": fn_name,
        "num_tests": len(inputs),
        "input_output": input_output,
    }
    return make_example("apps", fields, solutions[0] if solutions else None)


def _parse(row: Row, column: str, text: str, empty: Any) -> Any:
    try:
        # Some tests have numbers with more digits than Python parses by default; the judge parses them.
        return json.loads(text, parse_int=len) if text.strip() else empty
    except (ValueError, RecursionError) as error:
        raise _malformed(row, column, f"JSON ({error})") from error


def _malformed(row: Row, columns: str, allowed: str) -> DataError:
    return bad_row(
        f"{row.place}: {columns} is not in the schema of APPS",
        allowed=f"`inputs` and `outputs` of equal length, `solutions` a list of texts; here: {allowed}",
    )


_READING = RowReading(
    layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",)),
    to_example=_to_example,
    question=lambda example: str(example.fields["question"]),
)
