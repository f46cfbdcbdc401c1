"""The one place where an exception of a rollout becomes a value.

One broken verifier or sandbox must not end a run of thousands of rollouts, and must never count as
a wrong answer: whoever runs foreign code wraps it here and stores the failure in place of a score.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType

from strop.errors import ConfigError, Interrupted, RunStopped, WeightMismatch
from strop.rollout import Failure, FailureOwner

_MAX_DETAIL_CHARS = 4000
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
        detail = "".join(traceback.format_exception(error))[-_MAX_DETAIL_CHARS:]
        self.failure = Failure(owner=self._owner(), kind=type(error).__name__, detail=detail)
        return True


def catch_failure(owner: Callable[[], FailureOwner]) -> CaughtFailure:
    """Run a block; keep its exception as a failure with traceback, owned by whom `owner` names then.

    Passes what concerns the whole run: cancellation, WeightMismatch, ConfigError, RunStopped and
    Interrupted.
    """
    return CaughtFailure(owner)
