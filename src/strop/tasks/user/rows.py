"""The user's own rows as a task: a prompt, perhaps an answer, and rewards.

Reward functions get the row's columns by name, with the values of the file. They run in the workers that
judge replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from strop.rollout import Example, Outcome
from strop.spec.base import Unhashed, expert
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import SOURCE_HELP, CodeTaskSection
from strop.spec.template import refuse_malformed
from strop.tasks.answers import show_answer
from strop.tasks.code.extraction import SPARE_VERIFY_S, WALL_S, judge_reply
from strop.tasks.code.row_tests import read_tests
from strop.tasks.rows.judged_rows import REWARD_HELP, SANDBOXED, JudgedRows, RewardSection
from strop.tasks.rows.layout import DataSet
from strop.tasks.user.rewards import Reward

_MAX_REPLY_TOKENS = 1024
_BOXED = ("\\boxed{{{answer}}}",)
_USUAL_GOLD = {"math": _BOXED, "strict-math": _BOXED, SANDBOXED: ()}
"""How a reply looks that says the answer to a reward, if not the answer alone."""


class RowsSpec(CodeTaskSection, RewardSection):
    """The rows of a file, with a reward function of the user's own or a built-in one."""

    name: Literal["rows"]
    source: Unhashed[str] = Field(
        min_length=1,
        description=SOURCE_HELP.format("openai/gsm8k").replace("Parquet or JSONL", "Parquet, JSONL or CSV")
        + " An s3:// URI is fetched. Files named train* and test* or validation* are the splits; one row in"
        " ten of anything else is held out.",
    )
    prompt: str = Field(
        min_length=1,
        description="What is asked: a column of texts or of chat messages, or a template of columns such as"
        " 'Solve: {question}'. A reply that messages end in is not asked.",
    )
    answer: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the right answer. none = no answer is known; the reward function needs none.",
        json_schema_extra=expert("data sets name their answer differently"),
    )
    reward: Unhashed[tuple[str, ...]] = Field(
        strict=False, min_length=1, description=f"How a reply is judged: {REWARD_HELP}"
    )
    gold: str | None = Field(
        default=None,
        min_length=1,
        description="How a right reply looks, for the self-test before training: a template of columns, for"
        " example '#### {answer}'. none = the answer, as the first reward reads it.",
        json_schema_extra=expert("the audit and the gate try the verifier with a right reply"),
    )

    @property
    def runs_programs(self) -> bool:
        """Whether one of the rewards runs the reply."""
        return SANDBOXED in self.reward

    @model_validator(mode="after")
    def _check_wording(self) -> Self:
        for key, template in (("task.prompt", self.prompt), ("task.gold", self.gold)):
            refuse_malformed(key, template or "")
        return self


class PythonTests(Reward):
    """The tests of a row, run over the reply's program."""

    name = identity = SANDBOXED
    allowed = (
        "Python such as assert double(2) == 4, as a text or a list, or inputs and outputs; see docs/tasks.md"
    )

    def __init__(self, spec: SandboxSettings) -> None:
        self._spec = spec

    @override
    def read_answer(self, value: Any) -> str:
        read_tests(value)
        return show_answer(value)

    @override
    async def score(
        self, example: Example, values: Mapping[str, Any], replies: Sequence[str]
    ) -> list[Outcome]:
        tests = read_tests(values["answer"])
        judged = await asyncio.gather(*(judge_reply(reply, tests, self._spec) for reply in replies))
        return [replace(one, parts={self.name: one.parts["correct"]}) for one in judged]


class Rows(JudgedRows):
    """The rows of a file. The same prompt must have the same answer."""

    def __init__(self, spec: RowsSpec) -> None:
        usual = () if spec.answer is None else _USUAL_GOLD.get(spec.reward[0], ("{answer}",))
        data = DataSet(
            answer=spec.answer,
            prompt=spec.prompt,
            gold=usual if spec.gold is None else (spec.gold,),
            # Only the user knows how long a full solution of these rows is.
            max_reply_tokens=spec.max_reply_tokens or _MAX_REPLY_TOKENS,
        )
        # Programs alone are limited by their sandbox.
        is_mixed = spec.runs_programs and len(spec.reward) > 1
        super().__init__(spec, data, WALL_S + SPARE_VERIFY_S if is_mixed else 0.0)

    @override
    def make_reward(self, name: str, spec: Any) -> Reward:
        return PythonTests(spec) if name == SANDBOXED else super().make_reward(name, spec)

    @override
    def entry_point(self, example: Example) -> str | None:
        """Return how a reply's program is used, if its tests alone decide."""
        if self._spec.reward != (SANDBOXED,) or example.answer is None:
            return None
        return next(iter(read_tests(self.answer_of(example)).names), "")
