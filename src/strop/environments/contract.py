"""The seam to worlds: one environment object is one attempt, built, run once and closed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from strop.rollout import Example, FinishReason, Message, Outcome, Split
from strop.tool_calls import Spoken

PROFILE_AREA = "profile_area"
"""Metric of an attempt at a suite of tasks whose best scores are known: what it adds, from 0 to 1, to the
area under the suite's performance profile. Evaluations take the mean over tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What the policy said in one turn."""

    text: str
    """Ends before its terminator or stop string."""
    finish_reason: FinishReason
    """EOS, STOP_STRING, LENGTH or CHOSEN; an aborted reply never becomes an action."""
    spoken: Spoken | None = None
    """The reply taken apart, where the opening named tools."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a step or a tool of an author's environment returns to end the attempt."""

    text: str = ""
    """Why it ended, for people: the model does not see it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the world answered."""

    messages: tuple[Message, ...]
    """Shown to the policy before its next turn; empty when done."""
    done: bool
    """Whether the attempt is over."""


Made = TypeVar("Made")
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True, eq=False)
class Kept(Generic[Made]):
    """Where an attempt, or what it is made on, stands; others may go on from there."""

    restore: Callable[[], Awaitable[Made]]
    """Returns one that stands there, as often as it is called: equal replies are told the same."""
    close: Callable[[], Awaitable[None]]
    """Releases what is held. May be called twice."""

    def then(self, wrap: Callable[[Made], Other]) -> Kept[Other]:
        """Return the same of something that is made on what is restored."""

        async def restore() -> Other:
            return wrap(await self.restore())

        return Kept(restore, self.close)


def numbers_of(split: Split, *, num_train: int, num_held_out: int) -> range:
    """Return the numbers of a split's examples, where examples are numbers: those held out come first."""
    return range(num_held_out) if split is Split.HELD_OUT else range(num_held_out, num_held_out + num_train)


class Environment(Protocol):
    """One attempt at one example. Every random draw comes from the seed that `reset` was given.

    An exception leaves the rollout without a score. `AttemptFailed` says whose failure it is, for example
    `AttemptFailed(FailureOwner.INFRA, "disk_full", "no room for the workspace")`; an error of the sandbox is
    the machine's; any other is the task's. `score` may return an outcome that holds a failure instead.

    Optional members, asked for with `getattr`:

    base_stop_strings: texts that end a reply to a prompt in plain text, beside `stop_strings`.
    choices: replies among which the policy chooses instead of writing one, since `reset`; () where it writes.
    max_attempt_tokens: tokens that the policy may say in all its turns; then the attempt is scored. None: no
        bound.
    max_attempt_s: wall time from `reset` on, in seconds, with the same end; a reply that is not done by then
        is given up. None: no bound. What `reset` waited for a place, `waited_s`, does not count.
    snapshot: awaited, a `Kept` environment, from which others go on; or None where that is not possible yet.
        None in its place: the attempt is played again for others.
    act: takes a `Recorder`, and lets a program conduct the attempt, asking the model as often as it likes,
        until the program ends; `step` is never called; `score` judges what it made. Raises: AttemptFailed.
    """

    @property
    def max_turns(self) -> int:
        """Turns that the policy has at most: K turns mean K replies, K steps, then the score."""
        ...

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a reply, beside the model's own terminator."""
        ...

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Start the attempt and return its opening messages; equal example and seed, equal messages."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Take one reply. Called for every reply, the last one before a limit included.

        Raises: DataError before `reset` or after the attempt is done.
        """
        ...

    async def score(self) -> Outcome:
        """Judge the attempt; works without any step and after a limit, then giving the floor.

        Raises: DataError before `reset`.
        """
        ...

    async def close(self) -> None:
        """Release everything the attempt holds. Always called; may be called twice."""
        ...
