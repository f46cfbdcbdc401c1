"""Groups of rollouts for the loop: sampled when it asks, or ahead of it within a bound.

Groups are numbered in the order of the schedule. Group n belongs to the batch n // B, where B is the number
of groups of a step, and discarded groups are not counted. It may be started once its batch is at most
`max_staleness` steps ahead of the weights that the engine serves, so no group is too old when its step comes;
with 0 this is sampling on demand, step by step. A batch is the next B groups in their order, however long
each takes: filling batches in order of completion would bias training towards short replies.

Every started group ends in exactly one way and is counted (`GroupStatus`). A resumed run goes on from the
first group that no step has consumed: later groups are restored from the checkpoint or sampled again, under
the restored weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import fmean

from strop.algorithm import Algorithm, needs_replacement
from strop.algorithm.advantages import has_enough_scored
from strop.cluster import Roles
from strop.engine.contract import TimedEngine
from strop.engine.pool import EnginePool
from strop.environments import RolloutPlan, choose_environment, run_group
from strop.hardware.busy_clock import BusyClock, Interval
from strop.record.timeline import ENGINE
from strop.rollout import Example, Group, Rollout, Sampling
from strop.spec.run import RunSpec
from strop.tasks import Task
from strop.tasks.judging import Judge
from strop.train.batch import ExampleSchedule, TrainBatch


class Collector:
    """Plans the attempts at examples and runs them, in this process or on rollout workers."""

    def __init__(
        self, spec: RunSpec, task: Task, judge: Judge, roles: Roles, *, on_group: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._task = task
        self._judge = judge
        self._roles = roles
        self._on_group = on_group
        # A router times each of its engines.
        self._engine = roles.engine if isinstance(roles.engine, EnginePool) else TimedEngine(roles.engine)
        self._intervals: dict[int, Interval] = {}

    @property
    def busy(self) -> Mapping[str, BusyClock]:
        """The clocks of the engines by name; with rollout workers also those of their judges."""
        if self._roles.run_group is not None:
            return self._roles.busy
        return {ENGINE: self._engine.busy} if isinstance(self._engine, TimedEngine) else self._engine.busy

    def take_interval(self, number: int) -> Interval | None:
        """Return and forget when a group was attempted; None for one that a checkpoint kept."""
        return self._intervals.pop(number, None)

    def open_buffer(
        self,
        algorithm: Algorithm,
        schedule: ExampleSchedule[Example],
        *,
        first_number: int,
        first_step: int,
    ) -> RolloutBuffer:
        """Return the buffer of a run that goes on after `first_step` steps."""
        spec = self._spec
        return RolloutBuffer(
            BufferLimits(
                groups_per_step=spec.train.prompts_per_step,
                max_staleness=spec.train.max_staleness,
                num_steps=spec.train.steps,
            ),
            find_example=schedule.numbered,
            attempt=self.attempt,
            find_discard_reason=partial(self._find_discard_reason, algorithm=algorithm),
            first_number=first_number,
            first_step=first_step,
        )

    async def attempt(self, number: int, example: Example) -> Group:
        """Sample one group: `train.group_size` attempts at an example."""
        spec = self._spec
        plans = plan_attempts(
            spec,
            self._task,
            example,
            # The group's step, not the loop's: the name of a random stream depends on no timing.
            step=number // spec.train.prompts_per_step,
            num_attempts=spec.train.group_size,
            max_positions=self._roles.learner.shape.max_positions,
        )
        begun_at = time.perf_counter()
        if self._roles.run_group is not None:
            group = await self._roles.run_group(plans)
        else:
            make_environment = choose_environment(self._task, self._judge)
            group = await run_group(make_environment, self._engine, self._roles.tokenizer, plans)
        self._intervals[number] = (begun_at, time.perf_counter())
        self._on_group()
        return group

    def _find_discard_reason(self, group: Group, *, algorithm: Algorithm) -> GroupStatus | None:
        """Return why a group may not be part of a batch, None where it may."""
        staleness = find_staleness([group], self._roles.learner.version)
        if staleness is not None and staleness > self._spec.train.max_staleness:
            return GroupStatus.EVICTED
        rewards = [rollout.outcome.reward for rollout in group.rollouts]
        counts = [rollout.num_sampled_tokens for rollout in group.rollouts]
        limit = self._task.attempt_tokens(self._task.limits_of(group.example))
        if needs_replacement(algorithm, rewards, counts, limit):
            return GroupStatus.FILTERED
        return None


def plan_attempts(
    spec: RunSpec,
    task: Task,
    example: Example,
    *,
    step: int,
    num_attempts: int,
    max_positions: int,
) -> list[RolloutPlan]:
    """Plan the attempts at one example as the run file says; `step` names their random streams."""
    sampling = Sampling(**spec.sampling.model_dump())
    max_reply_tokens = task.limits_of(example).max_reply_tokens
    return [
        RolloutPlan(
            example=example,
            step=step,
            sample_index=index,
            run_seed=spec.seed,
            sampling=sampling,
            max_reply_tokens=max_reply_tokens,
            max_positions=max_positions,
            prompt_format=spec.model.prompt_format,
        )
        for index in range(num_attempts)
    ]


def age_of(rollout: Rollout, version: int) -> int | None:
    """Return how many steps a rollout's oldest sampled token is behind `version`; None without tokens."""
    versions = [turn.policy_version for turn in rollout.turns if turn.policy_version is not None]
    return version - min(versions) if versions else None


def find_staleness(groups: Sequence[Group], version: int) -> int | None:
    """Return how many steps the groups' oldest sampled token is behind `version`; None without tokens."""
    return max(_list_ages(groups, version), default=None)


def measure_staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Measure how old the rollouts of a batch are, in steps, by their oldest token."""
    ages = _list_ages(groups, version)
    return {"staleness_mean": fmean(ages), "staleness_max": float(max(ages))} if ages else {}


def _list_ages(groups: Sequence[Group], version: int) -> list[int]:
    ages = (age_of(rollout, version) for group in groups for rollout in group.rollouts)
    return [age for age in ages if age is not None]


def sort_by_status(groups: Sequence[Group], batch: TrainBatch) -> list[GroupStatus]:
    """Return how each group of a batch ended."""
    statuses = []
    for group, is_forwarded_G in zip(groups, batch.credit.is_forwarded_P_G, strict=True):
        if is_forwarded_G.any():
            statuses.append(GroupStatus.TRAINED)
        elif not has_enough_scored([rollout.outcome.reward for rollout in group.rollouts]):
            statuses.append(GroupStatus.FAILED)
        else:
            statuses.append(GroupStatus.SKIPPED)
    return statuses


def measure_discarded(batch: Batch) -> dict[str, float]:
    """Measure the groups that were sampled for a batch and discarded; empty without any.

    `used_length_ratio` is the mean length of the replies that were young enough, over that of all that were
    dispatched: below 1, long replies came too late more often than short ones.
    """
    if not batch.discarded:
        return {}
    evicted = _lengths(group for status, group in batch.discarded if status is GroupStatus.EVICTED)
    replaced = _lengths(group for status, group in batch.discarded if status is not GroupStatus.EVICTED)
    used = _lengths(batch.groups)
    num_wasted = sum(evicted) + sum(replaced)
    metrics = {"wasted_token_frac": num_wasted / max(num_wasted + sum(used), 1)}
    for status, num_groups in Counter(status for status, _ in batch.discarded).items():
        metrics[f"num_{status}_groups"] = float(num_groups)
    # Groups that were replaced for their rewards were in time.
    in_time = used + replaced
    if any(evicted) and any(in_time):
        metrics["used_length_ratio"] = fmean(in_time) / fmean(in_time + evicted)
    return metrics


def _lengths(groups: Iterable[Group]) -> list[int]:
    return [rollout.num_sampled_tokens for group in groups for rollout in group.rollouts]


class GroupStatus(StrEnum):
    """How a started group ended."""

    TRAINED = "trained"
    """Some of its tokens moved the weights."""
    SKIPPED = "skipped"
    """It was part of a batch and gave no gradient: its rewards were equal, or it was masked."""
    FILTERED = "filtered"
    """It was replaced by another group, because its rewards were all equal."""
    EVICTED = "evicted"
    """It was too old when its step came."""
    FAILED = "failed"
    """It was part of a batch, and too few of its rollouts could be scored: fewer than two, or than half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """The size of a batch, and how far sampling may run ahead."""

    groups_per_step: int
    max_staleness: int
    """Steps between the oldest weights that sampled a rollout and the weights that it moves."""
    num_steps: int
    """Steps of the run: no groups are sampled for later ones."""
    max_generated_ratio: float = 4.0
    """Groups that may be generated for each group of a batch: the one that is kept, and its discarded
    ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The groups that one step trains on, and those that were discarded for it."""

    groups: list[Group]
    numbers: list[int]
    """Numbers of `groups`."""
    discarded: list[tuple[GroupStatus, Group]]
    discarded_numbers: list[int]
    """Numbers of the discarded groups."""
    is_short: bool
    """Whether groups are missing because too many were discarded."""


@dataclass(slots=True, eq=False)
class _Started:
    """A group that is being sampled or waits for its step."""

    number: int
    group: asyncio.Future[Group]


class RolloutBuffer:
    """Starts groups as early as it may and hands out batches in order."""

    def __init__(
        self,
        limits: BufferLimits,
        *,
        find_example: Callable[[int], Example],
        attempt: Callable[[int, Example], Awaitable[Group]],
        find_discard_reason: Callable[[Group], GroupStatus | None] = lambda group: None,
        first_number: int = 0,
        first_step: int = 0,
    ) -> None:
        """`attempt(number, example)` samples one group; a group with a `find_discard_reason` is replaced.

        A resumed run goes on from `first_number` and `first_step`.
        """
        self._limits = limits
        self._find_example = find_example
        self._attempt = attempt
        self._find_discard_reason = find_discard_reason
        self._next_number = first_number
        self._num_consumed_steps = first_step
        self._chosen: list[_Started] = []
        self._published_step = first_step
        self._started: dict[int, _Started] = {}
        self._ended: list[_Started] = []
        self._has_ended = asyncio.Event()
        self._kept: dict[int, Group] = {}
        self._discarded: list[tuple[int, GroupStatus, Group]] = []
        self._num_started = 0
        self._by_status = dict.fromkeys(GroupStatus, 0)

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
        """How many groups this process started, and how many of them ended in each way."""
        by_status = {status.value: num_groups for status, num_groups in self._by_status.items()}
        return {"started": self._num_started, **by_status}

    def list_waiting(self) -> list[tuple[int, Group]]:
        """Return the groups that are done and wait for their step, for a checkpoint."""
        done = (entry for entry in self._started.values() if entry.group.done())
        return [
            (entry.number, entry.group.result())
            for entry in done
            if not entry.group.cancelled() and entry.group.exception() is None
        ]

    def restore(self, waiting: Sequence[tuple[int, Group]]) -> None:
        """Take over groups that a checkpoint kept; they are not sampled again."""
        self._kept = dict(waiting)

    def admit(self, published_step: int) -> None:
        """Start the groups that may be sampled with the weights published after `published_step` steps."""
        self._published_step = published_step
        limits = self._limits
        while True:
            # Groups that `take` has chosen for an incomplete batch still count as ahead.
            num_ahead = (len(self._chosen) + len(self._started)) // limits.groups_per_step
            batch = self._num_consumed_steps + num_ahead
            if batch >= limits.num_steps or batch - published_step > limits.max_staleness:
                return
            number = self._next_number
            self._next_number += 1
            self._num_started += 1
            kept = self._kept.pop(number, None)
            group: asyncio.Future[Group]
            if kept is None:
                group = asyncio.ensure_future(self._attempt(number, self._find_example(number)))
            else:
                group = asyncio.get_running_loop().create_future()
                group.set_result(kept)
            self._started[number] = entry = _Started(number, group)
            group.add_done_callback(partial(self._note_end, entry))

    async def take(self) -> Batch:
        """Return the next batch, waiting for its groups.

        Raises: the error of an attempt, after the others were cancelled.
        """
        wanted = self._limits.groups_per_step
        most_discarded = int((self._limits.max_generated_ratio - 1.0) * wanted)
        is_complete = False
        try:
            while not is_complete:
                self._replace_discarded()
                # Groups join the batch in their order, as far as they are done.
                while self._started and len(self._chosen) < wanted:
                    entry = self._started[self.next_unconsumed]
                    if not entry.group.done():
                        break
                    # Checked when it ended, and again: it may have become too old.
                    if not self._discard_if_unusable(entry):
                        del self._started[entry.number]
                        self._chosen.append(entry)
                self.admit(self._published_step)
                is_complete = len(self._chosen) == wanted or len(self._discarded) > most_discarded
                if not is_complete:
                    assert self._started, "groups of a step whose weights are served may be sampled"
                    if not self._ended:
                        self._has_ended.clear()
                        await self._has_ended.wait()
        finally:
            if not is_complete:
                await self.close()
        self._num_consumed_steps += 1
        chosen, self._chosen = self._chosen, []
        is_short = len(chosen) < wanted
        # Groups discarded before the batch's last group are reported with it, later ones with a later batch.
        last = max((entry.number for entry in chosen), default=-1)
        ordered = sorted(self._discarded, key=lambda entry: entry[0])
        num_before = len(ordered) if is_short else sum(number <= last for number, _, _ in ordered)
        self._discarded = ordered[num_before:]
        return Batch(
            groups=[entry.group.result() for entry in chosen],
            numbers=[entry.number for entry in chosen],
            discarded=[(status, group) for _, status, group in ordered[:num_before]],
            discarded_numbers=[number for number, _, _ in ordered[:num_before]],
            is_short=is_short,
        )

    def note(self, status: GroupStatus, num_groups: int) -> None:
        """Count how groups of a taken batch ended."""
        self._by_status[status] += num_groups

    async def settle(self) -> None:
        """Wait until all groups that may be started are done, so that the result depends on no timing.

        Raises: the error of an attempt.
        """
        num_started = -1
        while num_started != self._num_started:
            num_started = self._num_started
            self.admit(self._published_step)
            await asyncio.gather(*(entry.group for entry in self._started.values()))
            self._replace_discarded()

    async def close(self) -> None:
        """Cancel running attempts. May be called twice."""
        running = [entry.group for entry in self._started.values()]
        self._started = {}
        for group in running:
            group.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _replace_discarded(self) -> None:
        """Discard ended groups that cannot be trained on, and start replacements."""
        ended, self._ended = self._ended, []
        for entry in ended:
            self._discard_if_unusable(entry)
        self.admit(self._published_step)

    def _discard_if_unusable(self, entry: _Started) -> bool:
        reason = self._find_discard_reason(entry.group.result())
        if reason is None:
            return False
        del self._started[entry.number]
        self._discarded.append((entry.number, reason, entry.group.result()))
        self._by_status[reason] += 1
        return True

    def _note_end(self, entry: _Started, _: asyncio.Future[Group]) -> None:
        """Wake the waiting `take`; a cancelled group is dropped already."""
        if entry.number in self._started:
            self._ended.append(entry)
            self._has_ended.set()
