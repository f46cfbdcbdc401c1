"""The seam to tasks: one object that training, evaluation and sampling all ask.

A task renders the prompt, ends the reply, limits it and judges it. Nothing else in strop knows
how a problem is worded or scored, so training and evaluation cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    """What a right reply earns. Rewards lie in [min_reward, max_reward]; another one is no reward."""
    # Not in the text of an object, which versions of `rlvr-mixed` hash: it came later than they.
    min_reward: float = field(default=0.0, repr=False)
    """What the worst reply earns; below 0 where a task takes marks off."""
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
