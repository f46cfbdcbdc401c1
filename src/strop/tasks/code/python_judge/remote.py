"""The runner's side of the candidate: its processes, and proxies of its objects.

A value that the candidate returns is rebuilt from plain types; an object without a plain form becomes a
`Remote`, which can be called, iterated, indexed, read and written, and which equals nothing but itself.
So no method of the candidate ever runs in the process that decides.
Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import builtins
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Self

from strop.tasks.code.python_judge.candidate import serve
from strop.tasks.code.python_judge.values import Caught, Channel, decode, encode

_CODE = (
    "from strop.tasks.code.python_judge.candidate import serve\nimport socket\nserve(socket.socket(fileno=3))"
)
_RING_PERIOD_S = 0.2


class TimeUp(BaseException):
    """Raised if a test's time is used up. Not an Exception, because a test may catch those."""


class CandidateEnded(BaseException):
    """Raised if the candidate's process ended, or broke the protocol; no error that a test may expect."""


class JudgeFault(BaseException):
    """Raised if the judge itself fails, or cannot judge the tests; there is no verdict then."""


class Alarm:
    """Raises TimeUp in its block from the time `until` on, of `time.monotonic`."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._is_armed = False

    def __enter__(self) -> None:
        self._is_armed = True
        signal.signal(signal.SIGALRM, self._ring)
        # It repeats, because a test may catch everything.
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._until - time.monotonic()), _RING_PERIOD_S)

    def __exit__(self, *_: object) -> None:
        self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, *_: object) -> None:
        if self._is_armed:
            raise TimeUp


class Process:
    """One process of the candidate."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._channel = Channel(connection)
        self.end: BaseException | None = None
        """What a test must not catch, and what decides if it does."""

    @classmethod
    def fork(cls) -> Self:
        """Fork a process from this one, which must not know the job yet."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            with Caught():
                ours.close()
                serve(theirs)
            os._exit(1)
        theirs.close()
        return cls(pid, ours)

    @classmethod
    def execute(cls, loader: str) -> Self:
        """Start a process in a new interpreter, which has nothing of this one's memory. Raises: OSError."""
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-I", "-S", "-B", "-c", f"{loader}\n{_CODE}"]
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        with theirs:
            return cls(os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions), ours)

    def ask(self, operation: str, target: int, *arguments: Any, **keywords: Any) -> Any:
        """Apply an operation to an object of the candidate, and return the result.

        Raises: TimeUp; CandidateEnded; the exception that the candidate raised; JudgeFault if an argument
        has no plain form.
        """
        if self.end is not None:
            raise self.end
        try:
            forms = [encode(part, self._refer) for part in (arguments, keywords)]
            self._channel.send([operation, target, *forms])
            kind, *found = decode(self._channel.receive(), partial(Remote, self))
            error = _rebuild(*found) if kind == "raised" else None
        except Exception as cause:
            self.end = CandidateEnded()
            raise self.end from cause
        except BaseException as cause:
            self.end = cause
            raise
        if error is not None:
            raise error
        return found[0] if found else None

    def kill(self) -> None:
        """End the process and its group; later operations on a `Remote` raise CandidateEnded."""
        self.end = CandidateEnded()
        self._channel.close()
        for kill in (os.killpg, os.kill):
            # The group does not exist before the process has called setsid.
            with suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote) and value._process is self:
            return ["ref", value._reference]
        raise CandidateEnded if isinstance(value, Remote) else JudgeFault(f"a test passes a {type(value)}")


class Remote:
    """Proxy of an object of the candidate; equal only to itself, whatever the object's `__eq__` returns."""

    __slots__ = ("_process", "_reference")
    _process: Process
    _reference: int

    def __init__(self, process: Process, reference: int) -> None:
        object.__setattr__(self, "_process", process)
        object.__setattr__(self, "_reference", reference)

    def _ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        return self._process.ask(operation, self._reference, *arguments, **keywords)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the candidate's object."""
        return self._ask("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter")
        if not isinstance(iterator, Remote):
            raise CandidateEnded
        return iterator

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __contains__(self, value: Any) -> bool:
        # Not by the object's own method, which may agree to everything.
        return any(item is value or item == value for item in self)

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))


def _rebuild(name: str, arguments: tuple[Any, ...]) -> BaseException:
    """Return an exception of a built-in class; those that end a program end the candidate."""
    kind = vars(builtins)[name]
    return kind(*arguments) if issubclass(kind, Exception) else CandidateEnded()
