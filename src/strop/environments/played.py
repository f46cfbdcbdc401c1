"""One attempt at an example of a `WorldTask`: its turns and its tool calls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from strop.environments.contract import Action, StepResult
from strop.environments.objects import WorldObject
from strop.environments.tools import CallRefused, ToolError, cut_text
from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, ToolCall
from strop.spec.task import EnvironmentSection
from strop.tasks.task import within_bounds
from strop.tasks.tool_calls import CallFormat, read_reply
from strop.tasks.user.own_task import require_whole

if TYPE_CHECKING:
    from strop.environments.worlds import WorldTask


class PlayedWorld:
    """One attempt on an object of an author's class."""

    def __init__(self, task: WorldTask) -> None:
        self._task = task
        section: EnvironmentSection = task.section
        self._section = section
        self.max_turns = task.max_turns
        self.stop_strings = task.limits.stop_strings
        self.base_stop_strings = task.limits.base_stop_strings
        self.max_attempt_tokens = section.max_attempt_tokens
        self.max_attempt_s = section.max_attempt_s
        self._object: WorldObject | None = None
        self._num_turns = 0
        self._is_over = False
        """Whether the world ended the attempt."""
        self._has_replied = False
        self._num_bad_replies = 0
        """Consecutive ones up to now."""
        self._counts = dict.fromkeys(("num_tool_calls", "num_format_errors", "num_tool_errors"), 0.0)

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make a new object, and open the attempt. Raises: DataError if the example is incomplete."""
        require_whole(self._task.name, example)
        await self.close()
        self._object = self._task.make_attempt()
        self._num_turns, self._is_over, self._has_replied = 0, False, False
        return self._task.pose(await self._object.reset(example, seed), example)

    async def step(self, action: Action) -> StepResult:
        """Give the reply to the object, or to the tools that it calls."""
        if self._object is None or self._is_over or self._num_turns == self.max_turns:
            raise DataError(f"{self._task.name}: step before reset, or after the attempt's end")
        self._num_turns += 1
        self._has_replied |= bool(action.text.strip())
        if self._task.tools:
            messages = await self._act(self._object, action)
        else:
            messages, self._is_over = await self._object.step(action.text)
        is_done = self._is_over or self._num_turns == self.max_turns
        return StepResult(messages=() if is_done else messages, done=is_done)

    async def score(self) -> Outcome:
        """Score the attempt. Raises: DataError before `reset`."""
        if self._object is None:
            raise DataError(f"{self._task.name}: score before reset")
        outcome = await self._object.score()
        metrics = dict(outcome.metrics)
        if self._task.tools:
            metrics |= self._counts
            if outcome.format_ok is None:
                is_formed = self._has_replied and not self._counts["num_format_errors"]
                outcome = replace(outcome, format_ok=is_formed)
        if not self._is_over and self._num_turns == self.max_turns:
            metrics["out_of_turns"] = 1.0
        return within_bounds(replace(outcome, metrics=metrics), self._task.limits)

    async def close(self) -> None:
        """Close the object."""
        world, self._object = self._object, None
        if world is not None:
            await world.close()

    async def _act(self, world: WorldObject, action: Action) -> tuple[Message, ...]:
        """Execute the calls of a reply, and report malformed ones."""
        spoken = action.spoken
        if spoken is None:
            functions = {name: json.loads(tool)["function"] for name, tool in self._task.tools.items()}
            schemas = {name: function["parameters"] for name, function in functions.items()}
            spoken = read_reply(action.text, CallFormat.FENCE, schemas)
        messages, num_wrong = [], len(spoken.mistakes)
        for call in spoken.calls:
            if not self._is_over:
                text, is_wrong = await self._call(world, call)
                num_wrong += is_wrong
                messages.append(Message(role="tool", content=text, tool_call_id=call.call_id, name=call.name))
        messages += [Message(role="user", content=mistake) for mistake in spoken.mistakes]
        self._counts["num_format_errors"] += num_wrong
        self._num_bad_replies = self._num_bad_replies + 1 if num_wrong else 0
        if self._num_bad_replies >= self._section.max_format_errors:
            self._is_over = True
        if spoken.calls or spoken.mistakes or self._is_over:
            return tuple(messages)
        if not self._task.has_step:
            self._is_over = True
            return ()
        answer, self._is_over = await world.step(spoken.content)
        return answer

    async def _call(self, world: WorldObject, call: ToolCall) -> tuple[str, bool]:
        """Execute one call; return the text for the model, and whether the call was malformed."""
        self._counts["num_tool_calls"] += 1
        max_chars = self._section.max_observation_chars
        try:
            text, self._is_over = await world.call(call)
        except CallRefused as error:
            return cut_text(f"error: {error}", max_chars), True
        except ToolError as error:
            self._counts["num_tool_errors"] += 1
            return cut_text(f"error: {error}", max_chars), False
        return text, False
