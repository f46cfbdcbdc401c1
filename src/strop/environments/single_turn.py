"""The environment of single-turn tasks, and the choice of a task's environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from strop.environments.contract import Action, Environment, StepResult
from strop.errors import DataError
from strop.rollout import Example, Message, Outcome
from strop.tasks import Task, limits_of
from strop.tasks.contract import within_bounds
from strop.tasks.judging import InlineJudge, Judge
from strop.tasks.traits import world_of


class SingleTurn:
    """One question, one reply. A missing reply is judged as an empty one."""

    max_turns = 1

    def __init__(self, task: Task, judge: Judge | None = None) -> None:
        self._task = task
        self._judge = judge or InlineJudge(task)
        self._example: Example | None = None
        self._reply: Action | None = None
        self.stop_strings = task.limits.stop_strings
        self.base_stop_strings = task.limits.base_stop_strings

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the example; the seed has no effect here."""
        self._example = example
        self._reply = None
        limits = limits_of(self._task, example)
        self.stop_strings, self.base_stop_strings = limits.stop_strings, limits.base_stop_strings
        return self._task.render(example)

    async def step(self, action: Action) -> StepResult:
        """Keep the reply, and end the attempt."""
        if self._example is None or self._reply is not None:
            when = "before reset" if self._example is None else "after its end"
            raise DataError(f"{self._task.name}: step called {when}")
        self._reply = action
        return StepResult(messages=(), done=True)

    async def score(self) -> Outcome:
        """Judge the reply; a score outside the task's limits is the task's failure."""
        if self._example is None:
            raise DataError(f"{self._task.name}: score called before reset")
        outcome = await self._judge.judge(self._example, "" if self._reply is None else self._reply.text)
        return within_bounds(outcome, limits_of(self._task, self._example))

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def choose_environment(task: Task, judge: Judge | None = None) -> Callable[[], Environment]:
    """Return a factory of the task's environment: its own world, or `SingleTurn`.

    Without a judge, replies are judged in this process.
    """
    world = world_of(task)
    return partial(SingleTurn, task, judge) if world is None else partial(world.make_environment, judge)
