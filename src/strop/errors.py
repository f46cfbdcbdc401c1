"""The exception tree of strop, and the shape of every message in it.

What a program or a policy does (a wrong answer, a reply cut at its limit) is a value, an
`Outcome`. What strop, its machines or its inputs do wrong is one of these exceptions.
Every class can be built from its whole message alone, so it survives pickling to another process.
"""

from __future__ import annotations

import os
import re
import traceback

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 75
EXIT_REFUSED = 76

_MAX_SAID_CHARS = 800
_PLACE = re.compile(r"\((\S+\.py:\d+)\)$")


def format_error(given: str, *, allowed: str, next_step: str) -> str:
    """Join the three parts that every message of strop has, in the house order."""
    end = "" if next_step.endswith("?") else "."
    return f"{given.rstrip('.')}. Allowed: {allowed.rstrip('.')}. Next: {next_step.rstrip('.')}{end}"


def split_error(message: str) -> tuple[str, str, str]:
    """Return the three parts of a message of `format_error`; of any other text the first part is all."""
    given, _, rest = message.partition(". Allowed: ")
    allowed, _, next_step = rest.partition(". Next: ")
    return given, allowed, next_step


def given_of(error: Exception) -> str:
    """Return what an error says was given, to stand in another message."""
    return split_error(str(error))[0].rstrip(".")


def describe_error(error: BaseException) -> str:
    """Say an error in one line, with its place: 'RuntimeError: no such operator (prepacked.py:64)'.

    The place is the innermost line that is neither Python's nor an installed package's, of the first error
    with one where one led to the other; of an error from another process, the place that its message ends
    with. A long message loses its middle: what was given stands at its begin, a log's last words at its end.
    """
    said = " ".join(str(error).split())
    if len(said) > _MAX_SAID_CHARS:
        said = f"{said[: _MAX_SAID_CHARS // 2]} ... {said[-_MAX_SAID_CHARS // 2 :]}"
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    place = None if find_place(line) else _place_of(error)
    return f"{line} ({place})" if place else line


def find_place(line: str) -> str | None:
    """Return the place that a line of `describe_error` ends with, None where it has none."""
    found = _PLACE.search(line)
    return None if found is None else found[1]


def _place_of(error: BaseException) -> str | None:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause.__traceback__ is not None:
        chain.append(cause)
    traces = [list(reversed(traceback.extract_tb(one.__traceback__))) for one in reversed(chain)]
    own = (frame for trace in traces for frame in trace if _is_own(frame.filename))
    last = next(own, next(iter(traces[0]), None))
    return None if last is None else f"{os.path.basename(last.filename)}:{last.lineno}"


def _is_own(path: str) -> bool:
    """Whether code is strop's or the user's."""
    if path.startswith(os.path.dirname(__file__) + os.sep):
        return True
    is_installed = any(f"{os.sep}{folder}{os.sep}" in path for folder in ("site-packages", "dist-packages"))
    return not is_installed and not path.startswith(("<", os.path.dirname(os.__file__) + os.sep))


class StropError(Exception):
    """Everything strop raises on purpose; the command line catches it and prints its message."""

    exit_code: int = EXIT_FAILED

    def __init__(
        self,
        given: str,
        *,
        allowed: str | None = None,
        next_step: str = "",
        kind: str = "",
        line: int | None = None,
    ) -> None:
        """Take what was given, what is allowed and what to do; or one line, for a broken invariant.

        For programs: `kind` is the cause in one word, `line` its place in a data file.
        """
        super().__init__(
            given if allowed is None else format_error(given, allowed=allowed, next_step=next_step)
        )
        self.kind, self.line = kind, line


class ConfigError(StropError, ValueError):
    """Raised by `spec` and by components at build time; the user edits the run file."""

    exit_code = EXIT_USAGE


class DataError(StropError, ValueError):
    """Raised where a stored example or record lacks its promised form; the user mends the data.

    Of a data file, `kind` says in a word why it cannot be read.
    """

    exit_code = EXIT_USAGE


class UnfitRecord(DataError):
    """Raised where what a run made can be neither kept nor trained on; no input of the user is wrong."""

    exit_code = EXIT_FAILED


class CheckRefused(StropError, RuntimeError):
    """Raised by the gate and by preflight checks; nothing was trained. Exit code 76."""

    exit_code = EXIT_REFUSED


class NodeRefused(CheckRefused):
    """Raised by a check that another node may pass; a scheduler leaves this node out and tries again."""


class EngineError(StropError, RuntimeError):
    """Raised when an engine produced no usable reply; the rollout worker masks the rollout."""


class EngineLost(EngineError):
    """Raised when an engine died or does not answer; the router gives its requests to another one."""


class WeightMismatch(EngineError):
    """Raised when an engine's weights are not the published ones; the loop stops."""


class LearnerError(StropError, RuntimeError):
    """Raised when an update was refused before it reached the weights; the loop counts and stops."""


class SandboxError(StropError, RuntimeError):
    """Raised when a sandbox could not do what was asked; the caller has no result, which is not 0.

    `kind` of files: missing, directory, not_regular, denied, too_large, no_space, exists.
    """


class SandboxRefused(SandboxError):
    """Raised when a sandbox was not created; `kind` is what is missing. The user changes host or spec."""


class SandboxLost(SandboxError):
    """Raised when a sandbox does not answer any more; the caller makes a new one.

    `kind` is stopped, from_inside (a program in it ended it) or infra.
    """


class StoreError(StropError, RuntimeError):
    """Raised when bytes are missing, partial or cannot be written; the caller keeps its old state."""


class CorruptRecord(StoreError):
    """Raised when stored bytes differ from their manifest; resume refuses the record by name."""


class HubUnreachable(StoreError):
    """Raised when a model hub gave no answer; the caller may know another source."""


class RemoteMissing(StoreError):
    """Raised when a store has no such object; the caller may know another source."""


class RemoteDenied(StoreError):
    """Raised when a store refuses us; never retried, the user mends credentials or rights."""


class NoCredentials(RemoteDenied):
    """Raised if nothing could be asked for lack of credentials; no right would help."""


class RemoteUnreachable(StoreError):
    """Raised when a store failed at every attempt; the same command later goes on where it stopped."""


class MirrorFenced(CheckRefused):
    """Raised when a newer attempt of the run has claimed its mirror; this one sends no more, and ends."""


class RunStopped(StropError, RuntimeError):
    """Raised by the loop when a tripwire orders a stop; the last checkpoint is intact."""


class Interrupted(StropError, RuntimeError):
    """Raised by the loop after a signal, once a checkpoint is written. Exit code 75."""

    exit_code = EXIT_INTERRUPTED
