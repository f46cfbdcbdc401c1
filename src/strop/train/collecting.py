"""Which attempts a step asks for: from the schedule's examples to a source of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean

import numpy as np

from strop.algorithm import Algorithm, needs_replacement
from strop.cluster import Roles
from strop.environments import RolloutPlan, SingleTurn, run_group
from strop.rollout import Example, Group, Rollout, Sampling
from strop.spec.run import RunSpec
from strop.tasks import Task, limits_of
from strop.tasks.judging import Judge
from strop.train.batch import TrainBatch
from strop.train.generation import Batch, Fate, GroupSource, SourceLimits
from strop.train.schedule import ExampleSchedule


class Collector:
    """Plans the attempts at examples and has them walked, here or by workers."""

    def __init__(
        self, spec: RunSpec, task: Task, judge: Judge, roles: Roles, *, on_group: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._task = task
        self._judge = judge
        self._roles = roles
        self._on_group = on_group

    def open_source(
        self,
        algorithm: Algorithm,
        schedule: ExampleSchedule[Example],
        *,
        first_number: int,
        first_step: int,
    ) -> GroupSource:
        """Return the source of groups of a run that goes on after `first_step` steps."""
        spec = self._spec
        return GroupSource(
            SourceLimits(
                groups_per_step=spec.train.prompts_per_step,
                max_staleness=spec.train.max_staleness,
                num_steps=spec.train.steps,
            ),
            find_example=schedule.numbered,
            attempt=self.attempt,
            find_flaw=partial(self._find_flaw, algorithm=algorithm),
            first_number=first_number,
            first_step=first_step,
        )

    async def attempt(self, number: int, example: Example) -> Group:
        """Attempt an example as often as a group has members."""
        spec = self._spec
        plans = plan_attempts(
            spec,
            self._task,
            example,
            # Of the group, not of the loop: a stream's name depends on no timing.
            step=number // spec.train.prompts_per_step,
            num_attempts=spec.train.rollouts_per_prompt,
            max_positions=self._roles.learner.shape.max_positions,
        )
        if self._roles.run_group is not None:
            group = await self._roles.run_group(plans)
        else:
            make_environment = partial(SingleTurn, self._task, self._judge)
            group = await run_group(make_environment, self._roles.engine, self._roles.tokenizer, plans)
        self._on_group()
        return group

    def _find_flaw(self, group: Group, *, algorithm: Algorithm) -> Fate | None:
        """Say why a group may not be part of a batch, None where it may."""
        staleness = find_staleness([group], self._roles.learner.version)
        if staleness is not None and staleness > self._spec.train.max_staleness:
            return Fate.EVICTED
        rewards = [rollout.outcome.reward for rollout in group.rollouts]
        counts = [rollout.num_sampled_tokens for rollout in group.rollouts]
        limit = limits_of(self._task, group.example).max_reply_tokens
        if needs_replacement(algorithm, rewards, counts, limit):
            return Fate.FILTERED
        return None


def plan_attempts(
    spec: RunSpec, task: Task, example: Example, *, step: int, num_attempts: int, max_positions: int
) -> list[RolloutPlan]:
    """Plan the attempts at one example as the run file says; `step` names their random streams."""
    sampling = Sampling(**spec.sampling.model_dump())
    max_reply_tokens = limits_of(task, example).max_reply_tokens
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


def find_staleness(groups: Sequence[Group], version: int) -> int | None:
    """Return how many steps the oldest sampled token is behind `version`; None without tokens."""
    versions = [oldest for group in groups for rollout in group.rollouts for oldest in _versions(rollout)]
    return version - min(versions) if versions else None


def measure_staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Say how old the rollouts of a batch are, in steps, by their oldest token."""
    oldest = [min(found) for group in groups for r in group.rollouts if (found := _versions(r))]
    ages = version - np.array(oldest)
    if not len(ages):
        return {}
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}


def sort_by_fate(groups: Sequence[Group], batch: TrainBatch) -> list[Fate]:
    """Say how each group of a batch ended."""
    fates = []
    for group, is_forwarded_G in zip(groups, batch.credit.is_forwarded_P_G, strict=True):
        if bool(is_forwarded_G.any()):
            fates.append(Fate.TRAINED)
        elif sum(rollout.outcome.is_scored for rollout in group.rollouts) < 2:
            fates.append(Fate.FAILED)
        else:
            fates.append(Fate.SKIPPED)
    return fates


def measure_discarded(batch: Batch) -> dict[str, float]:
    """Say what was sampled on the way to a batch and not trained on; nothing where all of it was.

    `used_length_ratio` is the mean length of the replies that were young enough, over that of all that were
    dispatched: below 1, long replies came too late more often than short ones.
    """
    if not batch.discarded:
        return {}
    evicted = _lengths(group for fate, group in batch.discarded if fate is Fate.EVICTED)
    replaced = _lengths(group for fate, group in batch.discarded if fate is not Fate.EVICTED)
    used = _lengths(batch.groups)
    num_wasted = sum(evicted) + sum(replaced)
    metrics = {"wasted_token_frac": num_wasted / max(num_wasted + sum(used), 1)}
    for fate, num_groups in Counter(fate for fate, _ in batch.discarded).items():
        metrics[f"num_{fate}_groups"] = float(num_groups)
    # Those that were replaced for their rewards were in time.
    in_time = used + replaced
    if any(evicted) and any(in_time):
        metrics["used_length_ratio"] = fmean(in_time) / fmean(in_time + evicted)
    return metrics


def _lengths(groups: Iterable[Group]) -> list[int]:
    return [rollout.num_sampled_tokens for group in groups for rollout in group.rollouts]


def count_tokens(groups: Iterable[Group]) -> int:
    """Return the tokens that were sampled for groups."""
    return sum(_lengths(groups))


def _versions(rollout: Rollout) -> list[int]:
    return [turn.policy_version for turn in rollout.turns if turn.policy_version is not None]
