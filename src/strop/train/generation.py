"""Groups of rollouts for the loop: sampled when it asks, or ahead of it within a bound.

Groups are numbered in the order of the schedule. Group n belongs to the batch n // B, where B is the
number of groups of a step, and discarded groups are not counted. It may be started once its batch is at most
`max_staleness` steps ahead of the weights that the engine serves, so nothing is sampled that would be
too old when its step comes; with 0 this is sampling on demand, step by step. A batch is the next B groups
in their order, however long each takes: whoever filled batches with what ends first would train on short
replies.

Every group that was started ends in exactly one way, and is counted (`Fate`). The place from which a resumed
run goes on is the first group that no step has consumed: what was sampled behind it is either kept by the
checkpoint or sampled again, under the weights of then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from strop.errors import Starved, explain_refusal
from strop.rollout import Example, Group


class Fate(StrEnum):
    """How a group that was started ended."""

    TRAINED = "trained"
    """Some of its tokens moved the weights."""
    SKIPPED = "skipped"
    """It was part of a batch and gave no gradient: its rewards were equal, or it was masked."""
    FILTERED = "filtered"
    """It was replaced by another group, because its rewards were all equal."""
    EVICTED = "evicted"
    """It was too old when its step came."""
    FAILED = "failed"
    """It was part of a batch, and fewer than two of its rollouts could be scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLimits:
    """How far sampling may run ahead, and what a batch is."""

    groups_per_step: int
    max_staleness: int
    """Steps between the oldest weights that sampled a rollout and those that it moves."""
    num_steps: int
    """Nothing is sampled for steps behind the last."""
    max_generated_ratio: float = 4.0
    """Groups per group of a batch that may be discarded and replaced, plus the one that is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step trains on, and what was discarded on the way to it."""

    groups: list[Group]
    numbers: list[int]
    """Which groups they are."""
    discarded: list[tuple[Fate, Group]]
    is_short: bool
    """Whether groups are missing because too many were discarded."""


@dataclass(slots=True, eq=False)
class _Started:
    """A group that is being sampled or waits for its step."""

    number: int
    group: asyncio.Future[Group]


class GroupSource:
    """Starts groups as early as it may and hands out batches in order."""

    def __init__(
        self,
        limits: SourceLimits,
        *,
        find_example: Callable[[int], Example],
        attempt: Callable[[int, Example], Awaitable[Group]],
        find_flaw: Callable[[Group], Fate | None] = lambda group: None,
        first_number: int = 0,
        first_step: int = 0,
    ) -> None:
        """`attempt(number, example)` samples one group; `find_flaw` says why one is discarded and replaced.

        `first_number` and `first_step` are where a resumed run goes on.
        """
        self._limits = limits
        self._find_example = find_example
        self._attempt = attempt
        self._find_flaw = find_flaw
        self._next_number = first_number
        self._num_consumed_steps = first_step
        self._chosen: list[_Started] = []
        self._published_step = first_step
        self._started: dict[int, _Started] = {}
        self._ended: list[_Started] = []
        self._has_ended = asyncio.Event()
        self._kept: dict[int, Group] = {}
        self._discarded: list[tuple[int, Fate, Group]] = []
        self._num_started = 0
        self._by_fate = dict.fromkeys(Fate, 0)

    @property
    def next_unconsumed(self) -> int:
        """Number of the first group that no step has consumed."""
        return next(iter(self._started), self._next_number)

    @property
    def num_ahead(self) -> int:
        """Groups that were started and wait for their step."""
        return len(self._started)

    @property
    def counts(self) -> Mapping[str, int]:
        """Groups started by this process, and how many of them ended in which way."""
        by_fate = {fate.value: num_groups for fate, num_groups in self._by_fate.items()}
        return {"started": self._num_started, **by_fate}

    def list_waiting(self) -> list[tuple[int, Group]]:
        """Return the groups that are done and wait for their step, for a checkpoint."""
        return [(entry.number, entry.group.result()) for entry in self._started.values() if _is_usable(entry)]

    def restore(self, waiting: Sequence[tuple[int, Group]]) -> None:
        """Take over groups that a checkpoint kept; they are not sampled again."""
        self._kept = dict(waiting)

    def admit(self, published_step: int) -> None:
        """Start what may be started under the weights that were published after so many steps."""
        self._published_step = published_step
        while self._may_start():
            self._start()

    async def take(self) -> Batch:
        """Return the next batch, waiting for its groups.

        Raises: Starved; whatever ended an attempt, after the others were cancelled.
        """
        wanted = self._limits.groups_per_step
        most_discarded = int((self._limits.max_generated_ratio - 1.0) * wanted)
        is_complete = False
        try:
            while not is_complete:
                self._replace_flawed()
                self._choose()
                is_complete = len(self._chosen) == wanted or len(self._discarded) > most_discarded
                if not is_complete:
                    await self._wait()
        finally:
            if not is_complete:
                await self.close()
        self._num_consumed_steps += 1
        chosen, self._chosen = self._chosen, []
        return Batch(
            groups=[entry.group.result() for entry in chosen],
            numbers=[entry.number for entry in chosen],
            discarded=self._hand_over_discarded(chosen, is_short=len(chosen) < wanted),
            is_short=len(chosen) < wanted,
        )

    def note(self, fate: Fate, num_groups: int) -> None:
        """Count what became of groups of a batch that was taken."""
        self._by_fate[fate] += num_groups

    async def settle(self) -> None:
        """Wait until all that may be started is done, so that nothing depends on timing.

        Raises: whatever ended an attempt.
        """
        num_started = -1
        while num_started != self._num_started:
            num_started = self._num_started
            self.admit(self._published_step)
            await asyncio.gather(*(entry.group for entry in self._started.values()))
            self._replace_flawed()

    async def close(self) -> None:
        """Cancel what is under way. May be called twice."""
        running = [entry.group for entry in self._started.values()]
        self._started = {}
        for group in running:
            group.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _replace_flawed(self) -> None:
        """Discard what has ended with a flaw, and start replacements."""
        ended, self._ended = self._ended, []
        for entry in ended:
            self._discard_flawed(entry)
        self.admit(self._published_step)

    def _discard_flawed(self, entry: _Started) -> bool:
        flaw = self._find_flaw(entry.group.result())
        if flaw is None:
            return False
        del self._started[entry.number]
        self._discarded.append((entry.number, flaw, entry.group.result()))
        self._by_fate[flaw] += 1
        return True

    def _choose(self) -> None:
        """Move groups into the batch, in their order, as far as they are done."""
        while self._started and len(self._chosen) < self._limits.groups_per_step:
            entry = self._started[self.next_unconsumed]
            if not entry.group.done():
                break
            # Once more: what was young enough when it ended may be too old by now.
            if not self._discard_flawed(entry):
                del self._started[entry.number]
                self._chosen.append(entry)
        self.admit(self._published_step)

    def _hand_over_discarded(self, chosen: Sequence[_Started], *, is_short: bool) -> list[tuple[Fate, Group]]:
        """Return what was discarded on the way to a batch; what lies behind it is told with a later one."""
        last = max((entry.number for entry in chosen), default=-1)
        found = sorted(self._discarded, key=lambda one: one[0])
        num_before = len(found) if is_short else sum(number <= last for number, _, _ in found)
        self._discarded = found[num_before:]
        return [(fate, group) for _, fate, group in found[:num_before]]

    async def _wait(self) -> None:
        """Wait until one more group is done. Raises: Starved where none is being sampled."""
        if not self._started:
            raise _starved(self._limits, self._num_consumed_steps, self._published_step)
        if not self._ended:
            self._has_ended.clear()
            await self._has_ended.wait()

    def _may_start(self) -> bool:
        """Whether the next group's batch is near enough to the weights served.

        Groups that the batch under way has chosen count with it until it is complete.
        """
        num_ahead = (len(self._chosen) + len(self._started)) // self._limits.groups_per_step
        batch = self._num_consumed_steps + num_ahead
        is_wanted = batch < self._limits.num_steps
        return is_wanted and batch - self._published_step <= self._limits.max_staleness

    def _start(self) -> None:
        number = self._next_number
        self._next_number += 1
        self._num_started += 1
        entry = _Started(number, self._sample(number))
        self._started[number] = entry
        entry.group.add_done_callback(lambda group: self._note_end(entry))

    def _note_end(self, entry: _Started) -> None:
        """Tell whoever waits; what was cancelled is nobody's any more."""
        if entry.number in self._started:
            self._ended.append(entry)
            self._has_ended.set()

    def _sample(self, number: int) -> asyncio.Future[Group]:
        kept = self._kept.pop(number, None)
        if kept is None:
            return asyncio.ensure_future(self._attempt(number, self._find_example(number)))
        group: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        group.set_result(kept)
        return group


def _is_usable(entry: _Started) -> bool:
    return entry.group.done() and not entry.group.cancelled() and entry.group.exception() is None


def _starved(limits: SourceLimits, step: int, published_step: int) -> Starved:
    return Starved(
        explain_refusal(
            f"step {step + 1} waits for rollouts, and none may be sampled: the engine serves the weights"
            f" after step {published_step}, and train.max_staleness={limits.max_staleness}",
            allowed="train.max_staleness of at least train.sync_every - 1",
            next_step="correct the two; a run file with such a schedule is refused before it starts",
        )
    )
