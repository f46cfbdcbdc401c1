"""A task as an environment: one question, one reply."""

from __future__ import annotations

from strop.environments.contract import Action, StepResult
from strop.errors import DataError
from strop.rollout import Example, Message, Outcome
from strop.tasks import Task, choices_of, limits_of
from strop.tasks.contract import within_bounds
from strop.tasks.judging import InlineJudge, Judge


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
        self.choices: tuple[str, ...] = ()

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the example; the seed has nothing to decide here."""
        self._example = example
        self._reply = None
        limits = limits_of(self._task, example)
        self.stop_strings, self.base_stop_strings = limits.stop_strings, limits.base_stop_strings
        self.choices = choices_of(self._task, example)
        return self._task.render(example)

    async def step(self, action: Action) -> StepResult:
        """Keep the reply; the attempt is over."""
        if self._example is None or self._reply is not None:
            when = "before reset" if self._example is None else "after its end"
            raise DataError(f"{self._task.name}: step called {when}")
        self._reply = action
        return StepResult(messages=(), done=True)

    async def score(self) -> Outcome:
        """Have the reply judged; a score that the task cannot give is a failure of the task's."""
        if self._example is None:
            raise DataError(f"{self._task.name}: score called before reset")
        outcome = await self._judge.judge(self._example, "" if self._reply is None else self._reply.text)
        return within_bounds(outcome, limits_of(self._task, self._example))

    async def close(self) -> None:
        """Hold nothing, release nothing."""
