"""What a task may have beside the contract, and how to ask for it.

Each is a protocol with one member. Whoever uses one asks by the function beside it, which has an answer for
tasks without; a task that is made of others passes on what they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from strop.errors import ConfigError, explain_refusal
from strop.rollout import Example, Outcome, Split
from strop.tasks.contract import Task, TaskLimits


def every_form(examples: Sequence[Example]) -> Sequence[Example]:
    """Return examples among which stands one of every form: all, or the first where they are made one by one.

    What is made on demand is of one form, and there may be a million of it.
    """
    return examples if isinstance(examples, tuple | list) else examples[:1]


@runtime_checkable
class Ordered(Protocol):
    """What a task has beside, if its training examples come in an order of its own."""

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return positions in the training examples; equal seed and epoch, equal order.

        A position may be left out or come several times.
        """
        ...


@runtime_checkable
class Counted(Protocol):
    """What a task has beside, if reading its data counts what a person should see."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows by what they are or why they are left out; empty where all are used. Reads the data."""
        ...


def counts_of(task: Task) -> Mapping[str, int]:
    """Return what reading a task's data counted; empty where it counts nothing."""
    return task.counts if isinstance(task, Counted) else {}


@runtime_checkable
class PromptFields(Protocol):
    """What a task has beside, if its prompts name other things than the fields of an example."""

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return what a prompt may name of an example."""
        ...


def prompt_fields_of(task: Task, example: Example) -> Mapping[str, Any]:
    """Return what a prompt may name of an example: what the task says, or the example's fields."""
    return task.prompt_fields(example) if isinstance(task, PromptFields) else example.fields


@runtime_checkable
class PartedLimits(Protocol):
    """What a task has beside, if its examples have limits of their own."""

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the limits of one example."""
        ...


@runtime_checkable
class QuickVerifier(Protocol):
    """What a task has beside, if most of its judgements are quick although some may take for ever."""

    def verify_quick(self, example: Example, text: str) -> Outcome | None:
        """Return what `verify` would, or None where that may take more than some milliseconds.

        It is called where nobody can end it. Whoever changes `verify` changes this with it.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramForm:
    """How the program that a reply holds is used."""

    entry_point: str | None
    """The name that it must define; None where it is run as a whole, reads its input and prints."""


@runtime_checkable
class RunsPrograms(Protocol):
    """What a task has beside, if its replies are Python programs that it runs."""

    def program_form(self, example: Example) -> ProgramForm | None:
        """Return how the program of a reply is used; None where an example asks for no program."""
        ...


def program_form_of(task: Task, example: Example) -> ProgramForm | None:
    """Return how the program of a reply is used; None where replies are not programs."""
    return task.program_form(example) if isinstance(task, RunsPrograms) else None


@runtime_checkable
class Choices(Protocol):
    """What a task has beside, if the policy chooses among given replies by their likelihood."""

    def choices(self, example: Example) -> tuple[str, ...]:
        """Return the replies as `verify` takes them, none the beginning of another; () if one is written."""
        ...


def choices_of(task: Task, example: Example) -> tuple[str, ...]:
    """Return the replies that are chosen from; empty where the policy writes one."""
    # Asked at every rollout, where `isinstance` of a protocol takes ten times as long.
    found: tuple[str, ...] = task.choices(example) if hasattr(task, "choices") else ()
    return found


def require_written(task: Task) -> None:
    """Refuse to train on replies that are chosen: nothing of them is sampled, so nothing can be reinforced.

    Held-out examples of that kind are evaluated beside others that are trained on, as in a mixture.
    Raises: ConfigError; DataError like `examples`.
    """
    if not hasattr(task, "choices"):
        return
    asked = task.examples(Split.TRAIN) or task.examples(Split.HELD_OUT)
    if any(choices_of(task, example) for example in every_form(asked)):
        raise ConfigError(
            explain_refusal(
                f"training on task {task.name}, whose replies are chosen by their likelihood: the model"
                " samples nothing that could be reinforced",
                allowed="such a task in `strop eval`, or as a part of a mixture, for its held-out examples",
                next_step="train on a task whose replies the model writes",
            )
        )


@runtime_checkable
class ModelJudged(Protocol):
    """What a task has beside, if a model may judge its replies."""

    @property
    def judge_digests(self) -> Sequence[str]:
        """Hashes of all that makes each of its judges the one it is; () where no model judges."""
        ...


@runtime_checkable
class Parted(Protocol):
    """What a task has beside, if it is made of several tasks."""

    def part_of(self, example: Example) -> str | None:
        """Return the label of the part that an example belongs to."""
        ...


@runtime_checkable
class Equivalent(Protocol):
    """What a task has beside, if it knows which of its examples pose one problem, as 3 + 5 and 5 + 3 do.

    All of them belong in one split, and count once where it is asked how sure a score is.
    """

    def problem_of(self, example: Example) -> str | None:
        """Return a name for the problem, the same for all that pose it; None where nobody knows."""
        ...


def problem_of(task: Task, example: Example) -> str | None:
    """Return what all examples that pose one problem have in common; None where the task does not know."""
    # As in `choices_of`.
    found: str | None = task.problem_of(example) if hasattr(task, "problem_of") else None
    return found


def list_names(task: Task, examples: Iterable[Example]) -> frozenset[str]:
    """Return the ids of some examples, and the names of the problems that they pose."""
    names = {name for example in examples for name in (example.example_id, problem_of(task, example))}
    return frozenset(name for name in names if name is not None)


def part_of(task: Task, example: Example) -> str | None:
    """Return the label of an example's part, or None where the task has no parts."""
    return task.part_of(example) if isinstance(task, Parted) else None


@runtime_checkable
class Varied(Protocol):
    """What a task has beside, if its name stands for many."""

    @property
    def variant(self) -> str | None:
        """Which of them it is, in a word."""
        ...


def variant_of(task: Task) -> str | None:
    """Return which of the tasks of its name a task is, or None where there is one only."""
    return task.variant if isinstance(task, Varied) else None


def limits_of(task: Task, example: Example) -> TaskLimits:
    """Return the limits of an example: its own, or those of the whole task."""
    # As in `choices_of`.
    found: TaskLimits = task.limits_of(example) if hasattr(task, "limits_of") else task.limits
    return found


def verify_quick(task: Task, example: Example, text: str) -> Outcome | None:
    """Judge where that takes little time for certain; None: ask `verify` where it can be ended."""
    if limits_of(task, example).verify_limit_s is None:
        return task.verify(example, text)
    return task.verify_quick(example, text) if isinstance(task, QuickVerifier) else None


def describe_counts(task: Task) -> str:
    """Say in a line what reading a task's data counted; empty where there is nothing to say.

    Raises: DataError like `examples`.
    """
    counts = counts_of(task)
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)


def judge_digests_of(*tasks: Task) -> list[str]:
    """Return the hashes of all models that judge replies to these tasks."""
    return [digest for task in tasks if isinstance(task, ModelJudged) for digest in task.judge_digests]
