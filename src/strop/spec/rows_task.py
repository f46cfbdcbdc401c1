"""The user's own rows, judged by the user's own function."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from strop.spec.base import SpecConflict
from strop.spec.code_tasks import CodeTaskSection
from strop.spec.task_base import SOURCE_HELP, TrainingRows
from strop.spec.template import refuse_malformed
from strop.user_code import is_code

BUILT_IN_REWARDS = ("exact", "contains", "math", "json-schema", "python-tests")


class RowsSpec(CodeTaskSection, TrainingRows):
    """The rows of a file, with a reward function of the user's own or a built-in one."""

    name: Literal["rows"] = Field(description="Which task: the user's own rows and reward.")
    source: str = Field(
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
    )
    reward: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        description="How a reply is judged: a function such as 'reward.py:score', called with reply, answer"
        " and the row's columns by name, or one written for TRL, or a built-in one: "
        + ", ".join(BUILT_IN_REWARDS)
        + ". A list of several is added up.",
    )
    reward_weights: tuple[float, ...] = Field(
        default=(), strict=False, description="One factor for each reward. Empty = all 1."
    )
    max_reward: float = Field(
        default=1.0,
        gt=0.0,
        le=1e6,
        description="What a right reply earns from all rewards together. A score above it is an error of the"
        " reward's, and nothing is trained on it.",
    )
    min_reward: float = Field(
        default=0.0,
        ge=-1e6,
        le=0.0,
        description="What the worst reply earns from all rewards together: below 0 where one takes marks off."
        " A score below it is an error of the reward's, and nothing is trained on it.",
    )
    reward_limit_s: float = Field(
        default=10.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that the user's functions may take for a reply. Then their process is killed,"
        " and a second attempt has four times as long.",
    )
    gold: str | None = Field(
        default=None,
        min_length=1,
        description="How a right reply looks, for the self-test before training: a template of columns, for"
        " example '#### {answer}'. none = the answer, as the first reward reads it.",
    )

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
