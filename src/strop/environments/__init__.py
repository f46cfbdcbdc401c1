"""The environments that the model acts in, and the one rollout path: reset, step and score.

`run_rollout` plays one attempt from reset to score; `run_group` plays all attempts at one example, and
repeats those that the machine or the engine failed. A single-turn task is an environment with one step
(`SingleTurn`); `choose_environment` alone picks a run's environment.
An author writes a plain class with `reset`, `step` or tools, and `score` (`worlds`): `Done` ends an attempt,
`ToolError` reports an error to the model; attempts of a `Workspace` have a sandbox.
Engine ids are extended, never rendered again; where that fails, a new sample begins. Failures become outcomes
without a score, and an environment can name a failure's owner (`AttemptFailed`).
Not here: the judging of replies (`tasks`), and training (`train`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop import bring_when_asked

if TYPE_CHECKING:
    from strop.environments.contract import Action, Done, Environment, StepResult
    from strop.environments.groups import run_group, run_groups
    from strop.environments.rollout import RolloutPlan, run_rollout
    from strop.environments.single_turn import SingleTurn, choose_environment
    from strop.environments.tools import ToolError
    from strop.environments.workspace import Workspace
    from strop.tasks.failures import AttemptFailed
else:
    # Lazy: authors import a class and an error, in processes that are started often.
    __getattr__ = bring_when_asked(
        __name__,
        {
            "strop.environments.contract": "Action Done Environment StepResult",
            "strop.environments.groups": "run_group run_groups",
            "strop.environments.rollout": "RolloutPlan run_rollout",
            "strop.environments.single_turn": "SingleTurn choose_environment",
            "strop.environments.tools": "ToolError",
            "strop.environments.workspace": "Workspace",
            "strop.tasks.failures": "AttemptFailed",
        },
    )

__all__ = [
    "Action",
    "AttemptFailed",
    "Done",
    "Environment",
    "RolloutPlan",
    "SingleTurn",
    "StepResult",
    "ToolError",
    "Workspace",
    "choose_environment",
    "run_group",
    "run_groups",
    "run_rollout",
]
