"""The user's own rows as a task: a prompt, perhaps an answer, and rewards.

Reward functions get the row's columns by name, with the values of the file. They run in the workers that
judge replies.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from strop.errors import DataError
from strop.rollout import Example, Failure, Message, Outcome, Split, make_example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.task import SOURCE_HELP, CodeTaskSection, JudgedByUser, TrainingRows
from strop.spec.template import fill, list_names, refuse_malformed
from strop.tasks.answers import show_answer
from strop.tasks.code.extraction import (
    SPARE_VERIFY_S,
    WALL_S,
    extract_python,
    judged_outcome,
    no_code_outcome,
)
from strop.tasks.code.python_judge import judge_for
from strop.tasks.code.row_tests import read_tests
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import pose, pose_messages
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples
from strop.tasks.task import ProgramForm, TaskLimits
from strop.tasks.user.rewards import (
    BUILT_IN,
    FULL_MARKS_SLACK,
    RESERVED,
    Parts,
    UserReward,
    read_schema,
    score_built_in,
)
from strop.user_code import CodeRef, is_code

_MAX_REPLY_TOKENS = 1024
_VERIFIER = "rows-4"
_SANDBOXED = "python-tests"
_VERSIONS = {_SANDBOXED: "python-tests-3"}
"""Names of built-in rewards in a task's version, if they have changed."""
BUILT_IN_REWARDS = (*BUILT_IN, _SANDBOXED)
_ROLES = ("system", "user", "assistant")


class RowsSpec(CodeTaskSection, TrainingRows, JudgedByUser):
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
        " 'Solve: {question}'.",
    )
    answer: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the right answer. none = no answer is known; the reward function needs none.",
        json_schema_extra=expert("data sets name their answer differently"),
    )
    reward: Unhashed[tuple[str, ...]] = Field(
        strict=False,
        min_length=1,
        description="How a reply is judged: a function such as 'reward.py:score', called with reply, answer"
        " and the row's columns by name, or one written for TRL, which gets all replies to a prompt, or a"
        " built-in one: " + ", ".join(BUILT_IN_REWARDS) + ". A list of several is added up.",
    )
    reward_weights: tuple[float, ...] = Field(
        default=(),
        strict=False,
        description="One factor for each reward. Empty = all 1.",
        json_schema_extra=expert("several rewards are added up by weight"),
    )
    max_reward: float = Field(
        default=1.0,
        gt=0.0,
        le=1e6,
        description="What a right reply earns from all rewards together. A score above it is an error of the"
        " reward's, and nothing is trained on it.",
        json_schema_extra=expert("rewards of one's own may have another scale"),
    )
    min_reward: float = Field(
        default=0.0,
        ge=-1e6,
        le=0.0,
        description="What the worst reply earns from all rewards together: below 0 where one takes marks off."
        " A score below it is an error of the reward's, and nothing is trained on it.",
        json_schema_extra=expert("rewards of one's own may be negative"),
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
        return _SANDBOXED in self.reward

    @property
    def user_code(self) -> list[CodeRef]:
        """The files of the rewards."""
        return [*(CodeRef.parse(name) for name in self.reward if is_code(name)), *super().user_code]

    @field_validator("reward", mode="before")
    @classmethod
    def _read_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_wording(self) -> Self:
        for key, template in (("task.prompt", self.prompt), ("task.gold", self.gold)):
            refuse_malformed(key, template or "")
        if self.prompt_template is not None:
            raise SpecConflict(
                {"task.prompt_template": self.prompt_template, "task.prompt": self.prompt},
                "both word the question",
                allowed="task.prompt, which takes a template of columns",
                next_step="move the template into task.prompt",
            )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        unknown = [name for name in self.reward if name not in BUILT_IN_REWARDS and not is_code(name)]
        if unknown:
            raise SpecConflict(
                {"task.reward": unknown[0]},
                "there is no such reward",
                allowed=f"FILE.py:FUNCTION, {', '.join(BUILT_IN_REWARDS)}",
                next_step="name the file and its function, for example reward.py:score",
            )
        if self.answer is None and any(name in BUILT_IN_REWARDS for name in self.reward):
            raise SpecConflict(
                {"task.reward": list(self.reward), "task.answer": self.answer},
                "a built-in reward compares with an answer, and no column has one",
                allowed="task.answer with the column of the right answers",
                next_step="name it, or write a function that needs none",
            )
        if len(set(self.reward)) < len(self.reward):
            raise SpecConflict(
                {"task.reward": list(self.reward)},
                "one reward stands twice",
                allowed="each once",
                next_step="remove one, and give the other a weight in task.reward_weights",
            )
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise SpecConflict(
                {"task.reward_weights": list(self.reward_weights), "task.reward": list(self.reward)},
                f"{len(self.reward_weights)} weights for {len(self.reward)} rewards",
                allowed="one weight for each reward, in their order",
                next_step="correct the weights, or leave them out",
            )
        return self


class Rows(RowTask):
    """Right if the rewards add up to `task.max_reward`.

    Parts of the reward have the names of their functions. If a built-in reward compares with the answer, rows
    without one are left out and counted. The same prompt must have the same answer.
    """

    _spec: RowsSpec

    def __init__(self, spec: RowsSpec) -> None:
        self._functions = {name: UserReward(name) for name in spec.reward if name not in BUILT_IN_REWARDS}
        self.is_costly = spec.runs_programs and not self._functions
        self._weights = dict(zip(spec.reward, spec.reward_weights or [1.0] * len(spec.reward), strict=True))
        self._full_marks = spec.max_reward - FULL_MARKS_SLACK
        self._answers: dict[str, tuple[Any, Row]] = {}
        self._names = list_names(spec.prompt)
        reading = RowReading(
            layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",), is_unknown=True),
            to_example=self._to_example,
            question=lambda example: json.dumps(example.fields["prompt"]),
            why_left_out=self._why_left_out,
            split_key=self._split_key,
        )
        user_s = spec.judge_limit_s if self._functions else 0.0
        sandbox_s = WALL_S + SPARE_VERIFY_S if spec.runs_programs else 0.0
        limits = TaskLimits(
            # Only the user knows how long a full solution of these rows is.
            max_reply_tokens=spec.max_reply_tokens or _MAX_REPLY_TOKENS,
            max_reward=spec.max_reward,
            min_reward=spec.min_reward,
            max_goldless_frac=1.0,
            verify_limit_s=(user_s + sandbox_s) or None,
        )
        judges = [
            f"{self._functions[name].ref} {self._functions[name].digest}"
            if name in self._functions
            else _VERSIONS.get(name, name)
            for name in spec.reward
        ]
        super().__init__(
            spec,
            reading,
            limits,
            source=spec.source,
            prompt=spec.prompt,
            verifier=" ".join([_VERIFIER, *judges]),
        )

    def warm_up(self) -> None:
        """Load the user's functions into this process. Raises: ConfigError like `user_code.load_code`."""
        for reward in self._functions.values():
            reward.load()

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the row's prompt: its messages, or one user message."""
        prompt = example.fields["prompt"]
        if isinstance(prompt, str):
            return pose(prompt, thinking=self._spec.thinking)
        messages = [Message(role=message["role"], content=message["content"]) for message in prompt]
        return pose_messages(messages, self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Add the rewards up; those of TRL's form judge a group of one.

        Raises: any exception of a user's function; TypeError or ValueError if its return value is not
            allowed; SandboxError like `judge_python`.
        """
        return (await self.verify_group(example, [text], [await self.verify_member(example, text)]))[0]

    def compares(self, example: Example) -> bool:
        """Whether one of the rewards has TRL's form."""
        return any(function.takes_group for function in self._functions.values())

    async def verify_member(self, example: Example, text: str) -> Outcome:
        """Add up the rewards that judge each reply alone. Raises: as `verify`."""
        parts: Parts = {}
        outcome = Outcome(parts={})
        for name, weight in self._weights.items():
            function = self._functions.get(name)
            if function is not None and function.takes_group:
                continue
            if function is not None:
                scores = await function.score({**self._values_of(example), "reply": text})
            elif name == _SANDBOXED:
                outcome = await self._run_tests(example, text)
                scores = {name: outcome.parts["correct"]}
            else:
                scores = {name: score_built_in(name, text, example.fields["answer"])}
            parts |= _weigh(scores, weight)
        return replace(outcome, parts=parts)

    async def verify_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Add the rewards of TRL's form, each of which gets all replies. Raises: as `verify`."""
        judged = list(outcomes)
        for name, function in self._functions.items():
            if not function.takes_group:
                continue
            found = await function.score_group(self._values_of(example), texts)
            for place, scores in enumerate(found):
                if isinstance(scores, Failure):
                    judged[place] = replace(judged[place], failure=judged[place].failure or scores)
                    continue
                parts = {**judged[place].parts, **_weigh(scores, self._weights[name])}
                judged[place] = replace(judged[place], parts=parts)
        return [
            replace(one, is_correct=None if one.reward is None else one.reward >= self._full_marks)
            for one in judged
        ]

    def _values_of(self, example: Example) -> dict[str, Any]:
        """Return what functions may take, but for the replies."""
        values = {**example.fields["columns"], "prompt": example.fields["prompt"]}
        # Without `task.answer` a column of that name stays what it is.
        if self._spec.answer is not None or "answer" not in values:
            values["answer"] = example.fields["answer"]
        return values

    def program_form(self, example: Example) -> ProgramForm | None:
        """Return how a reply's program is used, if its tests alone decide."""
        if self._spec.reward != (_SANDBOXED,) or example.fields.get("answer") is None:
            return None
        return ProgramForm(entry_point=next(iter(read_tests(example.fields["answer"]).names), None))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the reply that `task.gold` describes, or the answer as the first reward reads it."""
        answer = example.fields["answer"]
        if self._spec.gold is not None:
            names = {**example.fields["columns"], "answer": show_answer(answer)}
            return (fill(self._spec.gold, names),)
        first = self._spec.reward[0]
        if answer is None or first in ("json-schema", _SANDBOXED):
            return ()
        return (f"\\boxed{{{show_answer(answer)}}}" if first == "math" else show_answer(answer),)

    def _read_splits(self) -> SplitExamples:
        splits = super()._read_splits()
        if splits.train and splits.held_out:
            return splits
        left = ", ".join(f"{number} {why}" for why, number in splits.left_out.items())
        raise DataError(
            f"task.source={self._source} has {len(splits.train)} training and {len(splits.held_out)}"
            f" held-out examples; rows left out: {left}",
            allowed="at least one row in each split",
            next_step="add rows, or the answers that are missing",
        )

    async def _run_tests(self, example: Example, text: str) -> Outcome:
        tests = read_tests(example.fields["answer"])
        code = extract_python(text, tests.names)
        if code is None:
            return no_code_outcome(None)
        job = replace(tests, source=code, wall_s=WALL_S)
        return judged_outcome(code, await judge_for(self._spec, job))

    def _why_left_out(self, row: Row, split: Split) -> str | None:
        self._require_columns(row)
        compares = any(name in BUILT_IN_REWARDS for name in self._spec.reward)
        return "without an answer" if compares and self._answer_of(row) is None else None

    def _split_key(self, row: Row) -> str:
        """Return a row's normalised prompt: rows with the same prompt are held out together."""
        self._require_columns(row)
        prompt = self._prompt_of(row)
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        return "\n".join(map(normal_text, texts))

    def _to_example(self, row: Row) -> Example:
        prompt, answer = self._prompt_of(row), self._answer_of(row)
        first_answer, first_row = self._answers.setdefault(json.dumps(prompt), (answer, row))
        if first_answer != answer:
            raise _malformed(
                row,
                f"asks what {first_row.place} asks, with another answer: {show_answer(answer)[:60]!r}",
                f"the answer of that row, {show_answer(first_answer)[:60]!r}",
            )
        for name in self._spec.reward:
            if name not in _ANSWER_FORMS:
                continue
            read, form = _ANSWER_FORMS[name]
            try:
                read(answer)
            except ValueError as error:
                raise _malformed(row, f"has an answer that {name} cannot read: {error}", form) from error
        columns = {name: _to_json(value) for name, value in row.values.items()}
        columns = {name: value for name, value in columns.items() if value is not ...}
        fields = {"prompt": prompt, "answer": answer, "columns": columns}
        return make_example(self._spec.name, fields, None if answer is None else show_answer(answer))

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
            reader = f"{reward.ref} (line {reward.signature.line}) takes it"
            required |= {name: reader for name in reward.signature.required if name not in RESERVED}
        missing = [f"{name!r} ({reader})" for name, reader in required.items() if name not in row.values]
        if missing:
            columns = ", ".join(row.values) or "none"
            raise _malformed(row, f"has no column {' and '.join(missing)}", f"its columns: {columns}")

    def _prompt_of(self, row: Row) -> Any:
        """Return a row's prompt: a text, or the messages of a chat. Raises: DataError naming the row."""
        spec = self._spec
        if self._names:
            prompt: Any = fill(
                spec.prompt, {name: show_answer(_to_json(row.values[name])) for name in self._names}
            )
        else:
            prompt = row.values[spec.prompt]
        if isinstance(prompt, str) and prompt.strip():
            return prompt
        messages = prompt if isinstance(prompt, list) else [None]
        if (
            messages
            and all(
                isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
                for one in messages
            )
            and prompt[-1]["role"] == "user"
        ):
            return [{"role": message["role"], "content": message["content"]} for message in prompt]
        raise _malformed(
            row,
            f"asks {prompt!r:.80}",
            "a text that is not empty, or a list of messages with role (system, user, assistant) and content,"
            " the last one the user's",
        )

    def _answer_of(self, row: Row) -> Any:
        """Return a row's answer as a JSON value; None if it has none."""
        answer = None if self._spec.answer is None else _to_json(row.values[self._spec.answer])
        return None if answer in ("", ...) else answer


def _weigh(scores: Parts, weight: float) -> Parts:
    return {key: None if value is None else weight * value for key, value in scores.items()}


_ANSWER_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "json-schema": (read_schema, "a JSON Schema, as a table or its text"),
    _SANDBOXED: (
        read_tests,
        "Python such as assert double(2) == 4, as a text or a list, or inputs and outputs; see docs/tasks.md",
    ),
}
"""For built-in rewards that need a special answer: its reader, and its form for messages."""


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
