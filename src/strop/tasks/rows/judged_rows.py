"""Rows whose replies rewards judge: built-in ones, functions of the user's, and a judge model's.

A `RowForm` says what of a row is asked and what is the answer: published data sets have one as a file
(`presets`), rows of the user's own have one by their settings (`user.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from strop.rollout import Example, Failure, Message, Outcome, make_example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.judge import JudgeSettings
from strop.spec.task import CodeTaskSection, JudgedByUser, TrainingRows
from strop.spec.template import fill, list_names
from strop.tasks.answers import show_answer
from strop.tasks.graders import GRADERS, STRICTNESS
from strop.tasks.judge_model import JUDGE, JudgeModel
from strop.tasks.mathematics import equivalence
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask
from strop.tasks.task import TaskLimits
from strop.tasks.user.rewards import FULL_MARKS_SLACK, RESERVED, Parts, UserReward
from strop.user_code import CodeRef, is_code

SANDBOXED = "python-tests"
COMPARING = (*GRADERS, SANDBOXED)
"""Rewards that need an answer."""
_VERIFIER = "rewards-3"
_SYMBOLIC_LIMIT_S = 2.0
"""For sympy, whose time is not bounded by the text."""
_ROLES = ("system", "user", "assistant")
REWARD_HELP = (
    "a function such as 'reward.py:score', called with reply, answer and the row's columns by name, or one"
    " written for TRL, which gets all replies to a prompt, or a built-in one: "
    + ", ".join((*COMPARING, JUDGE))
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


class RowForm(BaseModel):
    """How rows are asked and which replies are right."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | None = None
    """The hub id of a published data set."""
    layout: DataLayout
    fields: Mapping[str, str]
    """Columns that hold texts, by the names of the examples' fields; the first is the question. Empty: all
    columns are fields, and the question is the prompt."""
    choices: str | None = None
    """Column with a list of four choices, which prompts call a, b, c and d."""
    topic: str | None = None
    """Column with the subject of a question; may be empty. In prompts, {about} is ' about ' and its words."""
    answer: str | None
    """Column of the right answer."""
    answer_in: Literal["all", "behind ####", "the last box"] = "all"
    """Where in the column it stands."""
    reward: Literal["number", "marked-number", "math", "letter"] | None = None
    """How it is compared, by `graders`, if the run names no rewards."""
    prompt: str
    """What is asked in a chat: a column of texts or of messages, or a template of fields."""
    base_prompt: str | None = None
    """What is asked in plain text, if not that."""
    base_stop: tuple[str, ...] = ()
    gold: tuple[str, ...]
    """Right replies, the form that the prompt asks for first."""
    max_reply_tokens: int = Field(ge=1)


class JudgedRows(RowTask):
    """Right if the rewards add up to `task.pass_score`; parts of the reward have their names."""

    _spec: RewardSection

    def __init__(self, spec: RewardSection, form: RowForm, source: str, sandbox_s: float = 0.0) -> None:
        """`sandbox_s`: time that programs of replies take beside other rewards."""
        self._form, self._names = form, list_names(form.prompt)
        rewards = spec.reward or (str(form.reward),)
        self._functions = {name: UserReward(name) for name in rewards if is_code(name)}
        self._weights = dict(zip(rewards, spec.reward_weights or [1.0] * len(rewards), strict=True))
        self._model = JudgeModel(spec) if spec.judge_url else None
        self.asks_judge = self._model is not None
        self._pass_score = (spec.pass_score or spec.max_reward) - FULL_MARKS_SLACK
        self._strictness = level = getattr(spec, "strictness", "standard")
        graders = {**GRADERS, "math": STRICTNESS[level]}
        names = dict.fromkeys([form.reward or rewards[0], *rewards])
        self._graders = {name: graders[name] for name in names if name in graders}
        self._readers: dict[str, tuple[Callable[[Any], str], str]] = {
            name: (one.require_gold, one.allowed) for name, one in self._graders.items()
        }
        """By reward: what reads a row's answer, and what it can read. The first says how it is shown."""
        is_plain = list(self._weights.values()) == [spec.max_reward] == [1.0]
        self._only = rewards[0] if is_plain and rewards[0] in self._graders else None
        """The grader that decides alone."""
        self._is_symbolic = level == "symbolic" and "math" in self._weights
        limit_s = sandbox_s + spec.judge_limit_s * bool(self._functions)
        limit_s += _SYMBOLIC_LIMIT_S * self._is_symbolic
        self._needed = {
            name: f"{function.where} takes it"
            for function in self._functions.values()
            for name in function.signature.required
            if name not in RESERVED
        }
        """Who needs a field of the examples, by its name."""
        code = {name: f"{one.ref} {one.digest}" for name, one in self._functions.items()}
        identity = [code.get(name, name) for name in rewards] + ([self._model.digest] if self._model else [])
        # Another data set for evaluation has other files.
        is_other = not form.layout.train and source != form.source
        super().__init__(
            spec,
            RowReading(
                layout=replace(form.layout, is_unknown=form.layout.is_unknown or is_other),
                to_example=self._to_example,
                question=self._question,
                one_answer=form.source is None,
            ),
            TaskLimits(
                max_reply_tokens=form.max_reply_tokens,
                base_stop_strings=form.base_stop,
                max_reward=spec.max_reward,
                min_reward=spec.min_reward,
                max_goldless_frac=1.0 if form.source is None else 0.0,
                verify_limit_s=limit_s or None,
            ),
            source=source,
            prompt=form.prompt,
            base_prompt=form.base_prompt or "",
            verifier=" ".join([_VERIFIER, *identity]),
        )

    def warm_up(self) -> None:
        """Load the user's functions and what compares formulas. Raises: ConfigError like `load_code`."""
        if self._is_symbolic:
            equivalence.warm_up()
        for reward in self._functions.values():
            reward.load()

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the row's prompt: its messages, or one of the user's."""
        asked, base, thinking = self._ask(example), self._form.base_prompt, self._spec.thinking
        if isinstance(asked, str):
            base = None if base is None else fill(base, self.prompt_fields(example))
            return pose(asked, thinking, base=base)
        return pose([Message(role=one["role"], content=one["content"]) for one in asked], thinking)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the right answer in the forms of the data; of strictness 'strict', the first alone."""
        fields, forms = {**self.prompt_fields(example), "answer": example.answer}, self._form.gold
        return tuple(
            fill(template, fields)
            for template in forms[: 1 if self._strictness == "strict" else None]
            if example.answer is not None or "answer" not in list_names(template)
        )

    def _read(self, row: Row) -> tuple[dict[str, Any], Any] | str:
        """Return the fields of a row's example and its answer, or why it is left out.

        Raises: DataError naming the row.
        """
        raise NotImplementedError

    def _to_example(self, row: Row) -> Example | str:
        read = self._read(row)
        if isinstance(read, str):
            return read
        fields, answer = read
        if missing := [f"{name!r} ({who})" for name, who in self._needed.items() if name not in fields]:
            columns = ", ".join(row.values) or "none"
            raise bad_row(f"{row.place} has no column {' and '.join(missing)}", f"its columns: {columns}")
        if answer in (None, "") and self._readers:
            return "without an answer"
        gold = show_answer(answer) or None
        for name, (read_gold, allowed) in reversed(self._readers.items()):
            try:
                gold = read_gold(answer)
            except ValueError as error:
                raise bad_row(
                    f"{row.place} has an answer that {name} cannot read: {error}", allowed
                ) from error
        example = make_example(self.name, fields, gold)
        asked = self._ask(example)
        if not _is_prompt(asked):
            allowed = (
                f"a text, or messages with role ({', '.join(_ROLES)}) and content, the last one the user's"
            )
            raise bad_row(f"{row.place} asks {asked!r:.80}", allowed)
        if self._model is not None:
            self._model.require_values(self._shown(example), row.place)
        return example

    def _ask(self, example: Example) -> Any:
        """Return the prompt: a text, or the messages of a chat."""
        fields = self.prompt_fields(example)
        if self._names:
            return fill(self._form.prompt, {name: show_answer(fields[name]) for name in self._names})
        match asked := fields[self._form.prompt]:
            case [*before, {"role": "assistant"}]:
                # Rows of demonstrations hold the reply too.
                return before
        return asked

    def _question(self, example: Example) -> str:
        """Return what a reply may repeat, and what makes an example another one."""
        asked = self._ask(example)
        return asked if isinstance(asked, str) else "\n".join(one["content"] for one in asked)

    def _answer_of(self, example: Example) -> Any:
        """Return the answer as the row has it, where that is a field."""
        column = None if self._form.fields else self._form.answer
        return example.answer if column is None else example.fields[column]

    def _values_of(self, example: Example) -> dict[str, Any]:
        """Return what functions may take, but for the replies."""
        values = {**example.fields, "prompt": self._ask(example)}
        # Without `task.answer` a column of that name stays what it is.
        if self._form.answer is not None or "answer" not in values:
            values["answer"] = self._answer_of(example)
        return values

    async def verify(self, example: Example, text: str) -> Outcome:
        """Add the rewards up; those of TRL's form judge a group of one. A judge model: `verify_here`.

        Raises: any exception of a user's function; TypeError or ValueError if its return value is not
            allowed; SandboxError like `judge_python`; ConfigError without math-verify where it is needed.
        """
        if self._only is not None:
            return await self._judge(self._only, example, text)
        return (await self.verify_group(example, [text], [await self.verify_member(example, text)]))[0]

    def compares(self, example: Example) -> bool:
        """Whether one of the rewards has TRL's form, or the judge model compares."""
        return self._spec.compares or any(function.takes_group for function in self._functions.values())

    async def verify_member(self, example: Example, text: str) -> Outcome:
        """Add up the rewards that judge each reply alone. Raises: as `verify`."""
        outcome = Outcome(parts={})
        for name in self._weights:
            function = self._functions.get(name)
            if function is None and name != JUDGE:
                judged = await self._judge(name, example, text)
                kept = outcome if outcome.format_ok is not None else judged
                outcome = self._add(replace(kept, parts=outcome.parts), name, {name: judged.parts["correct"]})
            elif function is not None and not function.takes_group:
                scores = await function.score({**self._values_of(example), "reply": text})
                outcome = self._add(outcome, name, scores)
        return outcome

    async def verify_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Add the rewards of TRL's form, each of which gets all replies. Raises: as `verify`."""
        judged = list(outcomes)
        for name, function in self._functions.items():
            if function.takes_group:
                found = await function.score_group(self._values_of(example), texts)
                judged = [self._add(one, name, scores) for one, scores in zip(judged, found, strict=True)]
        return judged if self._model is not None else self._settle(judged)

    async def verify_here(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Add the reward of the judge model. Raises: like `JudgeModel.grade`."""
        if self._model is None:
            return outcomes
        values, weight = self._shown(example), self._weights[JUDGE]
        return self._settle(await self._model.grade(values, texts, outcomes, weight))

    def _add(self, outcome: Outcome, name: str, scores: Parts | Failure) -> Outcome:
        """Return an outcome with the weighted scores of a reward, or with its failure."""
        if isinstance(scores, Failure):
            return replace(outcome, failure=outcome.failure or scores)
        weight = self._weights[name]
        weighted = {key: None if value is None else weight * value for key, value in scores.items()}
        return replace(outcome, parts={**outcome.parts, **weighted})

    def _settle(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Say which replies are correct, all rewards added up."""
        return [
            replace(one, is_correct=None if one.reward is None else one.reward >= self._pass_score)
            for one in outcomes
        ]

    def _shown(self, example: Example) -> dict[str, str]:
        """Return what a rubric may show, but for the reply: the columns, prompt and answer."""
        values = self._values_of(example) | {"prompt": "\n\n".join(one.text for one in self.render(example))}
        if example.answer is not None:
            values["answer"] = example.answer
        return {name: str(value) for name, value in values.items() if isinstance(value, str | int | float)}

    async def _judge(self, name: str, example: Example, text: str) -> Outcome:
        """Judge by a built-in reward that finds an answer. Raises: as `verify`."""
        grader = self._graders[name]
        if name != next(iter(self._graders)):
            # The first has read the answer.
            example = replace(example, answer=grader.require_gold(self._answer_of(example)))
        return grader.judge(example, text, self._question(example))


def _is_prompt(asked: Any) -> bool:
    """Whether it is a text, or the messages of a chat that the user ends."""
    if not asked or not isinstance(asked, list):
        return isinstance(asked, str) and bool(asked.strip())
    sound = (
        isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
        for one in asked
    )
    return all(sound) and asked[-1]["role"] == "user"
