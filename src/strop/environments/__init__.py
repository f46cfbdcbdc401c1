"""The world that the model acts in: asked, answered, stepped and scored through one rollout path.

`run_rollout` walks one attempt from reset to score, `run_group` all attempts at one example. A single-turn
task is an environment with one step (`SingleTurn`); `choose_environment` alone decides which one a run has.
Engine ids are extended, never rendered again; where that fails, a new sample begins. Failures become outcomes
without a score, and an environment can say who owns one (`AttemptFailed`).
Not here: how a problem is judged (`tasks`), and what is trained on (`train`).
"""

from strop.environments.contract import Action, Choosing, Environment, StepResult
from strop.environments.rollout import (
    PromptCache,
    RolloutPlan,
    SingleTurn,
    choose_environment,
    reads_as,
    run_group,
    run_groups,
    run_rollout,
)
from strop.tasks.failures import AttemptFailed

__all__ = [
    "Action",
    "AttemptFailed",
    "Choosing",
    "Environment",
    "PromptCache",
    "RolloutPlan",
    "SingleTurn",
    "StepResult",
    "choose_environment",
    "reads_as",
    "run_group",
    "run_groups",
    "run_rollout",
]
