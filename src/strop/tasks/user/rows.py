"""The user's own rows as a task: a prompt, perhaps an answer, and rewards.

Reward functions get the row's columns by name, with the values of the file. They run in the workers that
judge replies.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from strop.rollout import Example, Outcome
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.task import SOURCE_HELP, CodeTaskSection
from strop.spec.template import list_names, refuse_malformed
from strop.tasks.answers import show_answer
from strop.tasks.code.extraction import SPARE_VERIFY_S, WALL_S, judge_reply
from strop.tasks.code.row_tests import read_tests
from strop.tasks.rows.judged_rows import COMPARING, REWARD_HELP, SANDBOXED, JudgedRows, RewardSection, RowForm
from strop.tasks.rows.layout import DataLayout, Row

_MAX_REPLY_TOKENS = 1024
_TESTS = "Python such as assert double(2) == 4, as a text or a list, or inputs and outputs; see docs/tasks.md"
_USUAL_GOLD = {"math": ("\\boxed{{{answer}}}",), "json-schema": (), SANDBOXED: ()}
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
        if self.answer is None and any(name in COMPARING for name in self.reward):
            raise SpecConflict(
                {"task.reward": list(self.reward), "task.answer": self.answer},
                "a built-in reward compares with an answer, and no column has one",
                allowed="task.answer with the column of the right answers",
                next_step="name it, or write a function that needs none",
            )
        return self


class Rows(JudgedRows):
    """The rows of a file. The same prompt must have the same answer."""

    _spec: RowsSpec

    def __init__(self, spec: RowsSpec) -> None:
        usual = () if spec.answer is None else _USUAL_GOLD.get(spec.reward[0], ("{answer}",))
        form = RowForm(
            layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",), is_unknown=True),
            fields={},
            answer=spec.answer,
            prompt=spec.prompt,
            gold=usual if spec.gold is None else (spec.gold,),
            # Only the user knows how long a full solution of these rows is.
            max_reply_tokens=spec.max_reply_tokens or _MAX_REPLY_TOKENS,
        )
        # Programs alone are limited by their sandbox.
        is_mixed = spec.runs_programs and len(spec.reward) > 1
        super().__init__(spec, form, spec.source, WALL_S + SPARE_VERIFY_S if is_mixed else 0.0)
        if spec.runs_programs:
            self._readers[SANDBOXED] = _read_tests, _TESTS
        asked = dict.fromkeys(self._names or [spec.prompt], f"task.prompt={spec.prompt!r}")
        shown = {name: f"task.gold={spec.gold!r}" for name in list_names(spec.gold or "") if name != "answer"}
        compared = {} if spec.answer is None else {spec.answer: f"task.answer={spec.answer!r}"}
        self._needed |= asked | shown | compared

    def entry_point(self, example: Example) -> str | None:
        """Return how a reply's program is used, if its tests alone decide."""
        if self._spec.reward != (SANDBOXED,) or example.answer is None:
            return None
        return next(iter(read_tests(self._answer_of(example)).names), "")

    def _read(self, row: Row) -> tuple[dict[str, Any], Any]:
        return dict(row.values), row.values.get(self._form.answer or "")

    async def _judge(self, name: str, example: Example, text: str) -> Outcome:
        if name != SANDBOXED:
            return await super()._judge(name, example, text)
        return await judge_reply(text, read_tests(self._answer_of(example)), self._spec)


def _read_tests(answer: Any) -> str:
    read_tests(answer)
    return show_answer(answer)
