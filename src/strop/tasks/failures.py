"""The one place where an exception of a rollout becomes a value.

One broken verifier or sandbox must not end a run of thousands of rollouts, and must never count as
a wrong answer: whoever runs foreign code wraps it here and stores the failure in place of a score.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strop.errors import ConfigError, Interrupted, RunStopped, WeightMismatch
from strop.rollout import Failure, FailureOwner

_MAX_DETAIL_CHARS = 4000
_OF_THE_MACHINE = frozenset({"SandboxError", "SandboxRefused", "SandboxLost", "closed"})
"""Classes of exceptions, and what a pool of workers says of a call that it was closed under."""


def owner_of_error(kind: str) -> FailureOwner:
    """Return who is responsible for a failure of this kind in a verifier: the machine, or the task."""
    return FailureOwner.INFRA if kind in _OF_THE_MACHINE else FailureOwner.TASK


class CaughtFailure:
    """Holds what a `catch_failure` block caught; `failure` is None where it ran through."""

    def __init__(self) -> None:
        self.failure: Failure | None = None


@contextmanager
def catch_failure(owner: Callable[[], FailureOwner]) -> Iterator[CaughtFailure]:
    """Run a block; keep its exception as a failure with traceback, owned by whom `owner` names then.

    Passes what concerns the whole run: cancellation, WeightMismatch, ConfigError, RunStopped and
    Interrupted.
    """
    caught = CaughtFailure()
    try:
        yield caught
    except (WeightMismatch, ConfigError, RunStopped, Interrupted):
        raise
    except Exception as error:  # boundary: rollout worker
        detail = "".join(traceback.format_exception(error))
        caught.failure = Failure(owner=owner(), kind=type(error).__name__, detail=detail[-_MAX_DETAIL_CHARS:])
