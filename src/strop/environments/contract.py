"""The interface of environments: one object is one attempt, built, run once and closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from strop.rollout import Example, FinishReason, Message, Outcome, Split
from strop.spec.task import EnvironmentSection
from strop.tasks.tool_calls import Spoken

if TYPE_CHECKING:
    from strop.environments.recording import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """The policy's reply of one turn."""

    text: str
    """Ends before its terminator or stop string."""
    finish_reason: FinishReason
    """EOS, STOP_STRING or LENGTH; an aborted reply never becomes an action."""
    spoken: Spoken | None = None
    """The parsed reply, if the opening named tools."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step or a tool of an author's environment returns this to end the attempt."""

    text: str = ""
    """The reason, for people: the model does not see it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The world's answer to one reply."""

    messages: tuple[Message, ...]
    """Shown to the policy before its next turn; empty when done."""
    done: bool
    """Whether the attempt is over."""


class NumberedSection(EnvironmentSection):
    """Base of environments whose examples are numbers."""

    num_train: int = Field(default=1000, ge=1, le=10**6, description="Attempts to train on.")
    num_held_out: int = Field(default=100, ge=1, le=10**6, description="Attempts that are held out.")

    def numbers_of(self, split: Split) -> range:
        """Return the numbers of a split's examples: the held-out ones come first."""
        whole = range(self.num_held_out + self.num_train)
        return whole[: self.num_held_out] if split is Split.HELD_OUT else whole[self.num_held_out :]


class Environment:
    """One attempt at one example, run once. Every random draw comes from the seed of `reset`.

    An exception leaves the rollout without a score. `AttemptFailed` names the failure's owner, for example
    `AttemptFailed(FailureOwner.INFRA, "disk_full", "no room for the workspace")`; a sandbox error is owned by
    the machine, any other by the task. `score` may return an outcome that holds a failure instead.
    """

    max_turns: int = 1
    """Largest number of turns: K turns mean K replies, K steps, then the score."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a reply, beside the model's own terminator."""
    base_stop_strings: tuple[str, ...] = ()
    """Those that end a reply to a prompt in plain text, too."""
    max_attempt_tokens: int | None = None
    """Tokens of all the policy's turns together; then the attempt is scored. None: no bound."""
    is_conducted: bool = False
    """Whether a program conducts the attempt, by `act`; then `step` is never called."""

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Start the attempt and return its opening messages; equal example and seed, equal messages."""
        raise NotImplementedError

    async def step(self, action: Action) -> StepResult:
        """Take one reply, also the last one before a limit."""
        raise NotImplementedError

    async def act(self, recorder: Recorder) -> None:
        """Let the program call the model as often as it likes. Raises: AttemptFailed."""
        raise NotImplementedError

    async def score(self) -> Outcome:
        """Judge the attempt, also without any step, or after a limit."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release everything the attempt holds. Always called; may be called twice."""
