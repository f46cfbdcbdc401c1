"""Scores that a task cannot give: above its full marks, below its lowest marks, or not finite.

What gives one is broken, so nothing that it says of the reply is believed: the rollout has no score, its
owner is the task, and the score stays in its record for whoever mends the grader.
"""

from __future__ import annotations

import math
from dataclasses import replace

from strop.errors import explain_refusal
from strop.rollout import Failure, FailureOwner, Outcome
from strop.tasks.contract import TaskLimits

CEILING = "ceiling"
"""Kind of failure: a score above full marks."""
IMPOSSIBLE = "impossible_value"
"""Kind of failure: a score below the lowest marks, or one that is no number."""
_SLACK = 1e-6
"""Share of full marks that the rounding of a sum may add: rewards are often computed in float32."""


def is_within(reward: float, limits: TaskLimits) -> bool:
    """Whether a task with these limits can give a reward. Infinities and NaN: no."""
    slack = _SLACK * limits.max_reward
    return limits.min_reward - slack <= reward <= limits.max_reward + slack


def within_bounds(outcome: Outcome, limits: TaskLimits) -> Outcome:
    """Return an outcome as it is, or without a score where its score cannot be.

    A sum beyond its bounds by rounding alone stays as it is.
    """
    given = [value for value in outcome.parts.values() if value is not None]
    if outcome.failure is not None or not given:
        return outcome
    if not all(math.isfinite(value) for value in given):
        # Not kept as a number: records hold finite ones.
        parts = {
            name: None if value is not None and not math.isfinite(value) else value
            for name, value in outcome.parts.items()
        }
        return replace(outcome, parts=parts, is_correct=None, failure=_fail(outcome, math.nan, limits))
    reward = outcome.reward
    if reward is None or is_within(reward, limits):
        return outcome
    return replace(outcome, is_correct=None, failure=_fail(outcome, reward, limits))


def _fail(outcome: Outcome, reward: float, limits: TaskLimits) -> Failure:
    given = ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items() if value is not None)
    bounds = f"{limits.min_reward:g} to {limits.max_reward:g}"
    return Failure(
        owner=FailureOwner.TASK,
        kind=CEILING if reward > limits.max_reward else IMPOSSIBLE,
        detail=explain_refusal(
            f"a score of {reward:g} ({given})",
            allowed=f"{bounds}, what the task says that a reply can earn; the rollout is masked",
            next_step="mend the grader, or correct the task's max_reward and min_reward",
        ),
    )
