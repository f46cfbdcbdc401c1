"""The seam to tasks: one object that training, evaluation and sampling all ask.

A task renders the prompt, ends the reply, limits it and judges it. Nothing else in strop knows
how a problem is worded or scored, so training and evaluation cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from strop.rollout import Example, Message, Outcome, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """What a reply may use, and what it can earn."""

    max_reply_tokens: int
    """Tokens that a reply may use: what a full solution needs at most, or less where a run asks so."""
    full_reply_tokens: int | None = None
    """The task's own budget where a run lowered `max_reply_tokens`. None: it did not."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a reply, beside the model's own terminator."""
    base_stop_strings: tuple[str, ...] = ()
    """Further ones where the model is asked in plain text: what base models write when they go on to a
    problem of their own making. In a chat they would cut replies that may hold them."""
    max_reward: float = 1.0
    """What a right reply earns. Rewards lie in [0, max_reward]."""
    chance: float = 0.0
    """Share of full marks that a reply without work earns, for example 0.25 with four choices."""
    max_goldless_frac: float = 0.0
    """Share of examples for which no right reply may be known. 0: the task promises one for each."""
    verify_limit_s: float | None = None
    """Wall time of one judgement, kept by killing the process that it runs in. None: the verifier's time
    is bounded by the text, and it runs in the caller's process."""
    verify_keeps_time: bool = False
    """Whether the verifier ends in time by itself, as one whose work a sandbox ends. Then a slow judgement
    keeps its place, and no more run at once than there are cores: their own limits are wall time too."""

    def stops(self, *, is_base: bool) -> tuple[str, ...]:
        """Return the texts that end a reply to a prompt of this form."""
        return self.stop_strings + self.base_stop_strings if is_base else self.stop_strings

    @property
    def own_reply_tokens(self) -> int:
        """The task's own budget, whatever a run made of it."""
        return self.full_reply_tokens or self.max_reply_tokens


class Task(Protocol):
    """One verifiable task."""

    @property
    def name(self) -> str:
        """Registry name, for example 'arithmetic'."""
        ...

    @property
    def version(self) -> str:
        """Hash over everything that changes prompts or scores; stored with every result.

        Raises: DataError like `examples`, where the data itself is part of the version.
        """
        ...

    @property
    def limits(self) -> TaskLimits:
        """Reply budget, stop strings and full marks."""
        ...

    def examples(self, split: Split) -> Sequence[Example]:
        """Return all examples of a split, in a fixed order. The two splits share no id.

        Raises: DataError if the data is missing, empty, malformed or the splits overlap.
        """
        ...

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the messages that pose the example."""
        ...

    def verify(self, example: Example, text: str) -> Outcome:
        """Judge a reply. `text` ends before its terminator or stop string."""
        ...

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return replies that deserve full marks, the asked-for form first.

        Empty where no answer is known. The self-test judges all of them.
        """
        ...


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
    return task.limits_of(example) if isinstance(task, PartedLimits) else task.limits


def verify_quick(task: Task, example: Example, text: str) -> Outcome | None:
    """Judge where that takes little time for certain; None: ask `verify` where it can be ended."""
    if limits_of(task, example).verify_limit_s is None:
        return task.verify(example, text)
    return task.verify_quick(example, text) if isinstance(task, QuickVerifier) else None


def describe_counts(task: Task) -> str:
    """Say in a line what reading a task's data counted; empty where there is nothing to say.

    Raises: DataError like `examples`.
    """
    counts = task.counts if isinstance(task, Counted) else {}
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)


def judge_digests_of(*tasks: Task) -> list[str]:
    """Return the hashes of all models that judge replies to these tasks."""
    return [digest for task in tasks if isinstance(task, ModelJudged) for digest in task.judge_digests]
