"""The optimizer steps of one batch, and what they were together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.cluster import LearnerRole
from strop.errors import LearnerError
from strop.policy.learner import Term
from strop.policy.step_report import StepPlan, StepReport
from strop.spec.train import TrainSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update:
    """What became of the optimizer steps of a batch."""

    steps: tuple[StepReport, ...] = ()
    """Those whose gradient was computed and finite, in order; the last one may not have been taken."""
    num_refused: int = 0
    """Steps whose loss or gradient was not finite."""
    num_left_out: int = 0
    """Steps that the bound on the divergence left out."""

    @property
    def num_taken(self) -> int:
        """Steps that have moved the weights."""
        return sum(step.is_taken for step in self.steps)


async def take_steps(
    learner: LearnerRole,
    steps: Sequence[Sequence[Term]],
    train: TrainSpec,
    step: int,
    on_refused: Callable[[LearnerError], None],
) -> Update:
    """Take the optimizer steps of the batch that follows `step` completed ones, for one version together.

    One that is not finite is refused and told, and the others go on. Where the policy is farther than
    `train.max_kl` from where its ratios start, the rest of the batch is left out.
    """
    version, first = learner.version + 1, step * train.steps_per_batch
    reports: list[StepReport] = []
    num_refused = num_left_out = 0
    for index, terms in enumerate(steps):
        plan = StepPlan(version=version, place=first + index, max_kl=train.max_kl)
        try:
            reports.append(await learner.step_terms(terms, plan))
        except LearnerError as error:
            num_refused += 1
            on_refused(error)
            continue
        if not reports[-1].is_taken:
            num_left_out = len(steps) - index
            break
    return Update(steps=tuple(reports), num_refused=num_refused, num_left_out=num_left_out)
