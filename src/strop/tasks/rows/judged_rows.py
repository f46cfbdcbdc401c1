"""Rows whose replies rewards judge: built-in ones, functions of the user's, and a judge model's.

A `DataSet` says what of a row is asked and what is the answer: published ones are files (`presets`), that of
the user's own rows is made of their settings. Reward functions get the row's columns by name, with the values
of the file. They run in the workers that judge replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from strop.rollout import Example, Outcome, make_example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.judge import JudgeSettings
from strop.spec.task import SOURCE_HELP, CodeTaskSection, JudgedByUser, TrainingRows
from strop.spec.template import fill, list_names, refuse_malformed
from strop.tasks.answers import show_answer
from strop.tasks.graders import GRADERS
from strop.tasks.judge_model import JUDGE, JudgeModel
from strop.tasks.mathematics import find_boxes, warm_up
from strop.tasks.rows.layout import DataSet, Row, bad_row
from strop.tasks.rows.row_task import PublishedRows, RowTask, text_of
from strop.tasks.task import Outcomes
from strop.tasks.user.rewards import FULL_MARKS_SLACK, RESERVED, Reward, UserReward, Values
from strop.user_code import CodeRef, is_code

SANDBOXED = "python-tests"
_VERIFIER = "rewards-4"
_SYMBOLIC_LIMIT_S = 2.0
"""For sympy, whose time is not bounded by the text."""
_ROLES = ("system", "user", "assistant")
_MAX_REPLY_TOKENS = 1024
_BOXED = ("\\boxed{{{answer}}}",)
_USUAL_GOLD = {"math": _BOXED, "strict-math": _BOXED, SANDBOXED: ()}
"""How a reply looks that says the answer to a reward, if not the answer alone."""
REWARD_HELP = (
    "a function such as 'reward.py:score', called with reply, answer and the row's columns by name, or one"
    " written for TRL, which gets all replies to a prompt, or a built-in one: "
    + ", ".join((*GRADERS, SANDBOXED, JUDGE))
    + ". A list of several is added up."
)


class RewardSection(TrainingRows, JudgedByUser, JudgeSettings):
    """Settings of how replies are judged."""

    reward: Unhashed[tuple[str, ...]] = Field(
        default=(),
        strict=False,
        description=f"How a reply is judged, if not as the data set does: {REWARD_HELP}",
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
    pass_score: float | None = Field(
        default=None,
        description="Lowest reward of a reply that counts as solved. none = task.max_reward.",
        json_schema_extra=expert("the threshold of a judge, or of one reward among several, is a judgement"),
    )
    min_reward: float = Field(
        default=0.0,
        ge=-1e6,
        le=0.0,
        description="What the worst reply earns from all rewards together: below 0 where one takes marks off."
        " A score below it is an error of the reward's, and nothing is trained on it.",
        json_schema_extra=expert("rewards of one's own may be negative"),
    )

    @property
    def user_code(self) -> list[CodeRef]:
        """The files of the rewards."""
        return [*(CodeRef.parse(name) for name in self.reward if is_code(name)), *super().user_code]

    @field_validator("reward", mode="before")
    @classmethod
    def _read_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        names, weights = list(self.reward), list(self.reward_weights)
        known = [*GRADERS, JUDGE, *([SANDBOXED] if isinstance(self, CodeTaskSection) else [])]
        unknown = [name for name in names if name not in known and not is_code(name)]
        if unknown:
            raise SpecConflict(
                {"task.reward": unknown[0]},
                "there is no such reward",
                allowed=f"FILE.py:FUNCTION, {', '.join(known)}",
                next_step="name the file and its function, for example reward.py:score",
            )
        if (JUDGE in names) != bool(self.judge_url):
            raise SpecConflict(
                {"task.reward": names, "task.judge_url": self.judge_url},
                "a judge belongs to a reward",
                allowed="the reward 'judge' with task.judge_url, judge_model and judge_revision",
                next_step="name both, or neither",
            )
        if len(set(names)) < len(names) or (weights and len(weights) != len(names)):
            raise SpecConflict(
                {"task.reward": names, "task.reward_weights": weights},
                "a reward stands twice, or has no weight",
                allowed="each reward once, and no weights or one for each in their order",
                next_step="correct the weights, or leave them out",
            )
        return self


class PresetSpec(PublishedRows, RewardSection):
    """Word problems of gsm8k, competition problems, or multiple-choice questions of MMLU."""

    name: Literal["gsm8k", "math", "math500", "deepscaler", "aime", "mmlu"]


class ProgramSpec(CodeTaskSection, PublishedRows, RewardSection):
    """Problems in the columns of MBPP, HumanEval (for evaluation only) or APPS, answered by a program."""

    name: Literal["mbpp", "humaneval", "apps"]


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

    def read_data_set(self) -> DataSet:
        """Return what the settings say of the rows."""
        usual = () if self.answer is None else _USUAL_GOLD.get(self.reward[0], ("{answer}",))
        return DataSet(
            answer=self.answer,
            prompt=self.prompt,
            gold=usual if self.gold is None else (self.gold,),
            # Only the user knows how long a full solution of these rows is.
            max_reply_tokens=self.max_reply_tokens or _MAX_REPLY_TOKENS,
        )


class BuiltIn(Reward):
    """A built-in reward, which compares a reply with the answer."""

    def __init__(self, name: str, question: Callable[[Example], str]) -> None:
        """`question`: returns what a reply may repeat."""
        self.name = self.identity = name
        self._read, self.allowed, self._judge = GRADERS[name]
        self._question = question
        self.limit_s = _SYMBOLIC_LIMIT_S if name == "math" else 0.0
        self.warm_up = warm_up if name == "math" else super().warm_up  # type: ignore[method-assign]

    @override
    def read_answer(self, value: Any) -> str:
        if (answer := self._read(value)) is None:
            raise ValueError(f"{value!r:.80}")
        return answer

    def judge(self, example: Example, reply: str) -> Outcome:
        """Judge a reply to an example with this reward's answer."""
        return self._judge(example, reply, self._question(example))

    @override
    async def score(self, example: Example, values: Values, replies: Sequence[str]) -> list[Outcome]:
        example = replace(example, answer=self.read_answer(values["answer"]))
        judged = (self.judge(example, reply) for reply in replies)
        return [replace(one, parts={self.name: one.parts["correct"]}) for one in judged]


class JudgedRows(RowTask):
    """Right if the rewards add up to `task.pass_score`; parts of the reward have their names."""

    _spec: RewardSection

    def __init__(self, spec: PresetSpec | ProgramSpec | RowsSpec) -> None:
        data = spec.read_data_set()
        names = spec.reward or (str(data.reward),)
        used = dict.fromkeys([data.reward or names[0], *names])
        made = {name: self.make_reward(name, spec, data) for name in used}
        rewards, weights = [made[name] for name in names], spec.reward_weights or (1.0,) * len(names)
        self._readers = [one for one in made.values() if one.allowed]
        """Those that compare with a row's answer. The first says how it is shown."""
        # What fails by itself is not compared.
        pairs = sorted(zip(rewards, weights, strict=True), key=lambda pair: pair[0].compares)
        self._models = [(one, weight) for one, weight in pairs if isinstance(one, JudgeModel)]
        self._rewards = [pair for pair in pairs if pair not in self._models]
        self.asks_judge = bool(self._models)
        is_plain = [*weights] == [spec.max_reward] == [1.0]
        self._only = rewards[0] if is_plain and isinstance(rewards[0], BuiltIn) else None
        self._programs: Any = rewards[0] if names == (SANDBOXED,) else None
        """The reward that decides alone: one that compares, or tests of programs, which a sandbox limits."""
        self._pass_score = (spec.pass_score or spec.max_reward) - FULL_MARKS_SLACK
        self._is_strict = "strict-math" in names
        limit_s = sum(one.limit_s for one in rewards if one is not self._programs)
        super().__init__(
            spec,
            " ".join([_VERIFIER, *(one.identity for one in rewards)]),
            max_reward=spec.max_reward,
            min_reward=spec.min_reward,
            max_goldless_frac=1.0 if data.source is None else 0.0,
            verify_limit_s=limit_s or None,
        )
        functions = [one for one in rewards if isinstance(one, UserReward)]
        taken = {name for one in functions for name in one.signature.required}
        shown = {name for gold in data.gold for name in list_names(gold)} - {"answer"}
        asked = {*(self._places or [data.prompt]), *filter(None, [data.answer])}
        self._needed = (taken - RESERVED) | asked | shown
        """Columns that every row must have."""

    def make_reward(self, name: str, spec: Any, data: DataSet) -> Reward:
        """Return the reward of this name."""
        if is_code(name):
            return UserReward(name, spec.judge_limit_s)
        if name == JUDGE:
            return JudgeModel(spec)
        if name == SANDBOXED:
            from strop.tasks.code.row_tests import PythonTests

            return PythonTests(name, spec, is_published=bool(data.tests))
        return BuiltIn(name, self.question)

    @override
    def warm_up(self) -> None:
        for reward, _ in self._rewards:
            reward.warm_up()

    @override
    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the right answer in the forms of the data; for 'strict-math', the first alone."""
        fields = {**example.fields, "answer": example.answer}
        return tuple(
            fill(template, fields)
            for template in self._data.gold[: 1 if self._is_strict else None]
            if None not in [fields[name] for name in list_names(template)]
        )

    @override
    def entry_point(self, example: Example) -> str | None:
        """Return how a reply's program is used, if its tests alone decide."""
        if self._programs is None or example.answer is None:
            return None
        answer = example.answer if self._data.tests else self.answer_of(example)
        return next(iter(self._programs.read(answer).names), "")

    @override
    def to_example(self, row: Row) -> Example | str:
        read = self._read(row)
        if isinstance(read, str):
            return read
        fields, answer = read
        if missing := sorted(self._needed - fields.keys()):
            columns = ", ".join(row.values) or "none"
            raise bad_row(f"{row.place} has no {' and '.join(missing)}", f"its columns: {columns}")
        if answer in (None, "") and self._readers:
            return "without an answer"
        gold = show_answer(answer) or None
        for reward in reversed(self._readers):
            try:
                gold = reward.read_answer(answer)
            except ValueError as error:
                fault = f"{row.place} has an answer that {reward.name} cannot read: {error}"
                raise bad_row(fault, reward.allowed) from error
        example = make_example(self.name, fields, gold)
        asked = self.ask(example)
        if not _is_prompt(asked):
            allowed = f"a text, or messages with role ({', '.join(_ROLES)}) and content, the last the user's"
            raise bad_row(f"{row.place} asks {asked!r:.80}", allowed)
        for model, _ in self._models:
            model.require_values(self._values_of(example), row.place)
        return example

    def _read(self, row: Row) -> tuple[dict[str, Any], Any] | str:
        """Return the fields of a row's example, and its answer; or why it is left out.

        Raises: DataError naming the row.
        """
        data, fields = self._data, dict(row.values)
        if data.reward == SANDBOXED:
            from strop.tasks.code.problems import read_apps, read_statements

            read = read_statements(row, data) if data.tests else read_apps(row)
            return read if isinstance(read, str) else (fields | read[0], read[1])
        if data.source is not None:
            # Copies of a data set differ in the case of their columns.
            fields = {column.lower(): value for column, value in fields.items()}
        if data.choices is not None:
            choices = fields.get(data.choices)
            if not isinstance(choices, list) or len(choices) != len("abcd"):
                raise bad_row(f"{row.place} has choices {choices!r:.80}", allowed="a list of four choices")
            fields.update(zip("abcd", choices, strict=True))
        if data.topic is not None:
            topic = str(fields.get(data.topic) or "").replace("_", " ")
            fields["about"] = f" about {topic}" if topic else ""
        for name in self._places if data.source is not None else ():
            text_of(replace(row, values=fields), name, "" if name == "about" else None)
        column, _, key = (data.answer or "").partition(".")
        if key and data.answer not in fields and isinstance(fields.get(column), dict):
            # Such as verl's reward_model.ground_truth.
            fields |= {f"{column}.{name}": value for name, value in fields[column].items()}
        value = fields.get(data.answer or "")
        text = value if isinstance(value, str) else ""
        found = {
            "all": value,
            "behind ####": text.rpartition("####")[2] if "####" in text else "",
            "the last box": "".join(find_boxes(text)[-1:]),
        }[data.answer_in]
        if data.answer_in != "all":
            fields["solution"] = text_of(replace(row, values=fields), str(data.answer))
        if found == "" != value:
            raise bad_row(f"{row.place} has {data.answer}={value!r:.80}", f"one with {data.answer_in}")
        return fields, found

    def answer_of(self, example: Example) -> Any:
        """Return the answer as the row has it, where that is a field."""
        column = self._data.answer
        is_read = column is None or (self._data.source and not self._data.tests)
        return example.answer if is_read else example.fields[column]

    def _values_of(self, example: Example) -> dict[str, Any]:
        """Return what rewards may take, but for the replies."""
        values = {**example.fields, "prompt": self.ask(example)}
        # Without `task.answer` a column of that name stays what it is.
        if self._data.answer is not None or "answer" not in values:
            values["answer"] = self.answer_of(example)
        return values

    @override
    def compares(self, example: Example) -> bool:
        """Whether one of the rewards has TRL's form, or the judge model compares."""
        return any(reward.compares for reward, _ in (*self._rewards, *self._models))

    @override
    async def verify(self, example: Example, text: str) -> Outcome:
        """Add the rewards up; those of TRL's form judge a group of one. A judge model: `verify_here`.

        Raises: as `Reward.score`; SandboxError like `judge_python`; ConfigError without math-verify where it
            is needed.
        """
        if self._only is not None:
            return self._only.judge(example, text)
        return (await self.verify_group(example, [text], [Outcome(parts={})]))[0]

    @override
    async def verify_group(self, example: Example, texts: Sequence[str], outcomes: Outcomes) -> list[Outcome]:
        return await self._add_up(self._rewards, example, texts, outcomes)

    @override
    async def verify_here(self, example: Example, texts: Sequence[str], outcomes: Outcomes) -> list[Outcome]:
        return await self._add_up(self._models, example, texts, outcomes)

    async def _add_up(
        self,
        rewards: Sequence[tuple[Reward, float]],
        example: Example,
        texts: Sequence[str],
        outcomes: Outcomes,
    ) -> list[Outcome]:
        """Add rewards to the outcomes of replies. One that has failed is not judged further."""
        values, judged = self._values_of(example), list(outcomes)
        for reward, weight in rewards:
            places = [place for place, one in enumerate(judged) if one.failure is None]
            found = await reward.score(example, values, [texts[place] for place in places]) if places else []
            for place, one in zip(places, found, strict=True):
                judged[place] = _add(judged[place], one, weight)
        return [
            replace(one, is_correct=None if one.reward is None else one.reward >= self._pass_score)
            for one in judged
        ]


def _add(outcome: Outcome, found: Outcome, weight: float) -> Outcome:
    """Return an outcome with a reward's weighted parts. The first that knows the reply's form says it."""
    parts = {name: None if value is None else weight * value for name, value in found.parts.items()}
    formed = found if outcome.format_ok is None else outcome
    return replace(
        outcome,
        parts={**outcome.parts, **parts},
        format_ok=formed.format_ok,
        extracted=formed.extracted,
        timed_out=outcome.timed_out or found.timed_out,
        isolation=outcome.isolation or found.isolation,
        metrics={**outcome.metrics, **found.metrics},
        failure=found.failure,
    )


def _is_prompt(asked: Any) -> bool:
    """Whether it is a text, or the messages of a chat that the user ends."""
    if not asked or not isinstance(asked, list):
        return isinstance(asked, str) and bool(asked.strip())
    sound = (
        isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
        for one in asked
    )
    return all(sound) and asked[-1]["role"] == "user"
