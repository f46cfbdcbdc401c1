"""Grade-school, competition and instruction problems in the schema of RLVR-GSM-MATH-IF-Mixed.

The column `dataset` decides which task judges a row: `gsm8k`, `math` or `rlvr-ifeval`. The prompts of the
first two contain solved examples whose answers begin with 'So the answer is'; they are rewritten to 'The
answer is', the words that lm-eval's gsm8k_cot looks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, make_example
from strop.spec.base import Unhashed
from strop.spec.task import SOURCE_HELP, TrainingRows
from strop.tasks.answers import parse_number
from strop.tasks.contract import Task, TaskLimits
from strop.tasks.instructions.tasks import (
    InstructionTask,
    RlvrIfevalSpec,
    make_instruction_example,
    read_function,
    read_messages,
)
from strop.tasks.mathematics.boxed_math import BoxedMath, MathAnswer, MathSpec, require_readable
from strop.tasks.mathematics.gsm8k import Gsm8k, Gsm8kSpec
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, require_texts
from strop.tasks.version import fit_limits

_MAX_REPLY_TOKENS = 2048
_PROMPT = "{prompt}"
_REWRITTEN = ("So the answer is ", "The answer is ")
_VERIFIER = "rlvr-mixed-3"
_KINDS = ("gsm8k", "math", "ifeval")
_VERIFY_LIMIT_S = 2.0


class RlvrMixedSpec(MathAnswer, TrainingRows):
    """Grade-school, competition and instruction problems in one data set, for training."""

    name: Literal["rlvr-mixed"]
    source: Unhashed[str] = Field(
        default="allenai/RLVR-GSM-MATH-IF-Mixed-Constraints",
        min_length=1,
        description=SOURCE_HELP.format("allenai/RLVR-GSM-MATH-IF-Mixed-Constraints"),
    )


class RlvrMixed(RowTask):
    """Each row is judged by the task of its kind, `format_ok` and metrics included."""

    def __init__(self, spec: RlvrMixedSpec) -> None:
        # The data of these tasks is never read: they only judge.
        instructions = InstructionTask(RlvrIfevalSpec(name="rlvr-ifeval"))
        self._math = BoxedMath(MathSpec(name="math", strictness=spec.strictness))
        self._judges: Mapping[str, Task] = {
            "gsm8k": Gsm8k(Gsm8kSpec(name="gsm8k")),
            "math": self._math,
            "ifeval": instructions,
        }
        self._checkers = instructions.checkers
        limits_by_kind = {
            kind: TaskLimits(
                max_reply_tokens=_MAX_REPLY_TOKENS,
                base_stop_strings=judge.limits.base_stop_strings,
                max_goldless_frac=judge.limits.max_goldless_frac,
                verify_limit_s=_VERIFY_LIMIT_S if spec.strictness == "symbolic" else None,
            )
            for kind, judge in self._judges.items()
        }
        self._limits_by_kind = {kind: fit_limits(limits, spec) for kind, limits in limits_by_kind.items()}
        reading = RowReading(
            layout=DataLayout(train=("data/train-00000-of-00001.parquet",), held_out=()),
            to_example=self._to_example,
            question=lambda example: str(example.fields["prompt"]),
            drops_shared=True,
        )
        # Without stop strings; `limits_of` has the limits of an example.
        super().__init__(
            spec,
            reading,
            limits_by_kind["ifeval"],
            source=spec.source,
            prompt=_PROMPT,
            verifier="".join((_VERIFIER, *_REWRITTEN, str(sorted(self._limits_by_kind.items())))),
        )

    def warm_up(self) -> None:
        """Load the comparison of formulas, if the settings use it."""
        self._math.warm_up()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of examples by kind, and of rows left out; reads the data."""
        splits = self._splits
        kinds = Counter(example.fields["kind"] for example in (*splits.train, *splits.held_out))
        return {**kinds, **super().counts}

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the limits of the example's kind."""
        return self._limits_by_kind[self._kind(example)]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the row's own text, solved examples included."""
        prompt = example.fields["prompt"]
        return pose(_PROMPT.format(prompt=prompt), base=prompt, thinking=self._spec.thinking)

    def verify(self, example: Example, text: str) -> Outcome:
        """Judge as the task of the row's kind does."""
        return self._judges[self._kind(example)].verify(example, text)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold replies of the task of the row's kind."""
        kind = self._kind(example)
        if kind == "gsm8k":
            # The data set has the answer without its worked solution.
            return (f"The answer is {example.answer}.",)
        return self._judges[kind].gold_replies(example)

    def _kind(self, example: Example) -> str:
        kind = example.fields.get("kind")
        if kind not in _KINDS:
            raise DataError(f"example {example.example_id} of task {example.task} is of kind {kind!r}")
        return str(kind)

    def _to_example(self, row: Row) -> Example:
        (dataset,) = require_texts(row, "dataset")
        kind, prompt = dataset.lower(), read_messages(row)
        if kind == "ifeval":
            example = make_instruction_example(self.name, self._checkers, row, prompt, read_function(row))
            return make_example(self.name, {**example.fields, "kind": kind}, None)
        if kind not in _KINDS:
            raise DataError(
                f"{row.place} is of dataset {dataset!r}",
                allowed=f"{', '.join(_KINDS)}, in any case",
                next_step="remove the row, or correct its column",
            )
        (answer,) = require_texts(row, "ground_truth")
        if kind == "gsm8k" and parse_number(answer) is None:
            raise bad_row(f"the ground_truth in {row.place} is {answer!r}", allowed="a number")
        fields = {"prompt": prompt.replace(*_REWRITTEN), "kind": kind}
        return make_example(self.name, fields, require_readable(row, answer))
