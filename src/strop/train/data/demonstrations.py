"""Demonstrations (SFT rows): prompts and replies to imitate, framed as the run's own rollouts are.

They come from a data file or from recorded rollouts (`sft_sources`). Rows that do not fit are dropped and
counted, and refused above a share. Nothing here imports torch, so a plan can read them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from strop.errors import DataError
from strop.rollout import BoolArray, IntArray
from strop.tasks import Task
from strop.tasks.prompt import PromptFormat
from strop.tokenizer import Tokenizer

OVERLONG = "longer than the model's positions"
LONG_REPLY = "with a reply over task.max_reply_tokens"
STOP_STRING = "with a stop string of the task"
_DROPPED = (OVERLONG, LONG_REPLY, STOP_STRING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """Prompt format and limits of a run, the same for its rollouts and its demonstrations."""

    tokenizer: Tokenizer
    prompt_format: PromptFormat
    """Resolved: chat or base."""
    task: Task
    """Its limits hold for demonstrated replies too: the run would never see a longer one."""
    max_positions: int
    """Tokens that the model can look at."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstration:
    """One prompt and what is to follow it. Shapes: reply_ids and is_trained (T,)."""

    prompt_ids: IntArray
    num_asked: int
    """Tokens before the first reply: those of the prompt, or more where they are trained too."""
    reply_ids: IntArray
    """Everything after the prompt; where replies are trained, each ends in its terminator."""
    is_trained: BoolArray
    """True where the loss is computed; by place, never by token value."""
    weight: float
    prompt_id: str
    """Names the prompt, not the reply: several demonstrations may share it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and reply."""
        return len(self.prompt_ids) + len(self.reply_ids)

    @property
    def asked_ids(self) -> IntArray:
        """What is asked, before the first reply."""
        asked: IntArray = np.concatenate([self.prompt_ids, self.reply_ids])[: self.num_asked]
        return asked

    @property
    def content(self) -> bytes:
        """What makes two demonstrations the same one."""
        lengths = np.array([len(self.prompt_ids), len(self.reply_ids)], dtype=np.int64)
        parts = (lengths, self.prompt_ids, self.reply_ids, self.is_trained)
        return b"".join(part.tobytes() for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A demonstration before it is known to fit."""

    demonstration: Demonstration
    replies: tuple[tuple[str, int], ...]
    """Text and number of tokens, terminator included, of each reply that is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """All demonstrations of a run, in the order of the source."""

    source: str
    members: tuple[Demonstration, ...]
    problems: frozenset[str]
    """Problems that the rows name, white space evened out: none of them may be evaluated on."""
    counts: Mapping[str, int]
    """What became of the rows or rollouts that were read, in words."""

    @property
    def digest(self) -> str:
        """Hash over all that is trained, in order."""
        total = hashlib.sha256()
        for member in self.members:
            total.update(member.content + np.float64(member.weight).tobytes())
        return total.hexdigest()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each one, prompt and reply."""
        return tuple(member.num_tokens for member in self.members)

    @property
    def num_scored(self) -> int:
        """Tokens that are trained."""
        return sum(int(member.is_trained.sum()) for member in self.members)

    def describe(self) -> str:
        """Return how many there are, and what became of the others."""
        found = "; ".join(f"{number} {what}" for what, number in self.counts.items() if number)
        return f"{len(self.members)} demonstrations from {self.source}" + (f" ({found})" if found else "")


@dataclass(kw_only=True, slots=True)
class Sieve:
    """Takes candidates one by one; keeps those that fit, once each, and counts the others."""

    framing: Framing
    kept: dict[bytes, Demonstration] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    num_seen: int = 0

    def add(self, candidate: Candidate) -> None:
        """Keep a candidate, or count why not."""
        self.num_seen += 1
        cause = self._find_cause(candidate)
        if cause is not None:
            self.counts[cause] += 1
        elif candidate.demonstration.content in self.kept:
            self.counts["repeated"] += 1
        else:
            self.kept[candidate.demonstration.content] = candidate.demonstration

    def _find_cause(self, candidate: Candidate) -> str | None:
        limits = self.framing.task.limits
        if candidate.demonstration.num_tokens > self.framing.max_positions:
            return OVERLONG
        if any(num_tokens > limits.max_reply_tokens for _, num_tokens in candidate.replies):
            return LONG_REPLY
        if any(stop in text for text, _ in candidate.replies for stop in self._stops()):
            return STOP_STRING
        return None

    def _stops(self) -> tuple[str, ...]:
        framing = self.framing
        return framing.task.limits.stops(is_base=framing.prompt_format is PromptFormat.BASE)

    def finish(self, source: str, max_dropped_frac: float) -> tuple[Demonstration, ...]:
        """Return what was kept.

        Raises: DataError if that is nothing, or more than the share was dropped.
        """
        num_dropped = sum(self.counts[cause] for cause in _DROPPED)
        causes = ", ".join(f"{self.counts[cause]} {cause}" for cause in _DROPPED if self.counts[cause])
        if num_dropped > max_dropped_frac * self.num_seen:
            limits = self.framing.task.limits
            raise DataError(
                f"{num_dropped} of {self.num_seen} demonstrations of sft.source={source} were dropped"
                f" ({causes}), more than sft.max_dropped_frac={max_dropped_frac:g}; the model has"
                f" {self.framing.max_positions} positions, task.max_reply_tokens is"
                f" {limits.max_reply_tokens}, and the stop strings are {list(self._stops())}",
                allowed="demonstrations that the model could have given as replies in this run",
                next_step="mend the rows, or raise sft.max_dropped_frac to train without them",
            )
        require_some(source, self.kept, f"{self.num_seen} were looked at")
        return tuple(self.kept.values())


def require_some(source: str, found: Mapping[bytes, Demonstration] | Sequence[object], seen: str) -> None:
    """Refuse an empty result. Raises: DataError saying what was seen instead."""
    if found:
        return
    raise DataError(
        f"sft.source={source} gives no demonstration: {seen}",
        allowed="a source of which at least one demonstration is left",
        next_step="correct the source, or the settings of sft that choose from it",
    )


def require_enough(found: Demonstrations, rows_per_step: int) -> None:
    """Refuse steps that would hold a demonstration twice. Raises: DataError with both numbers."""
    if len(found.members) >= rows_per_step:
        return
    raise DataError(
        f"a step takes sft.rows_per_step={rows_per_step} and there are {found.describe()}",
        allowed=f"sft.rows_per_step from 1 to {len(found.members)}",
        next_step="lower sft.rows_per_step or give the run more demonstrations",
    )
