"""The one place where an exception of a rollout becomes a value.

One broken verifier or sandbox must not end a run of thousands of rollouts, and must never count as
a wrong answer: whoever runs foreign code wraps it here and stores the failure in place of a score.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from strop.errors import ConfigError, Interrupted, RunStopped, WeightMismatch, describe_error, find_place
from strop.rollout import Failure, FailureOwner, Outcome

_MAX_TRACE_CHARS = 2700
_MAX_SAID_CHARS = 400
_OF_THE_RUN = (WeightMismatch, ConfigError, RunStopped, Interrupted)
_OF_THE_MACHINE = frozenset({"SandboxError", "SandboxRefused", "SandboxLost", "closed"})
"""Classes of exceptions, and what a pool of workers says of a call that it was closed under."""


def owner_of_error(kind: str) -> FailureOwner:
    """Return who is responsible for a failure of this kind in a verifier: the machine, or the task."""
    return FailureOwner.INFRA if kind in _OF_THE_MACHINE else FailureOwner.TASK


class CaughtFailure:
    """A block whose exception is kept as a failure; `failure` is None where it ran through.

    A class and not a generator: there is one around every rollout in flight.
    """

    def __init__(self, owner: Callable[[], FailureOwner]) -> None:
        self.failure: Failure | None = None
        self._owner = owner

    def __enter__(self) -> CaughtFailure:
        """Begin the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep an exception, unless it concerns the whole run."""
        # boundary: rollout worker
        if not isinstance(error, Exception) or isinstance(error, _OF_THE_RUN):
            return False
        self.failure = to_failure(error, self._owner())
        return True


def catch_failure(owner: Callable[[], FailureOwner]) -> CaughtFailure:
    """Run a block; keep its exception as a failure with traceback, owned by whom `owner` names then.

    Passes what concerns the whole run: cancellation, WeightMismatch, ConfigError, RunStopped and
    Interrupted.
    """
    return CaughtFailure(owner)


def to_failure(error: Exception, owner: FailureOwner) -> Failure:
    """Return an exception as a failure: its traceback, and behind it all in one line, with its place."""
    said = "".join(traceback.format_exception_only(error)).strip()
    line = describe_error(error)
    trace = "".join(traceback.format_exception(error)).strip().removesuffix(said)[-_MAX_TRACE_CHARS:]
    # A message of several lines is told as it is, too.
    is_told = line.startswith(said.removeprefix(f"{type(error).__module__}."))
    told = "" if is_told else f"{said[:_MAX_SAID_CHARS]}\n"
    return Failure(owner=owner, kind=type(error).__name__, detail=trace + told + line)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCause:
    """Failures of one owner, kind and place."""

    failure: Failure
    """The first of them."""
    num: int

    @property
    def key(self) -> tuple[str, str, str | None]:
        """What tells one cause from another. Not the message, which may name what each rollout alone has."""
        return _key_of(self.failure)


def _key_of(failure: Failure) -> tuple[str, str, str | None]:
    return failure.owner, failure.kind, find_place(failure.detail.rstrip())


def find_failures(outcomes: Iterable[Outcome]) -> list[Failure]:
    """Return why outcomes have no score; a prompt that was too long to be attempted did not fail."""
    return [o.failure for o in outcomes if o.failure is not None and not o.is_too_long]


def find_causes(failures: Iterable[Failure]) -> tuple[FailureCause, ...]:
    """Tell failures apart by their cause, the commonest first."""
    first: dict[tuple[str, str, str | None], Failure] = {}
    counts: Counter[tuple[str, str, str | None]] = Counter()
    for failure in failures:
        first.setdefault(_key_of(failure), failure)
        counts[_key_of(failure)] += 1
    return tuple(FailureCause(failure=first[key], num=num) for key, num in counts.most_common())


def add_traces(error: Exception, causes: Iterable[FailureCause]) -> None:
    """Give an error that tells of failures their tracebacks as notes."""
    for cause in causes:
        error.add_note(cause.failure.detail)


def describe_failure(failure: Failure) -> str:
    """Say a failure in one line: 'engine, RuntimeError: no such operator (prepacked.py:64)'."""
    line = (failure.detail.strip().splitlines() or [""])[-1]
    name = line.partition(" ")[0].removesuffix(":")
    # 'TypeError: ...' under the kind TypeError, or verifier_TypeError.
    said = line.removeprefix(name) if failure.kind.endswith(name) else f": {line}"
    return f"{failure.owner}, {failure.kind}{said}"


def sum_up(causes: Sequence[FailureCause], num_all: int, noun: str = "rollouts") -> str:
    """Say why attempts failed: how many of how many, the commonest cause, and the kinds of the others.

    'all 64 rollouts failed: engine, RuntimeError: no such operator (prepacked.py:64)'.
    """
    first, *others = causes
    num_failed = sum(cause.num for cause in causes)
    share = f"all {num_all}" if num_failed == num_all else f"{num_failed} of {num_all}"
    text = f"{share} {noun} failed: {describe_failure(first.failure)}"
    if others:
        kinds = ", ".join(f"{one.num} of {one.failure.owner}, {one.failure.kind}" for one in others[:3])
        text += f" ({first.num} times; {num_failed - first.num} otherwise: {kinds})"
    return text
