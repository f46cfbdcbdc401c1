"""Tasks that make their own examples."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from strop.spec.base import SpecConflict
from strop.spec.free_values import check_free_table
from strop.spec.task_base import TaskSection


class ArithmeticSpec(TaskSection):
    """Sums, differences and products of two whole numbers: What is a + b?"""

    name: Literal["arithmetic"] = Field(default="arithmetic", description="Which task: sums of two numbers.")
    min_value: int = Field(
        default=1, ge=0, le=10**9, description="Smallest number, included; 10 with 99: two digits each."
    )
    max_value: int = Field(default=20, ge=0, le=10**9, description="Largest number, included.")
    operators: Literal["+", "-", "*", "+-", "+*", "-*", "+-*"] = Field(
        default="+", description="What is done with the two numbers; each of the signs equally often."
    )
    num_held_out: int = Field(
        default=100,
        ge=1,
        le=10**7,
        description="Pairs kept out of training for evaluation, in both orders of their numbers. Which ones"
        " is fixed by their content, not by the run's seed.",
    )

    @property
    def num_pairs(self) -> int:
        """All ordered pairs of numbers under each operator, training and held-out together."""
        return (self.max_value - self.min_value + 1) ** 2 * len(self.operators)

    @property
    def num_train(self) -> int:
        """Pairs to train on. Of an odd number held out of an even one, the last mirror is in no split."""
        is_odd_of_even = self.num_held_out % 2 == 1 and self.num_pairs % 2 == 0
        return self.num_pairs - self.num_held_out - is_odd_of_even

    @property
    def num_held_out_problems(self) -> int:
        """Problems of two pairs that are held out. Of an odd number of all pairs one is a problem alone."""
        return (self.num_held_out + (1 - self.num_pairs % 2)) // 2

    @model_validator(mode="after")
    def _check_range(self) -> ArithmeticSpec:
        if self.min_value > self.max_value:
            raise SpecConflict(
                {"task.min_value": self.min_value, "task.max_value": self.max_value},
                "no number is left to add",
                allowed="a smallest summand that is at most the largest one",
                next_step="swap the two values",
            )
        if self.num_train < 1:
            raise SpecConflict(
                {
                    "task.num_held_out": self.num_held_out,
                    "task.min_value": self.min_value,
                    "task.max_value": self.max_value,
                },
                "no pair is left to train on",
                allowed=f"at most {(self.num_pairs - 1) // 2 * 2} held-out pairs of the {self.num_pairs} that"
                " the range has; both orders of two numbers are held out, or neither is",
                next_step="lower task.num_held_out or raise task.max_value",
            )
        return self


class DummySpec(TaskSection):
    """One fixed question, over and over, to see that a run learns at all."""

    name: Literal["dummy"] = Field(description="Which task: one fixed question.")
    num_train: int = Field(default=64, ge=1, le=10**7, description="Copies to train on.")
    num_held_out: int = Field(default=4, ge=1, le=10**7, description="Copies to evaluate on.")


class ReverseTextSpec(TaskSection):
    """Write a short text backwards, letter by letter."""

    name: Literal["reverse-text"] = Field(description="Which task: write a text backwards.")
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )
    min_words: int = Field(default=1, ge=1, le=1000, description="Fewest words of a text, included.")
    max_words: int = Field(default=4, ge=1, le=1000, description="Most words of a text, included.")
    partial_marks: Literal["beginning", "any-order"] = Field(
        default="beginning",
        description="What a wrong reply earns a part of the marks for: the letters that are right from its"
        " beginning, or letters in the right order anywhere. The second pays for one word said to everybody;"
        " it is here to see a run collapse, and for random models, which earn something by it.",
    )

    @model_validator(mode="after")
    def _check_range(self) -> ReverseTextSpec:
        if self.min_words > self.max_words:
            raise SpecConflict(
                {"task.min_words": self.min_words, "task.max_words": self.max_words},
                "no length is left for a text",
                allowed="a smallest number of words that is at most the largest one",
                next_step="swap the two values",
            )
        return self


class ReasoningGymSpec(TaskSection):
    """Any data set of the reasoning-gym package."""

    name: Literal["reasoning-gym"] = Field(description="Which task: a generator of reasoning-gym.")
    dataset: str = Field(
        min_length=1,
        max_length=100,
        description="Name of the reasoning-gym data set, for example 'chain_sum'.",
    )
    config: dict[str, JsonValue] = Field(
        default={},
        description="The data set's own settings, handed on as they stand. A file that extends another"
        " adds to the table key by key; naming another data set starts it anew.",
    )
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )
    data_seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed of the data set's generator. Apart from the run's seed, so that runs with"
        " different seeds see the same examples.",
    )

    @field_validator("config", mode="before")
    @classmethod
    def _check_config(cls, config: Any) -> Any:
        # Before the type check, whose findings inside free values are hard to read.
        check_free_table(("task", "config"), config)
        return config
