"""Base of tasks that add up rewards: built-in ones, functions of the user's, and a judge model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from strop.rollout import Example, Failure, Outcome
from strop.spec.base import SpecConflict, expert
from strop.spec.judge import JudgeSettings
from strop.spec.task import CodeTaskSection, JudgedByUser, TrainingRows
from strop.tasks.graders import GRADERS, STRICTNESS
from strop.tasks.judge_model import JUDGE, JudgeModel
from strop.tasks.mathematics import equivalence
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples
from strop.tasks.task import TaskLimits
from strop.tasks.user.rewards import FULL_MARKS_SLACK, Parts, UserReward
from strop.user_code import CodeRef, is_code

SANDBOXED = "python-tests"
COMPARING = (*GRADERS, SANDBOXED)
"""Rewards that need an answer."""
BUILT_IN_REWARDS = (*COMPARING, JUDGE)
_VERIFIER = "rewards-1"
_SYMBOLIC_LIMIT_S = 2.0
"""For sympy, whose time is not bounded by the text."""
REWARD_HELP = (
    "a function such as 'reward.py:score', called with reply, answer and the row's columns by name, or one"
    " written for TRL, which gets all replies to a prompt, or a built-in one: "
    + ", ".join(BUILT_IN_REWARDS)
    + ". A list of several is added up."
)


class RewardSection(TrainingRows, JudgedByUser, JudgeSettings):
    """Settings of how replies are judged."""

    if TYPE_CHECKING:

        @property
        def reward(self) -> tuple[str, ...]:
            """The names of the rewards; empty: those of the data set."""

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

    @field_validator("reward", mode="before", check_fields=False)
    @classmethod
    def _read_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        names, weights = list(self.reward), list(self.reward_weights)
        known = [one for one in BUILT_IN_REWARDS if one != SANDBOXED or isinstance(self, CodeTaskSection)]
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


class JudgedRows(RowTask):
    """Right if the rewards add up to `task.pass_score`; parts of the reward have their names."""

    _spec: RewardSection

    def __init__(
        self,
        spec: RewardSection,
        reading: RowReading,
        limits: TaskLimits,
        *,
        rewards: Sequence[str],
        source: str,
        prompt: str,
        base_prompt: str = "",
    ) -> None:
        self._functions = {name: UserReward(name) for name in rewards if is_code(name)}
        self._weights = dict(zip(rewards, spec.reward_weights or [1.0] * len(rewards), strict=True))
        self._model = JudgeModel(spec) if spec.judge_url else None
        self.asks_judge = self._model is not None
        self._pass_score = (spec.pass_score or spec.max_reward) - FULL_MARKS_SLACK
        self._strictness = level = getattr(spec, "strictness", "standard")
        graders = {**GRADERS, "math": STRICTNESS[level]}
        self._graders = {name: graders[name] for name in rewards if name in graders}
        is_plain = list(self._weights.values()) == [spec.max_reward] == [1.0]
        self._only = next(iter(self._graders), None) if is_plain else None
        """The grader that decides alone."""
        self._is_symbolic = level == "symbolic" and "math" in self._weights
        limit_s = (
            (limits.verify_limit_s or 0.0)
            + spec.judge_limit_s * bool(self._functions)
            + _SYMBOLIC_LIMIT_S * self._is_symbolic
        )
        limits = replace(
            limits,
            max_reward=spec.max_reward,
            min_reward=spec.min_reward,
            verify_limit_s=limit_s or None,
        )
        digests = [f"{one.ref} {one.digest}" for one in self._functions.values()]
        if self._model is not None:
            digests.append(self._model.digest)
        super().__init__(
            spec,
            reading,
            limits,
            source=source,
            prompt=prompt,
            base_prompt=base_prompt,
            verifier=" ".join([_VERIFIER, *rewards, *digests]),
        )

    def warm_up(self) -> None:
        """Load the user's functions and what compares formulas. Raises: ConfigError like `load_code`."""
        if self._is_symbolic:
            equivalence.warm_up()
        for reward in self._functions.values():
            reward.load()

    def _values_of(self, example: Example) -> dict[str, Any]:
        """Return what functions may take, but for the replies."""
        raise NotImplementedError

    def _asked(self, example: Example) -> str:
        """Return the question, which a reply may repeat."""
        return ""

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
        parts: Parts = {}
        outcome = Outcome(parts={})
        for name, weight in self._weights.items():
            function = self._functions.get(name)
            if name == JUDGE or (function is not None and function.takes_group):
                continue
            if function is not None:
                scores = await function.score({**self._values_of(example), "reply": text})
            else:
                judged = await self._judge(name, example, text)
                outcome = outcome if outcome.format_ok is not None else judged
                scores = {name: judged.parts["correct"]}
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
                one = judged[place]
                if isinstance(scores, Failure):
                    judged[place] = replace(one, failure=one.failure or scores)
                else:
                    parts = {**one.parts, **_weigh(scores, self._weights[name])}
                    judged[place] = replace(one, parts=parts)
        return judged if self._model is not None else self._settle(judged)

    async def verify_here(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Add the reward of the judge model. Raises: like `JudgeModel.grade`."""
        if self._model is None:
            return outcomes
        values, weight = self._shown(example), self._weights[JUDGE]
        return self._settle(await self._model.grade(values, texts, outcomes, weight))

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

    def _read_splits(self) -> SplitExamples:
        splits, model = super()._read_splits(), self._model
        if model is not None:
            for example in (*splits.train, *splits.held_out):
                place = f"the row that asks {self._asked(example)!r:.80}"
                model.require_values(self._shown(example), place)
        return splits

    async def _judge(self, name: str, example: Example, text: str) -> Outcome:
        """Judge by a built-in reward that finds an answer. Raises: as `verify`."""
        return self._graders[name].judge(example, text, self._asked(example))


def _weigh(scores: Parts, weight: float) -> Parts:
    return {key: None if value is None else weight * value for key, value in scores.items()}
