"""What the sections of all tasks share, and those of tasks that read the rows of a data set."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict, expert
from strop.spec.template import list_names, refuse_malformed

PROMPTING = ("system_prompt", "prompt_template", "stop")
"""The settings that ask a model, or end its reply, otherwise than the task does by itself."""


class TaskSection(Section):
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
        json_schema_extra=expert("data sets hold a few prompts that no model has room for"),
    )
    thinking: Literal["off", "on", "model_default"] = Field(
        default="model_default",
        description="Whether a chat model is told to think before it answers, if its chat template can be"
        " told. on = the reply has 8192 tokens beyond the task's own limit, and no text ends it. Judged is"
        " what stands behind the thinking, and thinking without an end is no answer.",
    )
    system_prompt: str | None = Field(
        default=None,
        description="What the model is told before the task's own messages: a message of the role system in a"
        " chat; in plain text it stands before the prompt, with a blank line between. none = nothing.",
    )
    prompt_template: str | None = Field(
        default=None,
        description="What the model is asked in place of the task's own wording, such as 'Solve: {question}'."
        " A name in braces stands for the example's field of that name, '{{' and '}}' for braces. In plain"
        " text it is the prompt to the letter. none = the task's own.",
        json_schema_extra=expert("published scores come with their own words around the question"),
    )
    stop: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="Texts that end a reply, in place of the task's own, in a chat and in plain text; an"
        " empty list leaves the model's own terminator alone. none = the task's own.",
        json_schema_extra=expert("base models need an end that their text shows"),
    )
    order_file: str | None = Field(
        default=None,
        min_length=1,
        description="JSONL file of example ids: the run trains on these examples only, in this order, and"
        " again from the first line in each epoch. `strop eval --write-order` makes one. none = all"
        " examples, shuffled anew in each epoch.",
        json_schema_extra=expert("a curriculum is an order of examples"),
    )
    min_solved_frac: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Examples of the order file that a smaller share of attempts solved are left out.",
        json_schema_extra=expert("examples that the model never solves teach nothing"),
    )
    max_solved_frac: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Examples of the order file that a larger share of attempts solved are left out.",
        json_schema_extra=expert("examples that the model always solves teach nothing"),
    )
    max_unmatched_ids: int = Field(
        default=0,
        ge=0,
        description="Ids of the order file that may be missing among the task's training examples.",
        json_schema_extra=expert("an order file may be older than its data set"),
    )

    @property
    def prompting(self) -> dict[str, object]:
        """What of `PROMPTING` is set, by name; empty where the model is asked as the task does it."""
        found = {name: getattr(self, name) for name in PROMPTING}
        return {name: value for name, value in found.items() if value is not None}

    @model_validator(mode="after")
    def _check_prompting(self) -> Self:
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise SpecConflict(
                {"task.system_prompt": self.system_prompt},
                "the model is told nothing",
                allowed="a text with more than white space, or none",
                next_step="remove the setting, or write the text",
            )
        if self.prompt_template is not None:
            refuse_malformed("task.prompt_template", self.prompt_template)
            if not list_names(self.prompt_template):
                raise SpecConflict(
                    {"task.prompt_template": self.prompt_template},
                    "no field of an example stands in it, so all would be asked alike",
                    allowed="a text with at least one field of the examples in braces, such as {question}",
                    next_step="name a field, in single braces",
                )
        if self.stop is not None and not all(self.stop):
            raise SpecConflict(
                {"task.stop": self.stop},
                "an empty text ends every reply before its first token",
                allowed="texts of one character or more",
                next_step="remove the empty text; an empty list leaves the model's own terminator alone",
            )
        if self.stop and self.thinking == "on":
            raise SpecConflict(
                {"task.stop": self.stop, "task.thinking": self.thinking},
                "a text that ends a reply may stand among its thoughts",
                allowed="texts that end a reply where the model is not told to think",
                next_step="remove task.stop, or set task.thinking=off",
            )
        return self

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


SOURCE_HELP = (
    "Where the problems are: a hub id such as {}, or a folder or file of Parquet or JSONL. A text that"
    " starts with '/', '~' or '.', or ends in .parquet, .jsonl or .json, is a path, and a relative one is"
    " taken from the file that names it."
)


class FewShot(TaskSection):
    """What tasks share that can show solved examples first."""

    num_few_shot: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Solved examples before the problem where the model is asked in plain text, from the"
        " data itself. A chat shows none.",
        json_schema_extra=expert("published scores are shown some examples first"),
    )

    @model_validator(mode="after")
    def _check_shots(self) -> Self:
        if self.num_few_shot and self.prompt_template is not None:
            raise SpecConflict(
                {"task.num_few_shot": self.num_few_shot, "task.prompt_template": self.prompt_template},
                "solved examples are worded as the task words its own problems",
                allowed="solved examples, or a wording of the run's own",
                next_step="remove one of the two; solved examples may be written into the template",
            )
        return self


class HeldOutRows(TaskSection):
    """What tasks share that are judged on the rows of a data set."""

    num_held_out: int | None = Field(
        default=None, ge=1, le=10**7, description="Held-out problems used, from the first. none = all."
    )


class TrainingRows(HeldOutRows):
    """What tasks share that also train on the rows of a data set."""

    num_train: int | None = Field(
        default=None, ge=1, le=10**7, description="Training problems used, from the first. none = all."
    )


class EvaluationRows(HeldOutRows):
    """What tasks share whose data is for evaluation only."""

    @property
    def num_train(self) -> int | None:
        """None: only the task can tell, and it refuses to be trained on."""
        return None
