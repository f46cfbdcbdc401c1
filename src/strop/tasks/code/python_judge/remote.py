"""The runner's side of a candidate: its processes, and proxies of its objects.

A value that the candidate returns is rebuilt from plain types; an object without a plain form becomes a
`Remote`, which can be called, iterated, indexed, read and written, and which equals nothing but itself.
So no method of the candidate ever runs in the process that decides.
Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import builtins
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from strop.tasks.code.python_judge.candidate import CALLS, END, PROGRAMS, STATUS
from strop.tasks.code.python_judge.channel import Caught, Channel, ChannelEnded, decode, describe, encode

_GRACE_S = 0.2
"""Delay of the alarm, for code in this process, after the connection's limit."""
_FORK_SERVER_LIMIT_S = 5.0


class TimeUp(BaseException):
    """Raised if a test's time is used up. Not an Exception, because a test may catch those."""


class CandidateEnded(BaseException):
    """Raised if the candidate's process ended, or broke the protocol; no error that a test may expect."""


class LoadFailed(Exception):
    """Raised if the candidate's source cannot be run, or lacks the tested name."""


class JudgeFault(BaseException):
    """Raised if the judge itself fails, or cannot judge the tests; there is no verdict then."""


class Alarm:
    """Raises TimeUp in its block, a little after `until`, if the block still runs."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._is_armed = False

    def __enter__(self) -> None:
        self._is_armed = True
        signal.signal(signal.SIGALRM, self._ring)
        # It repeats, because a test may catch everything.
        left_s = max(0.001, self._until - time.monotonic() + _GRACE_S)
        signal.setitimer(signal.ITIMER_REAL, left_s, _GRACE_S)

    def __exit__(self, *_: object) -> None:
        self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, *_: object) -> None:
        if self._is_armed:
            raise TimeUp


class Link:
    """A connection to one process of the candidate."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.until = 0.0
        """Deadline of the running test."""
        self.end: TimeUp | CandidateEnded | JudgeFault | None = None
        """What a test must not catch, and what decides if it does."""

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Send a request and return the value of its reply, still encoded.

        Raises: TimeUp; CandidateEnded; the exception that the candidate raised.
        """
        try:
            return self._ask(message, descriptors)
        except (TimeUp, CandidateEnded) as error:
            self.end = error
            raise

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> Any:
        try:
            self._channel.send(message, until=self.until)
            if descriptors:
                socket.send_fds(self._channel.connection, [b"F"], list(descriptors))
            reply = self._channel.receive(until=self.until)
        except TimeoutError as error:
            raise TimeUp from error
        except (ChannelEnded, OSError) as error:
            raise CandidateEnded(str(error)) from error
        if not isinstance(reply, dict) or not ("value" in reply or "raised" in reply):
            raise CandidateEnded("a reply in no known form")
        if "raised" in reply:
            raise _rebuild(reply["raised"], reply.get("text"), reply.get("parts"))
        return reply["value"]

    def operate(self, operation: str, target: int, *arguments: Any, **keywords: Any) -> Any:
        """Apply an operation to an object of the candidate, and return the result.

        Raises: like `ask`; TypeError if an argument cannot be passed.
        """
        forms = {
            "args": [encode(argument, self._refer) for argument in arguments],
            "keywords": encode(keywords, self._refer),
        }
        return self.decode(self.ask({"op": operation, "target": target, **forms}))

    def decode(self, form: Any) -> Any:
        """Return the value that the candidate sent. Raises: CandidateEnded if it has no known form."""
        try:
            return decode(form, lambda reference: Remote(self, reference))
        except (ValueError, RecursionError) as error:
            self.end = CandidateEnded(f"a value in no known form ({type(error).__name__})")
            raise self.end from error

    def close(self) -> None:
        """Close the connection; later operations on a `Remote` raise CandidateEnded."""
        self._channel.connection.close()

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote) and value._link is self:
            return {"t": "ref", "v": value._reference}
        if isinstance(value, Remote):
            raise CandidateEnded("an object of an earlier process")
        self.end = JudgeFault(f"a test passes a {type(value).__name__}, which has no plain form")
        raise self.end


class Remote:
    """Proxy of an object of the candidate; equal only to itself, whatever the object's `__eq__` returns."""

    __slots__ = ("_link", "_reference")
    _link: Link
    _reference: int

    def __init__(self, link: Link, reference: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the candidate's object."""
        return self._link.operate("call", self._reference, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.operate("get", self._reference, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.operate("set", self._reference, name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._link.operate("iterate", self._reference)
        if not isinstance(iterator, Remote):
            raise CandidateEnded("an iterator that is a plain value")
        return iterator

    def __next__(self) -> Any:
        return self._link.operate("next", self._reference)

    def __len__(self) -> int:
        return int(self._link.operate("length", self._reference))

    def __getitem__(self, key: Any) -> Any:
        return self._link.operate("item", self._reference, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.operate("put", self._reference, key, value)

    def __contains__(self, value: Any) -> bool:
        # Not by the object's own method, which may agree to everything.
        return any(item is value or item == value for item in self)

    def __bool__(self) -> bool:
        return self._link.operate("truth", self._reference) is True

    def __str__(self) -> str:
        return str(self._link.operate("text", self._reference))

    def __repr__(self) -> str:
        return str(self._link.operate("form", self._reference))


class Session:
    """One candidate under one time limit, in a process that is replaced if it ends or hangs."""

    def __init__(self, fork_server: socket.socket, job: Mapping[str, Any]) -> None:
        self._fork_server = fork_server
        self._job = job
        self._order = PROGRAMS if job["mode"] == "programs" else CALLS
        self._link: Link | None = None
        self._load_error: LoadFailed | None = None
        self._has_run = False
        self.is_orphaned = False
        """Whether the candidate ended the fork server; nothing else ends it before this process."""
        self.objects: dict[str, Any] = {}
        """The candidate's values of the tested names, while it is loaded."""
        self.until = time.monotonic() + float(job["limits"]["wall_s"])

    def load(self, until: float) -> Link:
        """Return a link to a process that has loaded the source, with the deadline `until`.

        Raises: TimeUp; LoadFailed, also on every later call.
        """
        if self._load_error is not None:
            raise self._load_error
        if self._link is None:
            self._link = self._spawn(until)
            self._has_run = True
            with Caught() as caught:
                self._load(self._link)
            if isinstance(caught.error, TimeUp):
                raise caught.error
            if caught.error is not None:
                self._load_error = LoadFailed(describe(caught.error))
                raise self._load_error
        self._link.until = until
        return self._link

    @property
    def end(self) -> BaseException | None:
        """What ended the candidate's process, or its judgement, in the test that has run."""
        return self._link.end if self._link else None

    def drop(self) -> None:
        """End the candidate's process; the next test gets a fresh one."""
        self.objects = {}
        if self._link is None:
            return
        self._link.close()
        self._link = None
        try:
            self._order_fork_server(END)
            status = self._fork_server.recv(STATUS.size, socket.MSG_WAITALL)
        except TimeoutError:
            # On a busy machine the fork server may be late without the candidate's fault.
            return
        except OSError:
            status = b""
        # Without a fork server there is no next process. Whether the candidate's last replies arrived before
        # it died with its parent is chance, so none of them may count.
        self.is_orphaned |= len(status) < STATUS.size

    def _spawn(self, until: float) -> Link:
        """Return a link to a fresh process that has set its limits and has no source yet."""
        ours, theirs = socket.socketpair()
        link = Link(Channel(ours))
        link.until = until
        try:
            with theirs:
                self._order_fork_server(self._order, theirs.fileno())
            link.ask({"limits": self._job["limits"]})
        except (OSError, CandidateEnded) as error:
            if not self._has_run:
                raise JudgeFault(f"no process for the candidate ({error})") from error
            raise LoadFailed(f"the candidate ended what its processes come from ({error})") from error
        return link

    def _load(self, link: Link) -> None:
        names = self._job["names"]
        # Of the job only what no test needs to hide. A name may be a method of a class Solution in calls.
        known = {key: self._job[key] for key in ("source", "imports", "names")}
        reply = link.ask({"op": "load", "in_class": self._job["mode"] == "calls", **known})
        forms = reply if isinstance(reply, dict) else {}
        self.objects = {name: link.decode(forms[name]) for name in names if name in forms}
        if names and names[0] not in self.objects:
            raise CandidateEnded(f"{names[0]} is not defined")

    def _order_fork_server(self, order: bytes, *descriptors: int) -> None:
        self._fork_server.settimeout(_FORK_SERVER_LIMIT_S)
        socket.send_fds(self._fork_server, [order], list(descriptors))


def _rebuild(names: Any, text: Any, parts: Any) -> BaseException:
    """Return an exception of the first of these names that is a built-in class of exceptions.

    It is made of the parts if it reads as the text then, else of the text.
    """
    found = [vars(builtins).get(str(name)) for name in names] if isinstance(names, list) else []
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)]
    for kind, form in product(kinds, (parts, {"t": "tuple", "v": [str(text)[:1000]]})):
        with Caught():
            error = kind(*decode(form, _no_reference))
            error.add_note(FROM_CANDIDATE)
            if form is not parts or str(error) == text:
                return error
    return CandidateEnded(f"{names!s:.100} {text!s:.300}")


def _no_reference(_: int) -> Any:
    raise ValueError("an exception holds plain values")


FROM_CANDIDATE = "raised by the candidate"
"""Note on an exception of the candidate: its AssertionError is not a failed assertion of the test."""
