"""The environment of single-turn tasks, and the choice of a task's environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from strop.environments.contract import Action, Environment, StepResult
from strop.rollout import Example, Message, Outcome
from strop.tasks import Task
from strop.tasks.judging import Judge
from strop.tasks.task import within_bounds


class Answered(Environment):
    """An attempt that ends in one text, its answer, which the task judges: alone, or beside its group's."""

    is_member = False
    """Set by who judges the group behind its last attempt: `score` leaves to it what is compared."""

    def __init__(self, task: Task, judge: Judge | None = None) -> None:
        self._task = task
        self._judge = judge or Judge(task)
        self._example: Example | None = None
        self.answer = ""

    async def score(self) -> Outcome:
        """Judge the answer; a score outside the task's limits is the task's failure."""
        assert self._example is not None
        return await self.judge_answer(self._example, self.answer)

    async def judge_answer(self, example: Example, answer: str) -> Outcome:
        """Judge an answer to an example."""
        if self.is_member and self._task.compares(example):
            return Outcome(parts={})
        return within_bounds(await self._judge.judge(example, answer), self._task.limits_of(example))

    async def score_group(
        self, example: Example, answers: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Judge answers beside each other; where a task compares nothing their outcomes are whole."""
        if self._task.compares(example):
            limits = self._task.limits_of(example)
            found = await self._judge.judge_group(example, answers, outcomes)
            outcomes = [within_bounds(outcome, limits) for outcome in found]
        return outcomes


class SingleTurn(Answered):
    """One question, one reply. A missing reply is judged as an empty one."""

    def __init__(self, task: Task, judge: Judge | None = None) -> None:
        super().__init__(task, judge)
        self._is_over = False
        self.stop_strings = task.limits.stop_strings
        self.base_stop_strings = task.limits.base_stop_strings

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the example; the seed has no effect here."""
        self._example = example
        self._is_over, self.answer = False, ""
        limits = self._task.limits_of(example)
        self.stop_strings, self.base_stop_strings = limits.stop_strings, limits.base_stop_strings
        return self._task.render(example)

    async def step(self, action: Action) -> StepResult:
        """Keep the reply, and end the attempt."""
        assert self._example is not None
        assert not self._is_over
        self._is_over, self.answer = True, action.text
        return StepResult(messages=(), done=True)


def choose_environment(task: Task, judge: Judge | None = None) -> Callable[[], Environment]:
    """Return a factory of the task's environment: its own world, or `SingleTurn`.

    Without a judge, replies are judged in this process.
    """
    world = task.world
    return partial(SingleTurn, task, judge) if world is None else partial(world.make_environment, judge)
