"""Exceptions of a rollout as values.

One broken verifier or sandbox must not end a run of thousands of rollouts, and must never count as a wrong
answer: code that calls foreign code wraps it with `catch_failure` and stores the failure instead of a score.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from strop.errors import (
    ConfigError,
    Interrupted,
    RunStopped,
    SandboxError,
    WeightMismatch,
    describe_error,
    find_place,
)
from strop.rollout import Failure, FailureOwner, Outcome

_MAX_TRACE_CHARS = 3000
_OF_THE_RUN = (WeightMismatch, ConfigError, RunStopped, Interrupted)


class AttemptFailed(Exception):
    """Raised by an environment that cannot continue or cannot score, with the failure's owner and kind.

    The rollout then has no score. A reply that is wrong, malformed or broken code is not such a failure: it
    is scored.
    """

    def __init__(self, owner: FailureOwner, kind: str, detail: str) -> None:
        """`kind` is the cause in one word, for counting."""
        # All three arguments, so that it survives pickling.
        super().__init__(owner, kind, detail)
        self.owner = owner
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[2])


class catch_failure:
    """Run a block and keep its exception, with traceback, in `failure` (None: no exception).

    SystemExit is kept too: foreign code does not decide that a run ends, or how.
    Errors of the whole run pass through: cancellation, WeightMismatch, ConfigError, RunStopped, Interrupted.
    A class and not a generator, for speed: every rollout in flight is inside one.
    """

    def __init__(self, owner: FailureOwner | Callable[[], FailureOwner]) -> None:
        """`owner`: the owner of the failure, or a function that is called after the block has raised."""
        self.failure: Failure | None = None
        self._owner = owner

    def __enter__(self) -> catch_failure:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception | SystemExit) or isinstance(error, _OF_THE_RUN):
            return False
        self.failure = to_failure(error, self._owner() if callable(self._owner) else self._owner)
        return True


def to_failure(error: Exception | SystemExit, owner: FailureOwner) -> Failure:
    """Convert an exception to a failure; `detail` is its traceback and a last line with message and place.

    `owner` is the default; `AttemptFailed` and errors of the machine have their own.
    """
    kind = type(error).__name__
    if isinstance(error, AttemptFailed):
        owner, kind = error.owner, error.kind
    elif isinstance(error, SandboxError):
        owner = FailureOwner.INFRA
    message = "".join(traceback.format_exception_only(error)).strip()
    line = describe_error(error).replace(type(error).__name__, kind, 1)
    trace = "".join(traceback.format_exception(error)).strip().removesuffix(message)[-_MAX_TRACE_CHARS:]
    return Failure(owner=owner, kind=kind, detail=trace + line)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCause:
    """Failures of one owner, kind and place."""

    failure: Failure
    """The first of them."""
    num: int


def key_of(failure: Failure) -> tuple[str, str, str | None]:
    """Return owner, kind and place. Not the message, which may name details of a single rollout."""
    return failure.owner, failure.kind, find_place(failure.detail.rstrip())


def find_causes(outcomes: Iterable[Outcome]) -> tuple[FailureCause, ...]:
    """Group the failures of outcomes by cause, the commonest first.

    A prompt that was too long to be attempted is no failure.
    """
    failures = [one.failure for one in outcomes if one.failure is not None and not one.is_too_long]
    first = {key_of(failure): failure for failure in reversed(failures)}
    counts = Counter(map(key_of, failures))
    return tuple(FailureCause(failure=first[key], num=num) for key, num in counts.most_common())


def add_traces(error: Exception, causes: Iterable[FailureCause]) -> None:
    """Add the tracebacks of failures to an error as notes."""
    for cause in causes:
        error.add_note(cause.failure.detail)


def describe_failure(failure: Failure) -> str:
    """Describe a failure in one line: 'engine, RuntimeError: no such operator (prepacked.py:64)'."""
    line = (failure.detail.strip().splitlines() or [""])[-1]
    name = line.partition(" ")[0].removesuffix(":")
    # 'TypeError: ...' under the kind TypeError, or verifier_TypeError.
    message = line.removeprefix(name) if failure.kind.endswith(name) else f": {line}"
    return f"{failure.owner}, {failure.kind}{message}"


def sum_up(causes: Sequence[FailureCause], num_all: int, noun: str = "rollouts") -> str:
    """Summarize why attempts failed: how many of how many, the commonest cause, the kinds of the others.

    'all 64 rollouts failed: engine, RuntimeError: no such operator (prepacked.py:64)'.
    """
    first, *others = causes
    num_failed = sum(cause.num for cause in causes)
    share = f"all {num_all}" if num_failed == num_all else f"{num_failed} of {num_all}"
    text = f"{share} {noun} failed: {describe_failure(first.failure)}"
    if others:
        kinds = ", ".join(f"{c.num} of {c.failure.owner}, {c.failure.kind}" for c in others[:3])
        text += f" ({first.num} times; {num_failed - first.num} otherwise: {kinds})"
    return text
