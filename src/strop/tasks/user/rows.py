"""The user's own rows as a task: a prompt, perhaps an answer, and rewards.

Reward functions get the row's columns by name, with the values of the file. They run in the workers that
judge replies.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.task import SOURCE_HELP, CodeTaskSection
from strop.spec.template import fill, list_names, refuse_malformed
from strop.tasks.answers import show_answer
from strop.tasks.code.extraction import SPARE_VERIFY_S, WALL_S, judge_reply
from strop.tasks.code.row_tests import read_tests
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import pose, pose_messages
from strop.tasks.rows.judged_rows import COMPARING, REWARD_HELP, SANDBOXED, JudgedRows, RewardSection
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.row_task import RowReading, SplitExamples, require_both
from strop.tasks.task import ProgramForm, TaskLimits
from strop.tasks.user.rewards import RESERVED

_MAX_REPLY_TOKENS = 1024
_ROLES = ("system", "user", "assistant")


class RowSettings(CodeTaskSection, RewardSection):
    """Settings of rows that the user brings."""

    source: Unhashed[str] = Field(
        min_length=1,
        description=SOURCE_HELP.format("openai/gsm8k").replace("Parquet or JSONL", "Parquet, JSONL or CSV")
        + " An s3:// URI is fetched. Files named train* and test* or validation* are the splits; one row in"
        " ten of anything else is held out.",
    )
    if TYPE_CHECKING:

        @property
        def prompt(self) -> str:
            """A column, or a template of columns."""

        @property
        def answer(self) -> str | None:
            """A column; None: no answer is known."""

        @property
        def gold(self) -> str | None:
            """How a right reply looks; None: as the first reward reads the answer."""

    @property
    def runs_programs(self) -> bool:
        """Whether one of the rewards runs the reply."""
        return SANDBOXED in self.reward

    @model_validator(mode="after")
    def _check_wording(self) -> Self:
        for key, template in (("task.prompt", self.prompt), ("task.gold", self.gold)):
            refuse_malformed(key, template or "")
        if self.prompt_template is not None:
            raise SpecConflict(
                {"task.prompt_template": self.prompt_template},
                "the rows word the question",
                allowed="task.prompt of rows, which takes a template of columns",
                next_step="move the template there, or the wording into the rows",
            )
        if self.answer is None and any(name in COMPARING for name in self.reward):
            raise SpecConflict(
                {"task.reward": list(self.reward), "task.answer": self.answer},
                "a built-in reward compares with an answer, and no column has one",
                allowed="task.answer with the column of the right answers",
                next_step="name it, or write a function that needs none",
            )
        return self


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


class Rows(JudgedRows):
    """The rows of a file. The same prompt must have the same answer."""

    _spec: RowSettings
    _drops_shared = False

    def __init__(self, spec: RowSettings) -> None:
        self._answers: dict[str, tuple[Any, Row]] = {}
        self._names = list_names(spec.prompt)
        reading = RowReading(
            layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",), is_unknown=True),
            to_example=self._to_example,
            question=lambda example: json.dumps(example.fields["prompt"]),
            why_left_out=self._why_left_out,
            split_key=self._split_key,
            drops_shared=self._drops_shared,
        )
        # Only the user knows how long a full solution of these rows is.
        tokens = spec.max_reply_tokens or _MAX_REPLY_TOKENS
        # Programs alone are limited by their sandbox.
        sandbox_s = WALL_S + SPARE_VERIFY_S if spec.runs_programs and len(spec.reward) > 1 else None
        limits = TaskLimits(max_reply_tokens=tokens, max_goldless_frac=1.0, verify_limit_s=sandbox_s)
        super().__init__(spec, reading, limits, rewards=spec.reward, source=spec.source, prompt=spec.prompt)
        self.is_costly = spec.runs_programs and not self._functions
        self._readers: dict[str, tuple[Callable[[Any], Any], str]] = {
            name: (one.require_gold, one.allowed) for name, one in self._graders.items()
        }
        if spec.runs_programs:
            self._readers[SANDBOXED] = read_tests, _TESTS

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the row's prompt: its messages, or one user message."""
        prompt = example.fields["prompt"]
        if isinstance(prompt, str):
            return pose(prompt, thinking=self._spec.thinking)
        messages = [Message(role=message["role"], content=message["content"]) for message in prompt]
        return pose_messages(messages, self._spec.thinking)

    def program_form(self, example: Example) -> ProgramForm | None:
        """Return how a reply's program is used, if its tests alone decide."""
        if self._spec.reward != (SANDBOXED,) or example.fields.get("answer") is None:
            return None
        return ProgramForm(entry_point=next(iter(read_tests(example.fields["answer"]).names), None))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the reply that `task.gold` describes, or the answer as the first reward reads it."""
        answer = example.fields["answer"]
        if self._spec.gold is not None:
            names = {**example.fields["columns"], "answer": show_answer(answer)}
            return (fill(self._spec.gold, names),)
        first = self._spec.reward[0]
        if answer is None or first in ("json-schema", SANDBOXED):
            return ()
        gold = example.answer or ""
        return (f"\\boxed{{{gold}}}" if first == "math" else gold,)

    def _values_of(self, example: Example) -> dict[str, Any]:
        values = {**example.fields["columns"], "prompt": example.fields["prompt"]}
        # Without `task.answer` a column of that name stays what it is.
        if self._spec.answer is not None or "answer" not in values:
            values["answer"] = example.fields["answer"]
        return values

    def _asked(self, example: Example) -> str:
        prompt = example.fields["prompt"]
        return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])

    async def _judge(self, name: str, example: Example, text: str) -> Outcome:
        if name != SANDBOXED:
            return await super()._judge(name, example, text)
        return await judge_reply(text, read_tests(example.fields["answer"]), self._spec)

    def _read_splits(self) -> SplitExamples:
        return require_both(super()._read_splits(), self._source)

    def _read(self, row: Row) -> Row:
        """Return a row with the columns that the settings name."""
        return row

    def _why_left_out(self, row: Row, split: Split) -> str | None:
        row = self._read(row)
        self._require_columns(row)
        compares = any(name in COMPARING for name in self._spec.reward)
        return "without an answer" if compares and self._answer_of(row) is None else None

    def _split_key(self, row: Row) -> str:
        """Return a row's normalised prompt: rows with the same prompt are held out together."""
        row = self._read(row)
        self._require_columns(row)
        prompt = self._prompt_of(row)
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        return "\n".join(map(normal_text, texts))

    def _to_example(self, row: Row) -> Example:
        row = self._read(row)
        prompt, answer = self._prompt_of(row), self._answer_of(row)
        first_answer, first_row = self._answers.setdefault(json.dumps(prompt), (answer, row))
        if first_answer != answer:
            raise _malformed(
                row,
                f"asks what {first_row.place} asks, with another answer: {show_answer(answer)[:60]!r}",
                f"the answer of that row, {show_answer(first_answer)[:60]!r}",
            )
        gold = None if answer is None else show_answer(answer)
        # The first reward says how the answer is shown.
        for name, (read, form) in reversed(self._readers.items()):
            try:
                found = read(answer)
            except ValueError as error:
                raise _malformed(row, f"has an answer that {name} cannot read: {error}", form) from error
            gold = found if name in self._graders else gold
        columns = {name: _to_json(value) for name, value in row.values.items()}
        columns = {name: value for name, value in columns.items() if value is not ...}
        fields = {"prompt": prompt, "answer": answer, "columns": columns}
        return make_example(self._spec.name, fields, gold)

    def _require_columns(self, row: Row) -> None:
        """Refuse a row that lacks a column which the settings or the functions name.

        Raises: DataError naming the row, the column, who needs it, and the row's columns.
        """
        spec = self._spec
        required = dict.fromkeys(self._names or [spec.prompt], f"task.prompt={spec.prompt!r}")
        required |= {
            name: f"task.gold={spec.gold!r}" for name in list_names(spec.gold or "") if name != "answer"
        }
        if spec.answer is not None:
            required[spec.answer] = f"task.answer={spec.answer!r}"
        for reward in self._functions.values():
            taken = (name for name in reward.signature.required if name not in RESERVED)
            required |= dict.fromkeys(taken, f"{reward.where} takes it")
        missing = [f"{name!r} ({reader})" for name, reader in required.items() if name not in row.values]
        if missing:
            columns = ", ".join(row.values) or "none"
            raise _malformed(row, f"has no column {' and '.join(missing)}", f"its columns: {columns}")

    def _prompt_of(self, row: Row) -> Any:
        """Return a row's prompt: a text, or the messages of a chat. Raises: DataError naming the row."""
        prompt = row.values.get(self._spec.prompt)
        if self._names:
            values = {name: show_answer(_to_json(row.values[name])) for name in self._names}
            prompt = fill(self._spec.prompt, values)
        if isinstance(prompt, str) and prompt.strip():
            return prompt
        messages = prompt if isinstance(prompt, list) else []
        if (
            messages
            and all(
                isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
                for one in messages
            )
            and messages[-1]["role"] == "user"
        ):
            return [{"role": message["role"], "content": message["content"]} for message in messages]
        raise _malformed(
            row,
            f"asks {prompt!r:.80}",
            f"a text that is not empty, or messages with role ({', '.join(_ROLES)}) and content, the last one"
            " the user's",
        )

    def _answer_of(self, row: Row) -> Any:
        """Return a row's answer as a JSON value; None if it has none."""
        answer = None if self._spec.answer is None else _to_json(row.values[self._spec.answer])
        return None if answer in ("", ...) else answer


_TESTS = "Python such as assert double(2) == 4, as a text or a list, or inputs and outputs; see docs/tasks.md"


def _to_json(value: Any) -> Any:
    """Return a column's value as a JSON value; `...` for what is or holds bytes, which no function gets."""
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        table = {str(key): _to_json(item) for key, item in value.items()}
        return ... if ... in table.values() else table
    if isinstance(value, list):
        items = [_to_json(item) for item in value]
        return ... if ... in items else items
    return value if value is None or isinstance(value, str | bool | int | float) else ...


def _malformed(row: Row, fault: str, allowed: str) -> DataError:
    return DataError(
        f"{row.place} {fault}", allowed=allowed, next_step="mend the row, or correct the setting"
    )
