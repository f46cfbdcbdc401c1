"""An environment that follows a script, for tests and for trying rollouts without a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strop.environments.contract import Action, StepResult
from strop.errors import DataError
from strop.rollout import Example, Message, Outcome

Judge = Callable[[Example, tuple[Action, ...]], Outcome]


class ScriptedEnvironment:
    """Starts with the opening messages and answers each reply with the next line of its script.

    Done after the reply to the last line, or never if `never_done` (the fault of REW-9).
    """

    def __init__(
        self,
        opening: Sequence[Message],
        responses: Sequence[Sequence[Message]],
        judge: Judge,
        *,
        stop_strings: tuple[str, ...] = (),
        never_done: bool = False,
    ) -> None:
        self._opening = tuple(opening)
        self._responses = [tuple(response) for response in responses]
        self._judge = judge
        self._never_done = never_done
        self._example: Example | None = None
        self.actions: list[Action] = []
        """The policy's replies since the last reset."""
        self.num_closes = 0
        """How often the environment was closed."""
        self.stop_strings = stop_strings
        self.max_turns = len(responses) + 1

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Return the opening, whatever the seed."""
        self._example = example
        self.actions = []
        return self._opening

    async def step(self, action: Action) -> StepResult:
        """Answer a reply with the next scripted messages.

        Raises: DataError, quoting the reply, if the script has ended.
        """
        if self._example is None or len(self.actions) == self.max_turns:
            raise DataError(
                f"the scripted environment has no answer to {action.text!r}",
                allowed=f"{self.max_turns} replies after a reset",
                next_step="lengthen the script, or end the attempt when it is done",
            )
        self.actions.append(action)
        if len(self.actions) == self.max_turns:
            return StepResult(messages=(), done=not self._never_done)
        return StepResult(messages=self._responses[len(self.actions) - 1], done=False)

    async def score(self) -> Outcome:
        """Judge all replies."""
        if self._example is None:
            raise DataError(
                "a score of the scripted environment before reset",
                allowed="score after reset",
                next_step="call reset first",
            )
        return self._judge(self._example, tuple(self.actions))

    async def close(self) -> None:
        """Count the call."""
        self.num_closes += 1
