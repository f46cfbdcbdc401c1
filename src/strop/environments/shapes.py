"""Adapters that turn Gymnasium's and TRL's environment classes into strop's form (`worlds`).

They are recognised by their methods (`user_code.probe.Shape`) and need no base class. Either may also have
`max_turns`, `limits`, `examples`, `gold_replies`, `problem_of` and `score`, as in strop's own form.
Without `examples`, attempts differ by a seed. Tried with gymnasium 1.4.0; TRL's form as trl 1.16.0 calls it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any

from strop.environments.contract import Done, numbers_of
from strop.environments.tools import RESERVED, ToolError
from strop.rollout import Example, Message, Outcome, Split
from strop.tasks.contract import TaskLimits
from strop.user_code.probe import Shape, shape_of

NUM_TRAIN, NUM_HELD_OUT = 1000, 100
"""Attempts of a class without `examples`; each has another seed."""
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# Readers of plain text need a mark where only a colour marks a place.
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0?m", re.DOTALL)
_PASSED_ON = frozenset({"limits", "max_turns", "gold_replies", "problem_of"})
_LISTED = 100
"""Largest array that is shown as a list."""


@cache
def adapt(kind: type) -> Callable[[], Any]:
    """Return a factory of objects in strop's form for a class in Gymnasium's or TRL's form."""
    if shape_of(kind) is Shape.GYMNASIUM:
        return lambda: GymnasiumWorld(kind())
    tools = {
        name: _reporting_errors(member)
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in RESERVED
    }
    return type(kind.__name__, (_TrlWorld, kind), {**tools, "__doc__": kind.__doc__})


def number_examples(split: Split | str) -> Iterator[Mapping[str, int]]:
    """Yield examples that consist of a seed; the splits share none."""
    seeds = numbers_of(Split(split), num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT)
    return ({"seed": seed} for seed in seeds)


class GymnasiumWorld:
    """An attempt on an object with `reset(seed=...)` and `step(action)`; the score is the sum of its rewards.

    The model sees `show(observation)` if the class has it, the text of `render()` in the mode 'ansi', else
    the observation. The action is `read(text)` if the class has it; else the last numbers of the reply, as
    many as its `action_space` takes, or the reply itself. A reply without an action costs a turn.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self._rewards: list[float] = []
        self._counts = dict.fromkeys(("terminated", "truncated_by_world", "num_invalid_actions"), 0.0)

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_ON:
            return getattr(self._own, name)
        raise AttributeError(name)

    def examples(self, split: str) -> Any:
        """Return the class's examples, or seeds."""
        own = getattr(self._own, "examples", None)
        return number_examples(split) if own is None else own(split)

    def reset(self, example: Example, seed: int) -> str:
        """Reset with an example's `seed`, and its other fields as the options."""
        options = {name: value for name, value in example.fields.items() if name != "seed"}
        observation, _ = self._own.reset(seed=example.fields.get("seed", seed), options=options or None)
        parts = (getattr(self._own, "instructions", ""), self._explain_actions(), self._show(observation))
        return "\n\n".join(filter(None, parts))

    def step(self, text: str) -> str | Done:
        """Take the reply's action."""
        action = self._read(text)
        if action is None:
            self._counts["num_invalid_actions"] += 1
            self._rewards.append(0.0)
            return f"That is no action. {self._explain_actions()}".rstrip()
        observation, reward, terminated, truncated, _ = self._own.step(action)
        self._rewards.append(float(reward))
        self._counts |= {"terminated": float(terminated), "truncated_by_world": float(truncated)}
        shown = self._show(observation)
        return Done(shown) if terminated or truncated else shown

    def score(self) -> Any:
        """Return the class's own score, or the sum of the rewards."""
        own = getattr(self._own, "score", None)
        if own is not None:
            return own()
        limits = getattr(self._own, "limits", None)
        full = limits.max_reward if isinstance(limits, TaskLimits) else 1.0
        total = sum(self._rewards)
        return Outcome(
            parts={"return": total},
            is_correct=total >= full,
            turn_rewards=tuple(self._rewards),
            format_ok=not self._counts["num_invalid_actions"],
            metrics=dict(self._counts),
        )

    def close(self) -> None:
        """Close the object, if it has `close`."""
        if callable(close := getattr(self._own, "close", None)):
            close()

    def _show(self, observation: Any) -> str:
        if callable(show := getattr(self._own, "show", None)):
            return str(show(observation))
        if getattr(self._own, "render_mode", None) == "ansi":
            return _COLOURED.sub(r"[\1]", str(self._own.render())).strip("\n")
        return observation if isinstance(observation, str) else _describe(observation)

    def _explain_actions(self) -> str:
        """Explain the form of an action, as far as the action space shows it."""
        space = getattr(self._own, "action_space", None)
        if space is None or callable(getattr(self._own, "read", None)):
            return ""
        if hasattr(space, "n") and getattr(space, "shape", None) == ():
            return f"Reply with a number from {int(space.start)} to {int(space.start + space.n) - 1}."
        size = _size_of(space)
        return f"Reply with {size} number{'s' * (size > 1)}." if size else ""

    def _read(self, text: str) -> Any:
        """Return the action of a reply, or None if it has none."""
        if callable(read := getattr(self._own, "read", None)):
            return read(text)
        space = getattr(self._own, "action_space", None)
        if space is None:
            return text
        size = _size_of(space)
        if not size:
            return text if space.contains(text) else None
        numbers = _NUMBER.findall(text)[-size:]
        if len(numbers) < size:
            return None
        if space.shape == ():
            action: Any = int(numbers[0]) if numbers[0].lstrip("+-").isdigit() else None
        else:
            import numpy as np

            action = np.array(list(map(float, numbers))).astype(space.dtype).reshape(space.shape)
        return action if action is not None and space.contains(action) else None


def _size_of(space: Any) -> int:
    """Return how many numbers an action has; 0 if it does not consist of numbers."""
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or getattr(dtype, "kind", "O") not in "iufb":
        return 0
    size = 1
    for length in shape:
        size *= length
    return size


def _describe(observation: Any) -> str:
    """Return an observation as text: short arrays as lists, long ones shortened."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_describe(value)}" for name, value in observation.items())
    size = getattr(observation, "size", 0)
    if hasattr(observation, "tolist") and isinstance(size, int) and size <= _LISTED:
        observation = observation.tolist()
    return str(observation)


class _TrlWorld:
    """Mix-in for a class with `reset(**row)`, tools and `get_reward`."""

    def examples(self, split: str) -> Any:
        """Return the class's examples, or seeds."""
        own = getattr(super(), "examples", None)
        return number_examples(split) if own is None else own(split)

    def reset(self, example: Example, seed: int) -> Any:
        """Begin with a row: its prompt, followed by the result of `reset`."""
        row = dict(example.fields)
        if example.answer is not None:
            row["answer"] = example.answer
        reset: Callable[..., Any] = super().reset  # type: ignore[misc]
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        observation = reset(**{name: value for name, value in row.items() if takes_all or name in names})
        prompt = row.get("prompt", getattr(self, "instructions", ""))
        if isinstance(prompt, str):
            messages = [Message(role="user", content=prompt)]
        else:
            messages = [part if isinstance(part, Message) else Message.from_json(part) for part in prompt]
        if observation is None:
            return messages
        last = messages[-1]
        return [*messages[:-1], Message(role=last.role, content=last.text + str(observation))]

    def score(self) -> Any:
        """Return the class's reward."""
        own = getattr(super(), "score", None) or self.get_reward  # type: ignore[attr-defined]
        return own()


class _ErrorReport:
    """Turns an error of a tool into ToolError."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise ToolError for an error of the tool."""
        if isinstance(error, Exception):
            raise ToolError(str(error)) from error


def _reporting_errors(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tool so that its errors are reported to the model, as TRL does."""
    if inspect.iscoroutinefunction(tool):

        @wraps(tool)
        async def wait(*args: Any, **kwargs: Any) -> Any:
            with _ErrorReport():
                return await tool(*args, **kwargs)

        return wait

    @wraps(tool)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _ErrorReport():
            return tool(*args, **kwargs)

    return call
