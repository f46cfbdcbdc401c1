"""An author's object in a sandbox: one sandbox for each attempt, reached over a socket.

The sandbox contains this Python with its installed packages, and copies of the class's sources; no other file
of this host, and no network. The interpreter inside is a fork of one that has imported strop. If the class
breaks that process, the attempt fails and has no score.
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
from strop.environments.printed import END_BYTES, log_output
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
"""Largest number of sandboxes of one process; further attempts wait."""
LIMITS = Limits(
    memory_bytes=4096 * MIB,
    # Libraries reserve much address space.
    has_address_limit=False,
    max_open_files=256,
    output_head_bytes=END_BYTES,
    output_tail_bytes=END_BYTES,
)
_INSIDE = "strop.environments.inside"
"""The module that runs inside; the sandbox service accepts no other module of strop."""
_START_LIMIT_S = 60.0
_CLOSE_LIMIT_S = 5.0
_GRACE_S = 0.5
"""Added to a tool's limit, so that a waiting tool is timed out inside first."""
_CHUNK_BYTES = 1 << 18
_MAX_STDERR_CHARS = 2000
_ENDS: Mapping[ExecKind, tuple[str, str]] = {
    ExecKind.OOM: ("out_of_memory", "took more memory than its sandbox has"),
    ExecKind.OUTPUT_FLOOD: ("output_flood", f"printed more than {LIMITS.flood_bytes >> 20} MiB"),
    ExecKind.OVER_LIMIT: ("over_limit", "started too many processes, or wrote too much"),
    ExecKind.FROM_INSIDE: ("sandbox_killed", "ended its sandbox from inside"),
}
"""Failure kind and description of a process that its sandbox ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxedClass:
    """A class that is imported in sandboxes, with a copy of its sources."""

    backend: str
    """'auto', or a backend of `strop.sandbox`."""
    min_level: IsolationLevel
    order: Mapping[str, Any]
    """The first request to the process inside."""
    mounts: tuple[str, ...]
    """Further import folders, beside its sources and the installed packages."""

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
                str(path.relative_to(root)): path.read_bytes().decode("utf-8", "surrogateescape")
                for path in list_sources(ref.path)
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
    """One attempt on an object in a sandbox; see `WorldObject`. Usable from one event loop.

    Beside the class's own errors, `reset` raises: ConfigError if the class cannot be imported inside;
    SandboxRefused if this host offers no such sandbox.
    """

    def __init__(self, kind: SandboxedClass, gpus: tuple[str, ...] = ()) -> None:
        self._kind = kind
        self._gpus = gpus
        self._limits = ObjectLimits(**kind.order["limits"])
        self._sandbox: ServedSandbox | None = None
        self._job: ServedJob | None = None
        self._connection: socket.socket | None = None
        self._buffer = bytearray()
        self._slots = asyncio.Semaphore()
        self._has_slot = False
        self._about = ""
        """Names the attempt in the log."""

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Start the sandbox, and open the attempt."""
        self._about = f"{example.task} {example.example_id} seed {seed}"
        await self._start()
        values = {"task": example.task, "example_id": example.example_id, "answer": example.answer}
        answer = await self._ask("reset", example={**values, "fields": dict(example.fields)}, seed=seed)
        return tuple(map(Message.from_json, answer["messages"]))

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Pass a reply to the object."""
        answer = await self._ask("step", text=text)
        return tuple(map(Message.from_json, answer["messages"])), bool(answer["is_over"])

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool. Raises: as `call_tool`."""
        answer = await self._ask("call", call=asdict(call))
        if "refused" in answer:
            raise CallRefused(answer["refused"])
        if "told" in answer:
            raise ToolError(answer["told"])
        return str(answer["text"]), bool(answer["is_over"])

    async def score(self) -> Outcome:
        """Score the attempt."""
        answer = await self._ask("score")
        return outcome_from_json(answer["outcome"])

    async def close(self) -> None:
        """Close the object, and end its sandbox."""
        try:
            if self._connection is not None and self._job is not None:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await self._ask("close")
        except (AttemptFailed, TimeoutError, SandboxLost):
            # The attempt is already scored or failed.
            pass
        finally:
            await self._end()

    async def _start(self) -> None:
        self._slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_AT_ONCE))
        await self._slots.acquire()
        self._has_slot = True
        backend = await choose_backend(self._kind.backend, self._kind.min_level)
        mounts = tuple(Mount(host_path=path, inside_path=path) for path in self._kind.mounts)
        level = self._kind.min_level
        spec = SandboxSpec(limits=LIMITS, mounts=mounts, gpus=self._gpus, min_level=level)
        self._sandbox = sandbox = await backend.create_prepared(spec, _INSIDE)
        self._job = await sandbox.start_main()
        async with asyncio.timeout(_START_LIMIT_S):
            output = await self._job.read()
        if output is None or not output.stdout.startswith(READY):
            stderr = "" if output is None else output.stderr.decode(errors="replace").strip()
            raise SandboxRefused(
                f"strop cannot be imported in a {sandbox.isolation.backend} sandbox:"
                f" {stderr[-_MAX_STDERR_CHARS:] or 'no word'}",
                allowed="a Python that programs inside can run, with the packages that strop needs",
                next_step="look at `strop doctor --sandboxes`, or set task.lane=process",
                kind="interpreter",
            )
        self._connection = await sandbox.connect(f"{sandbox.scratch}/{SOCKET}")
        self._connection.setblocking(False)
        await self._ask("open", limit_s=_START_LIMIT_S, **self._kind.order)

    async def _ask(self, operation: str, *, limit_s: float | None = None, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises: AttemptFailed if the class fails, is not done in time, or its process has ended; SandboxLost
        if the machine lost the sandbox; ConfigError.
        """
        limit_s = self._limits.tool_limit_s if limit_s is None else limit_s
        nonce = secrets.token_hex(16)
        try:
            async with asyncio.timeout(limit_s + _GRACE_S):
                reply = await self._exchange(pack({"op": operation, "nonce": nonce, **request}))
        except TimeoutError as error:
            name = f"tool {request['call']['name']}" if operation == "call" else operation
            detail = f"the {name} was not done after {limit_s:g} s; its process was ended"
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
        """Send a request; return the answer, or None if the connection has ended."""
        if self._connection is None:
            return None
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, request)
        while not (answers := list(unpack(self._buffer, max_body_bytes=0))):
            data = await loop.sock_recv(self._connection, _CHUNK_BYTES)
            if not data:
                return None
            self._buffer += data
        # A second answer belongs to no request.
        return answers[0][0] if len(answers) == 1 else {}

    async def _explain(self, operation: str) -> AttemptFailed:
        """Return why the object's process no longer answers. Raises: SandboxLost if the machine lost it."""
        kind, end = "disconnected", "closed the connection to strop"
        try:
            if self._job is not None:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    kind, end = _describe_end(await self._job.wait())
        except TimeoutError:
            pass
        except SandboxLost as error:
            if error.kind != ExecKind.FROM_INSIDE:
                raise
            kind, end = _ENDS[ExecKind.FROM_INSIDE]
        return _fail(kind, f"the process of the environment {end}, at {operation}")

    async def _end(self) -> None:
        """End the sandbox, and log its output."""
        connection, self._connection = self._connection, None
        job, self._job = self._job, None
        sandbox, self._sandbox = self._sandbox, None
        try:
            if connection is not None:
                connection.close()
            with suppress(SandboxLost, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    if job is not None:
                        result = await job.stop()
                        printed = result.stdout.removeprefix(READY)
                        log_output(self._about, "stdout", printed, result.stdout_omitted)
                        log_output(self._about, "stderr", result.stderr, result.stderr_omitted)
            if sandbox is not None:
                await sandbox.stop()
        finally:
            if self._has_slot:
                self._has_slot = False
                self._slots.release()


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _fail(kind: str, detail: str) -> AttemptFailed:
    return AttemptFailed(FailureOwner.TASK, kind, detail)


def _describe_end(result: ExecResult) -> tuple[str, str]:
    """Return the failure kind and a description of a process's end."""
    if result.kind in _ENDS:
        return _ENDS[result.kind]
    if result.signal is not None:
        return "killed", f"was ended by signal {result.signal}"
    return "exited", f"exited with code {result.exit_code}"
