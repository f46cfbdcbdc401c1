"""The environments by name, and the one place that chooses which of them a run has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from strop.environments.contract import Environment
from strop.environments.single_turn import SingleTurn
from strop.errors import ConfigError
from strop.tasks import Task
from strop.tasks.judging import Judge

EnvironmentFactory = Callable[[Task, Judge | None], Environment]
"""Makes one attempt. Its examples are the task's; without a judge, replies are judged in this process."""

SINGLE_TURN = "single-turn"
ENVIRONMENTS: Mapping[str, EnvironmentFactory] = MappingProxyType({SINGLE_TURN: SingleTurn})


def choose_environment(
    task: Task, judge: Judge | None = None, *, name: str = SINGLE_TURN
) -> Callable[[], Environment]:
    """Return the constructor of the environment in which a run attempts the examples of a task.

    Raises: ConfigError if there is none of this name.
    """
    if name not in ENVIRONMENTS:
        raise ConfigError(
            f"the environment {name!r}",
            allowed=", ".join(ENVIRONMENTS),
            next_step="correct the name",
        )
    return partial(ENVIRONMENTS[name], task, judge)
