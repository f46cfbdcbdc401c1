"""Short Python functions in the schema of MBPP, judged by running their tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Outcome, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import SOURCE_HELP, CodeTaskSection, FewShot, TrainingRows
from strop.tasks.answers import cut_at_first
from strop.tasks.code.extraction import (
    SPARE_VERIFY_S,
    WALL_S,
    bound_names,
    compiles,
    defines,
    extract_python,
    fence,
    import_lines,
    judged_outcome,
    no_code_outcome,
    used_names,
)
from strop.tasks.code.python_judge import JudgeJob, JudgeMode, judge_for
from strop.tasks.rows.layout import DataLayout, Row, bad_row, read_shot_rows
from strop.tasks.rows.row_task import (
    RowReading,
    RowTask,
    SplitExamples,
    optional_text,
    require_texts,
    wrong_type,
)
from strop.tasks.task import ProgramForm, TaskLimits

_MAX_REPLY_TOKENS = 1024
_STOP_STRINGS = ("[DONE]",)
_PROMPT = (
    "{text}\n\nYour code should pass these tests:\n\n```python\n{tests}\n```\n\n"
    "Answer with one fenced block of Python code, and no tests in it."
)
_BASE_PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:"
    "\n\n{tests}\n[BEGIN]\n"
)
"""The form of lm-eval 0.4.13's mbpp; a shot's target is its code, a line break and [DONE]."""
_BASE_STOP_STRINGS = ("\n```",)
_FIRST_SHOT_ID = 2
"""lm-eval shows the problems 2, 3 and 4 of the prompt split."""
_PARITY_WALL_S = 3.0
_PARITY_REPLY_TOKENS = 512
_VERIFIER = "python-statements-4"
_PARITY_VERIFIER = "lm-eval-program-4"


class MbppSpec(FewShot, CodeTaskSection, TrainingRows):
    """Short Python functions, in the columns of MBPP."""

    name: Literal["mbpp"]
    source: Unhashed[str] = Field(
        default="google-research-datasets/mbpp",
        min_length=1,
        description=SOURCE_HELP.format("google-research-datasets/mbpp"),
    )
    rules: Literal["own", "lm-eval"] = Field(
        default="own",
        description="How a reply is judged. lm-eval = as its task mbpp 0.4.13 does, for comparison with"
        " published scores: 512 tokens, all of the reply before [DONE] is the program, 3 s, the shown tests"
        " only, without test_setup_code.",
        json_schema_extra=expert("scores of lm-eval are repeated by its own rules"),
    )
    hidden_tests: bool = Field(
        default=True,
        description="Whether held-out problems must also pass their challenge_test_list, which no prompt"
        " shows.",
        json_schema_extra=expert("showing every test in the prompt invites answers that pass these alone"),
    )


class Mbpp(RowTask):
    """Right if every test passes; the challenge tests of held-out problems may count and are not shown.

    Under the rules of lm-eval all of the reply before [DONE] is the program, its tests have 3 s, and neither
    `test_setup_code` nor challenge tests are run.
    `format_ok`: the code compiles and defines the first tested name, or passes without defining it.
    """

    is_costly = True

    _spec: MbppSpec

    def __init__(self, spec: MbppSpec) -> None:
        self._is_parity = spec.rules == "lm-eval"
        limits = TaskLimits(
            max_reply_tokens=_PARITY_REPLY_TOKENS if self._is_parity else _MAX_REPLY_TOKENS,
            stop_strings=_STOP_STRINGS,
            base_stop_strings=() if self._is_parity else _BASE_STOP_STRINGS,
            verify_limit_s=WALL_S + SPARE_VERIFY_S,
        )
        super().__init__(
            spec,
            _READING,
            limits,
            source=spec.source,
            prompt=_PROMPT,
            base_prompt=_BASE_PROMPT,
            verifier=_PARITY_VERIFIER if self._is_parity else _VERIFIER,
        )

    async def verify(self, example: Example, text: str) -> Outcome:
        """Run the tests over the reply's code.

        Raises: SandboxError if this host has no sandbox of the required level, or the judge in it failed.
        """
        fields = example.fields
        entry_point = fields["names"][0]
        if self._is_parity:
            program = cut_at_first(text, _STOP_STRINGS)
            code = program if compiles(program) else None
        else:
            code = extract_python(text, fields["names"])
        # lm-eval only runs the program: its tests show whether the name is defined.
        if code is None or not (self._is_parity or defines(code, entry_point)):
            return no_code_outcome(code)
        tests = (*fields["tests"], *fields["hidden_tests"])
        setup = "" if self._is_parity else fields["setup"]
        job = JudgeJob(
            source=code,
            mode=JudgeMode.STATEMENTS,
            names=tuple(fields["names"]),
            imports=import_lines(setup),
            definitions="\n".join(import_lines(example.answer or "")),
            setup=setup,
            tests=tests,
            num_tests=len(tests),
            wall_s=_PARITY_WALL_S if self._is_parity else WALL_S,
        )
        outcome = judged_outcome(code, await judge_for(self._spec, job))
        return outcome if defines(code, entry_point) else replace(outcome, format_ok=outcome.is_correct)

    def program_form(self, example: Example) -> ProgramForm:
        """Return the name of the function that is called."""
        return ProgramForm(entry_point=example.fields["names"][0])

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the reference code: fenced, and with the marker that ends it in few-shot prompts."""
        answer = example.answer or ""
        return fence(answer), f"{answer}\n[DONE]"

    def prompt_fields(self, example: Example) -> Mapping[str, str]:
        """Return the problem and its visible tests."""
        return {"text": example.fields["text"], "tests": "\n".join(example.fields["tests"])}

    def _shot_target(self, shot: Example) -> str:
        return f"{shot.answer}\n[DONE]"

    def _read_splits(self) -> SplitExamples:
        splits = super()._read_splits()
        # Training may memorise the challenge tests, so they belong to held-out problems only.
        splits = replace(splits, train=tuple(_without_hidden_tests(example) for example in splits.train))
        if self._is_parity or not self._spec.hidden_tests:
            splits = replace(splits, held_out=tuple(_without_hidden_tests(e) for e in splits.held_out))
        return replace(splits, shots=_read_shots(self._source, self._num_few_shot))


def _read_shots(source: str, num_shots: int) -> tuple[Example, ...]:
    """Return the solved examples: problem 2 and the following ones of the prompt split.

    Raises: DataError if the data has none, or too few.
    """
    if not num_shots:
        return ()
    numbers = range(_FIRST_SHOT_ID, _FIRST_SHOT_ID + num_shots)
    rows = {row.values.get("task_id"): row for row in read_shot_rows(source, _READING.layout)}
    missing = [number for number in numbers if number not in rows]
    if missing:
        raise DataError(
            f"task.num_few_shot={num_shots}, but the prompt split of {source} lacks task_id {missing}",
            allowed=f"problems {numbers.start} to {numbers.stop - 1} in the prompt split",
            next_step="lower task.num_few_shot, or fetch the data set again",
        )
    return tuple(_to_example(rows[number]) for number in numbers)


def _without_hidden_tests(example: Example) -> Example:
    return make_example(example.task, {**example.fields, "hidden_tests": []}, example.answer)


def _to_example(row: Row) -> Example:
    text, answer = require_texts(row, "text", "code")
    tests, hidden = _texts(row, "test_list"), _texts(row, "challenge_test_list")
    setup = optional_text(row, "test_setup_code")
    code = answer.replace("\r\n", "\n")
    defined = bound_names(code) - bound_names("\n".join(import_lines(code)))
    in_tests = used_names("\n".join(tests))
    used = dict.fromkeys((*in_tests, *used_names("\n".join([setup, *hidden]))))
    names = [name for name in used if name in defined]
    if not defined.intersection(in_tests):
        raise bad_row(
            f"{row.place}: {len(tests)} tests use {list(in_tests)[:5]}, and its code defines"
            f" {sorted(defined)[:5]}",
            allowed="at least one test of a name that `code` defines, in Python",
        )
    fields = {
        "text": text,
        "tests": tests,
        "hidden_tests": hidden,
        "setup": setup.replace("\r\n", "\n"),
        "names": names,
    }
    return make_example("mbpp", fields, code)


def _texts(row: Row, column: str) -> list[str]:
    """Return a column of texts; a missing one is empty.

    Raises: DataError naming the row, if it has another type.
    """
    values = row.values.get(column)
    values = [] if values is None else values
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise wrong_type(row, column, "a list of texts")
    return [value.replace("\r\n", "\n") for value in values]


_READING = RowReading(
    layout=DataLayout(
        train=("full/train-00000-of-00001.parquet",),
        held_out=("full/test-00000-of-00001.parquet",),
        shots=("full/prompt-00000-of-00001.parquet",),
    ),
    to_example=_to_example,
    question=lambda example: f"{example.fields['text']}\n{example.fields['tests'][0]}",
)
