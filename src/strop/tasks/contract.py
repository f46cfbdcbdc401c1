"""The seam to tasks: one object that training, evaluation and sampling all ask.

A task renders the prompt, ends the reply, limits it and judges it. Nothing else in strop knows
how a problem is worded or scored, so training and evaluation cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from strop.rollout import Example, Message, Outcome, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """What a reply may use."""

    max_reply_tokens: int
    """Tokens that a full solution needs at most; a run may ask for less, never for more."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a reply, beside the model's own terminator."""


class Task(Protocol):
    """One verifiable task."""

    @property
    def name(self) -> str:
        """Registry name, for example 'arithmetic'."""
        ...

    @property
    def version(self) -> str:
        """Hash over everything that changes prompts or scores; stored with every result."""
        ...

    @property
    def limits(self) -> TaskLimits:
        """Reply budget and stop strings."""
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
