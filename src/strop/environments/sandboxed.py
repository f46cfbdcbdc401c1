"""An author's object in a sandbox of its own: one for each attempt, spoken to over a connection.

The sandbox shows this Python with its installed packages, and copies of the sources that the class is made
of; no other file of this host, and no network. The interpreter inside is a fork of one that has imported
strop. Whatever the class does to that process is a failure of the attempt, never a score.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from strop.environments.inside import READY, SOCKET
from strop.environments.objects import ObjectLimits
from strop.environments.printed import END_BYTES, tell
from strop.environments.tools import CallRefused, ToolError
from strop.errors import ConfigError, CorruptRecord, SandboxLost, SandboxRefused
from strop.rollout import Example, FailureOwner, Message, Outcome, ToolCall
from strop.sandbox import ExecKind, ExecResult, IsolationLevel, Limits, Mount, SandboxSpec, choose_backend
from strop.sandbox.contract import MIB
from strop.sandbox.frames import pack, unpack
from strop.sandbox.local import package_folders
from strop.sandbox.served import ServedJob, ServedSandbox
from strop.spec.sandboxing import SandboxSettings
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging.judge import outcome_from_json
from strop.user_code import CodeRef
from strop.user_code.sources import list_sources, root_of

MAX_AT_ONCE = 256
"""Sandboxes of one process; further attempts wait for one."""
LIMITS = Limits(
    memory_bytes=4096 * MIB,
    # Libraries reserve addresses freely.
    has_address_limit=False,
    max_open_files=256,
    output_head_bytes=END_BYTES,
    output_tail_bytes=END_BYTES,
)
_INSIDE = "strop.environments.inside"
"""What runs inside; a service makes sandboxes for no other program of strop's own."""
_START_LIMIT_S = 60.0
_CLOSE_LIMIT_S = 5.0
_GRACE_S = 0.5
"""A tool that waits for something is told inside that its time is up."""
_CHUNK_BYTES = 1 << 18
_MAX_TOLD_CHARS = 2000
_ENDS: Mapping[ExecKind, tuple[str, str]] = {
    ExecKind.OOM: ("out_of_memory", "took more memory than its sandbox has"),
    ExecKind.OUTPUT_FLOOD: ("output_flood", f"printed more than {LIMITS.flood_bytes >> 20} MiB"),
    ExecKind.OVER_LIMIT: ("over_limit", "started too many processes, or wrote too much"),
    ExecKind.FROM_INSIDE: ("sandbox_killed", "ended its sandbox from inside"),
}
"""How an object's process may end, by what its sandbox says of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxedClass:
    """A class that is imported in sandboxes, as it was when this was made."""

    backend: str
    """'auto', or a name of `strop.sandbox`."""
    min_level: IsolationLevel
    order: Mapping[str, Any]
    """What the process inside is told first."""
    mounts: tuple[str, ...]
    """Folders that it imports from, beside its sources and the installed packages."""

    @classmethod
    def read(
        cls,
        ref: CodeRef,
        settings: SandboxSettings,
        limits: ObjectLimits,
        *,
        digest: str,
        file: Path,
        **more: Any,
    ) -> SandboxedClass:
        """Read the sources. `more`: `values`, `where` and `full_marks` as `inside` takes them."""
        order = {"place": ref.place, "name": ref.name, "digest": None, "sources": {}, **more}
        mounts: tuple[str, ...] = ()
        if ref.is_file:
            root = root_of(ref.path)
            texts = {
                str(one.relative_to(root)): one.read_bytes().decode("utf-8", "surrogateescape")
                for one in list_sources(ref.path)
            }
            order |= {"place": str(ref.path.relative_to(root)), "sources": texts, "digest": digest}
        elif not any(file.is_relative_to(folder) for folder in package_folders()):
            # An installed package that is developed elsewhere.
            mounts = (str(root_of(file)),)
        return cls(
            backend=settings.sandbox,
            min_level=IsolationLevel[settings.min_isolation.upper()],
            order={**order, "limits": asdict(limits)},
            mounts=mounts,
        )


class SandboxedObject:
    """One attempt, on an object in a sandbox; see `WorldObject`. Usable from one event loop.

    Beside what the class raises, `reset` raises: ConfigError if the class cannot be imported inside;
    SandboxRefused if this host makes no such sandbox.
    """

    def __init__(self, made_of: SandboxedClass, gpus: tuple[str, ...] = ()) -> None:
        self._made_of = made_of
        self._gpus = gpus
        self._limits = ObjectLimits(**made_of.order["limits"])
        self._sandbox: ServedSandbox | None = None
        self._job: ServedJob | None = None
        self._connection: socket.socket | None = None
        self._buffer = bytearray()
        self._places = asyncio.Semaphore()
        self._has_place = False
        self._about = ""
        """The attempt, in the log."""

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Start the sandbox, and have the object open the attempt."""
        self._about = f"{example.task} {example.example_id} seed {seed}"
        await self._start()
        values = {"task": example.task, "example_id": example.example_id, "answer": example.answer}
        found = await self._ask("reset", example={**values, "fields": dict(example.fields)}, seed=seed)
        return tuple(map(Message.from_json, found["messages"]))

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Give a reply to the object."""
        found = await self._ask("step", text=text)
        return tuple(map(Message.from_json, found["messages"])), bool(found["is_over"])

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool. Raises: as `call_tool`."""
        found = await self._ask("call", call=asdict(call))
        if "refused" in found:
            raise CallRefused(found["refused"])
        if "told" in found:
            raise ToolError(found["told"])
        return str(found["text"]), bool(found["is_over"])

    async def score(self) -> Outcome:
        """Have the object score the attempt."""
        found = await self._ask("score")
        return outcome_from_json(found["outcome"])

    async def close(self) -> None:
        """Let the object close, and end its sandbox."""
        try:
            if self._connection is not None and self._job is not None:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await self._ask("close")
        except (AttemptFailed, TimeoutError, SandboxLost):
            # It has been scored, or has no score.
            pass
        finally:
            await self._end()

    async def _start(self) -> None:
        self._places = _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_AT_ONCE))
        await self._places.acquire()
        self._has_place = True
        backend = await choose_backend(self._made_of.backend, self._made_of.min_level)
        mounts = tuple(Mount(host_path=path, inside_path=path) for path in self._made_of.mounts)
        level = self._made_of.min_level
        spec = SandboxSpec(limits=LIMITS, mounts=mounts, gpus=self._gpus, min_level=level)
        self._sandbox = sandbox = await backend.create_prepared(spec, _INSIDE)
        self._job = await sandbox.start_main()
        async with asyncio.timeout(_START_LIMIT_S):
            said = await self._job.read()
        if said is None or not said.stdout.startswith(READY):
            told = "" if said is None else said.stderr.decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]
            raise SandboxRefused(
                f"strop cannot be imported in a {sandbox.isolation.backend} sandbox: {told or 'no word'}",
                allowed="a Python that programs inside can run, with the packages that strop needs",
                next_step="look at `strop sandbox doctor`, or set task.lane=process",
                kind="interpreter",
            )
        self._connection = await sandbox.connect(f"{sandbox.scratch}/{SOCKET}")
        self._connection.setblocking(False)
        await self._ask("open", limit_s=_START_LIMIT_S, **self._made_of.order)

    async def _ask(self, operation: str, *, limit_s: float | None = None, **request: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises: AttemptFailed as the class failed, or if it is not done in time or its process has ended;
        SandboxLost if the machine lost it; ConfigError.
        """
        limit_s = self._limits.tool_limit_s if limit_s is None else limit_s
        nonce = secrets.token_hex(16)
        try:
            async with asyncio.timeout(limit_s + _GRACE_S):
                reply = await self._exchange(pack({"op": operation, "nonce": nonce, **request}))
        except TimeoutError as error:
            what = f"tool {request['call']['name']}" if operation == "call" else operation
            detail = f"the {what} was not done after {limit_s:g} s; its process was ended"
            raise _fail(f"{'tool' if operation == 'call' else operation}_timeout", detail) from error
        except CorruptRecord as error:
            raise _fail("forged", f"no answer of strop's came out of the sandbox: {error}") from error
        except ConnectionError:
            reply = None
        if reply is None:
            raise await self._explain(operation)
        if reply.get("nonce") != nonce:
            raise _fail(
                "forged", f"an answer to {operation} came out of the sandbox that strop did not write"
            )
        if "config" in reply:
            raise ConfigError(reply["config"])
        if "failed" in reply:
            owner, kind, detail = reply["failed"]
            raise AttemptFailed(FailureOwner(owner), str(kind), str(detail))
        return reply

    async def _exchange(self, request: bytes) -> dict[str, Any] | None:
        """Send a request; return what comes back, None at the connection's end."""
        if self._connection is None:
            return None
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, request)
        while not (found := list(unpack(self._buffer, max_body_bytes=0))):
            data = await loop.sock_recv(self._connection, _CHUNK_BYTES)
            if not data:
                return None
            self._buffer += data
        # A second one would answer a request that was not made.
        return found[0][0] if len(found) == 1 else {}

    async def _explain(self, operation: str) -> AttemptFailed:
        """Return why the object's process answers nothing any more. Raises: SandboxLost for the machine's."""
        kind, what = "disconnected", "closed the connection to strop"
        try:
            if self._job is not None:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    kind, what = _describe_end(await self._job.wait())
        except TimeoutError:
            pass
        except SandboxLost as error:
            if error.kind != ExecKind.FROM_INSIDE:
                raise
            kind, what = _ENDS[ExecKind.FROM_INSIDE]
        return _fail(kind, f"the process of the environment {what}, at {operation}")

    async def _end(self) -> None:
        """End the sandbox, and keep what was printed in it."""
        connection, self._connection = self._connection, None
        job, self._job = self._job, None
        sandbox, self._sandbox = self._sandbox, None
        try:
            if connection is not None:
                connection.close()
            with suppress(SandboxLost, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    if job is not None:
                        self._log(await job.stop())
            if sandbox is not None:
                await sandbox.stop()
        finally:
            if self._has_place:
                self._has_place = False
                self._places.release()

    def _log(self, result: ExecResult) -> None:
        """Write down what was printed: beginning and end of each stream."""
        tell(self._about, "stdout", result.stdout.removeprefix(READY), result.stdout_omitted)
        tell(self._about, "stderr", result.stderr, result.stderr_omitted)


_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _fail(kind: str, detail: str) -> AttemptFailed:
    return AttemptFailed(FailureOwner.TASK, kind, detail)


def _describe_end(result: ExecResult) -> tuple[str, str]:
    """Return a word and a sentence for how a process ended."""
    if result.kind in _ENDS:
        return _ENDS[result.kind]
    if result.signal is not None:
        return "killed", f"was ended by signal {result.signal}"
    return "exited", f"exited with code {result.exit_code}"
