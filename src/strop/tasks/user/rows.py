"""The user's own rows as a task: a prompt, perhaps an answer, and rewards; and demonstrations as such rows.

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
from strop.tasks.rows.demonstrations import SftRow, read_sft_row, refuse_double_names
from strop.tasks.rows.judged_rows import COMPARING, REWARD_HELP, SANDBOXED, JudgedRows, RewardSection, RowForm
from strop.tasks.rows.layout import DataLayout, Row

_MAX_REPLY_TOKENS = 1024
_TESTS = "Python such as assert double(2) == 4, as a text or a list, or inputs and outputs; see docs/tasks.md"


class RowSettings(CodeTaskSection, RewardSection):
    """Settings of rows that the user brings."""

    source: Unhashed[str] = Field(
        min_length=1,
        description=SOURCE_HELP.format("openai/gsm8k").replace("Parquet or JSONL", "Parquet, JSONL or CSV")
        + " An s3:// URI is fetched. Files named train* and test* or validation* are the splits; one row in"
        " ten of anything else is held out.",
    )

    @property
    def runs_programs(self) -> bool:
        """Whether one of the rewards runs the reply."""
        return SANDBOXED in self.reward


class RowsSpec(RowSettings):
    """The rows of a file, with a reward function of the user's own or a built-in one."""

    name: Literal["rows"]
    prompt: str = Field(
        min_length=1,
        description="What is asked: a column of texts or of chat messages, or a template of columns such as"
        " 'Solve: {question}'.",
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
    def wording(self) -> tuple[str, str | None, tuple[str, ...]]:
        """The prompt, the column of the answer, and how right replies look."""
        usual = () if self.answer is None else _gold_form(self.reward[0])
        return self.prompt, self.answer, usual if self.gold is None else (self.gold,)

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


class SftJsonlSpec(RowSettings):
    """Prompts with demonstrations and gold answers, in the rows that `sft.source` takes."""

    name: Literal["sft-jsonl"]
    reward: Unhashed[tuple[str, ...]] = Field(
        default=("number",),
        strict=False,
        min_length=1,
        description=f"How a reply is judged: {REWARD_HELP}",
    )
    subset: str | None = Field(
        default=None,
        min_length=1,
        description="Use only the rows whose key `source` is this text; the others are counted."
        " none = all rows.",
        json_schema_extra=expert("a file may hold several sources"),
    )

    @property
    def wording(self) -> tuple[str, str | None, tuple[str, ...]]:
        """As of `RowsSpec`: demonstrations are right replies."""
        return "messages", "gold", (*_gold_form(self.reward[0]), "{completion}")


def _gold_form(reward: str) -> tuple[str, ...]:
    """Return how a reply looks that says the answer to a reward."""
    if reward in ("json-schema", SANDBOXED):
        return ()
    return ("\\boxed{{{answer}}}",) if reward == "math" else ("{answer}",)


class Rows(JudgedRows):
    """The rows of a file. The same prompt must have the same answer."""

    _spec: RowSettings

    def __init__(self, spec: RowsSpec | SftJsonlSpec) -> None:
        prompt, answer, gold = spec.wording
        form = RowForm(
            layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",), is_unknown=True),
            fields={},
            answer=answer,
            reward=None,
            prompt=prompt,
            base_prompt=None,
            gold=gold,
            # Only the user knows how long a full solution of these rows is.
            max_reply_tokens=spec.max_reply_tokens or _MAX_REPLY_TOKENS,
        )
        # Programs alone are limited by their sandbox.
        is_mixed = spec.runs_programs and len(spec.reward) > 1
        super().__init__(spec, form, spec.source, WALL_S + SPARE_VERIFY_S if is_mixed else 0.0)
        if spec.runs_programs:
            self._readers[SANDBOXED] = _read_tests, _TESTS
        self._needed |= dict.fromkeys(self._names or [prompt], f"task.prompt={prompt!r}")
        for template in gold:
            names = (name for name in list_names(template) if name != "answer")
            self._needed |= dict.fromkeys(names, f"task.gold={template!r}")
        self._needed |= {} if answer is None else {answer: f"task.answer={answer!r}"}

    def entry_point(self, example: Example) -> str | None:
        """Return how a reply's program is used, if its tests alone decide."""
        if self._spec.reward != (SANDBOXED,) or example.answer is None:
            return None
        return next(iter(read_tests(self._answer_of(example)).names), "")

    def _read(self, row: Row) -> tuple[dict[str, Any], Any] | str:
        return dict(row.values), row.values.get(self._form.answer or "")

    async def _judge(self, name: str, example: Example, text: str) -> Outcome:
        if name != SANDBOXED:
            return await super()._judge(name, example, text)
        return await judge_reply(text, read_tests(self._answer_of(example)), self._spec)


class SftJsonl(Rows):
    """Rows without the key gold are left out. Of several replies to one prompt, the first is a gold reply."""

    _spec: SftJsonlSpec

    def __init__(self, spec: SftJsonlSpec) -> None:
        self._by_prompt_id: dict[str, SftRow] = {}
        super().__init__(spec)

    def _read(self, row: Row) -> tuple[dict[str, Any], Any] | str:
        parsed = read_sft_row(row)
        refuse_double_names([self._by_prompt_id.setdefault(parsed.prompt_id, parsed), parsed])
        if self._spec.subset not in (None, parsed.source):
            return "of other sources"
        if parsed.gold is None:
            return "without an answer"
        messages = [{"role": message.role, "content": message.text} for message in parsed.messages]
        fields = {"messages": messages[:-1], "completion": messages[-1]["content"], "gold": parsed.gold}
        others = {"problem": parsed.problem, "source": parsed.source}
        return {**fields, **{name: one for name, one in others.items() if one is not None}}, parsed.gold


def _read_tests(answer: Any) -> str:
    read_tests(answer)
    return show_answer(answer)
