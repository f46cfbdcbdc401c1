"""The sandboxes of this machine, from the side that asks.

Beside the contract they have Python: `python_argv`, and `run_main`, which runs a function in a fork of the
interpreter that loaded it once. The judge of programs is made of it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Self

from strop.errors import SandboxError, SandboxRefused
from strop.sandbox.allowlist import parse_network, refuse_network
from strop.sandbox.client import Answer, Client
from strop.sandbox.contract import (
    MIB,
    WORKSPACE,
    ExecKind,
    ExecResult,
    FrozenBy,
    Guard,
    Isolation,
    IsolationLevel,
    SandboxSpec,
    SandboxStats,
)
from strop.sandbox.daemon_handle import daemon_of, python_candidates
from strop.sandbox.engine import require_engine
from strop.sandbox.idmap import NUM_IDS
from strop.sandbox.inside import EXIT_KINDS
from strop.sandbox.local_job import LocalJob, as_result
from strop.sandbox.local_shell import LocalShell, open_shell
from strop.sandbox.local_snapshot import Layer, LocalSnapshot, require_snapshot

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0
_FILE_LIMIT_S = 60.0
_PYTHON_FLAGS = ("-I", "-S", "-B")
_MIN_PYTHON = (3, 11)


class LocalSandbox:
    """A sandbox that a daemon's supervisor serves. Usable from one event loop."""

    def __init__(
        self,
        client: Client,
        isolation: Isolation,
        spec: SandboxSpec,
        header: Mapping[str, Any],
        python_argv: tuple[str, ...],
    ) -> None:
        self._client = client
        self._env = dict(spec.env)
        self._image = spec.image
        self._has_users = spec.user is not None
        began_with = spec.snapshot
        self._began_with = began_with.layers if isinstance(began_with, LocalSnapshot) else ()
        self._isolation = isolation
        self._scratch = str(header["scratch"])
        self._supervisor_pid = int(header["pid"])
        self._mounts = {os.path.realpath(one.host_path): one.inside_path for one in spec.mounts}
        self._mounts.update(header["moved_mounts"])
        self._python_argv = python_argv

    @property
    def isolation(self) -> Isolation:
        """What was reached."""
        return self._isolation

    @property
    def scratch(self) -> str:
        """The private directory as a program sees it."""
        return self._scratch

    def find_mount(self, host_path: str) -> str:
        """Return where a mounted path is inside. Raises: LookupError if it was not mounted."""
        return self._mounts[os.path.realpath(host_path)]

    @property
    def refused_calls(self) -> tuple[str, ...]:
        """What programs asked of a network that is a list, and was not in it: host, port and why.

        The newest 1,000; `stats` has their number.
        """
        return tuple(self._client.refused_calls)

    @property
    def is_lost(self) -> bool:
        """Whether it answers nothing any more."""
        return bool(self._client.lost_kind)

    def when_ended(self, act: Callable[[], None]) -> None:
        """Do something once nothing is left of it."""
        self._client.when_ended(act)

    async def wait_lost(self) -> str:
        """Return, once it answers nothing any more, why: the kind that `SandboxLost` has."""
        return await self._client.wait_lost()

    @property
    def supervisor_pid(self) -> int:
        """The process of this host that everything in it is below; it ends last."""
        return self._supervisor_pid

    @property
    def python_argv(self) -> tuple[str, ...]:
        """A Python inside, with its flags.

        Raises: SandboxRefused with kind interpreter if none was found that a program may run.
        """
        if not self._python_argv:
            raise SandboxRefused(
                f"no Python can be started in a {self._isolation.backend} sandbox; tried: "
                + ", ".join(python_candidates()),
                allowed=f"Python {_MIN_PYTHON[0]}.{_MIN_PYTHON[1]} or newer that other users can reach",
                next_step="install the system's python3, or move Python out of a private directory",
                kind="interpreter",
            )
        return self._python_argv

    async def exec(
        self,
        argv: Sequence[str],
        *,
        wall_limit_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run a program; see `Sandbox.exec`."""
        request = {"argv": list(argv), "cwd": cwd, "wall_limit_s": wall_limit_s}
        return as_result(*await self._run({**request, "env": {**self._env, **(env or {})}}, stdin))

    async def start(
        self,
        argv: Sequence[str],
        *,
        wall_limit_s: float = math.inf,
        has_stdin: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> LocalJob:
        """Start a program; see `Sandbox.start`."""
        request = {"argv": list(argv), "cwd": cwd, "wall_limit_s": wall_limit_s, "has_stdin": has_stdin}
        full = {"op": "start", **request, "env": {**self._env, **(env or {})}}
        return LocalJob(self._client, *self._client.begin(full))

    async def open_shell(self, *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> LocalShell:
        """Return a shell that stays open; see `Sandbox.open_shell`."""
        return await open_shell(self._client, {**self._env, **(env or {})}, cwd)

    async def connect(self, address: int | str) -> socket.socket:
        """Return a connection to a server inside; see `Sandbox.connect`."""
        header, _ = await self._client.ask({"op": "connect", "address": address})
        return socket.socket(fileno=header["descriptor"])

    async def run_main(self, *, wall_limit_s: float, stdin: bytes = b"") -> ExecResult:
        """Run `main` of the source that the sandbox was made with, as `exec` runs a program.

        As the first command of a sandbox it runs in a fork of an interpreter that has loaded the source
        already, where that interpreter is `python_argv`'s; else in one that is started.

        Raises: SandboxLost, as `exec`; SandboxRefused with kind interpreter if no Python was found.
        """
        request = {"argv": list(self.python_argv), "is_main": True, "wall_limit_s": wall_limit_s}
        return as_result(*await self._run({**request, "env": self._env}, stdin))

    async def read(self, path: str, *, offset: int = 0, max_bytes: int = 16 * MIB) -> bytes:
        """Return a regular file's bytes; see `Sandbox.read`."""
        details = {"path": path, "offset": offset, "max_bytes": max_bytes}
        return await self._work_inside("read", details, b"")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Put a file in place; see `Sandbox.write`."""
        await self._work_inside("write", {"path": path, "mode": mode}, data)

    async def upload(self, host_path: Path, path: str) -> None:
        """Copy a file or a tree into the sandbox; see `Sandbox.upload`."""
        for place, mode in _walk_host(host_path):
            inside = str(PurePosixPath(path, place.relative_to(host_path)))
            if stat.S_ISDIR(mode):
                await self._work_inside("make_dir", {"path": inside}, b"")
            elif stat.S_ISREG(mode):
                await self.write(inside, place.read_bytes(), mode=stat.S_IMODE(mode) & 0o777)
            else:
                raise SandboxError(
                    f"cannot upload {str(place)!r}: it is a link or a special file",
                    allowed="regular files and directories",
                    next_step="copy what it points to, or leave it out",
                    kind="not_regular",
                )

    async def download(
        self, path: str, host_path: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000
    ) -> tuple[str, ...]:
        """Copy a file or a tree out of the sandbox; see `Sandbox.download`."""
        _require_free(host_path)
        details = {"path": path, "max_files": max_files, "max_bytes": MIB + 5000 * max_files}
        left_out = []
        # Names are directory entries, and nobody else writes below the new path: none leads elsewhere.
        for name, kind, mode in json.loads(await self._work_inside("list", details, b"")):
            inside, target = (str(PurePosixPath(path, name)), host_path / name) if name else (path, host_path)
            if kind == "directory":
                target.mkdir(mode=0o700)
            elif kind == "file":
                data = await self.read(inside, max_bytes=max_bytes)
                max_bytes -= len(data)
                target.write_bytes(data)
                target.chmod((mode & 0o755) | stat.S_IRUSR | stat.S_IWUSR)
            else:
                left_out.append(name)
        return tuple(left_out)

    async def pause(self) -> FrozenBy:
        """Keep its programs from running; see `Sandbox.pause`."""
        header, _ = await self._client.ask({"op": "pause"})
        return FrozenBy(header["frozen_by"])

    async def resume(self) -> None:
        """Let them go on; see `Sandbox.resume`."""
        await self._client.ask({"op": "resume"})

    async def snapshot(self) -> LocalSnapshot:
        """Keep what its programs have written; see `Sandbox.snapshot`."""
        _, answer = self._client.begin({"op": "snapshot"})
        try:
            header, _ = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._drop_snapshot)
            raise
        return self._make_snapshot(header)

    def _make_snapshot(self, header: dict[str, Any]) -> LocalSnapshot:
        new, *old = header["layers"]
        known = {layer.path: layer for layer in self._began_with}
        return LocalSnapshot(
            backend=self._isolation.backend,
            image=self._image,
            has_users=self._has_users,
            layers=(Layer(new), *(known[path] for path in old)),
            uid=header["uid"],
            num_bytes=header["num_bytes"],
        )

    def _drop_snapshot(self, answer: asyncio.Future[Answer]) -> None:
        if not answer.cancelled() and not answer.exception():
            self._make_snapshot(answer.result()[0]).drop()

    async def stats(self) -> SandboxStats:
        """Return what it uses; see `Sandbox.stats`."""
        header, _ = await self._client.ask({"op": "stats"})
        return SandboxStats(**{name: header[name] for name in SandboxStats.__slots__})

    async def stop(self) -> None:
        """End everything in it."""
        await self._client.end(_STOP_LIMIT_S)

    async def __aenter__(self) -> Self:
        """Return the sandbox."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it."""
        await self.stop()

    async def find_python(self) -> tuple[str, ...]:
        """Return the first Python that starts here, with its flags; empty if none does."""
        for path in python_candidates():
            code = "import sys; print(*sys.version_info[:2])"
            result = await self.exec([path, *_PYTHON_FLAGS, "-c", code], wall_limit_s=_FILE_LIMIT_S)
            version = tuple(int(word) for word in result.stdout.split() if word.isdigit())
            if result.kind is ExecKind.EXITED and version >= _MIN_PYTHON:
                return (path, *_PYTHON_FLAGS)
        return ()

    async def _work_inside(self, builtin: str, details: dict[str, Any], stdin: bytes) -> bytes:
        request = {"builtin": builtin, "details": details, "wall_limit_s": _FILE_LIMIT_S}
        header, output = await self._run(request, stdin)
        num_bytes = header["stdout_bytes"]
        if header["kind"] == ExecKind.EXITED and header["exit_code"] == 0:
            return output[:num_bytes]
        raise SandboxError(
            f"cannot {builtin} {details['path']!r} in the sandbox: "
            + (output[num_bytes:].decode(errors="replace") or header["why"] or header["kind"]),
            allowed="regular files that a program inside can reach, within the limits",
            next_step="look at the path, at Limits and at max_bytes",
            kind=EXIT_KINDS.get(header["exit_code"] or 0, "io"),
        )

    async def _run(self, request: dict[str, Any], stdin: bytes) -> Answer:
        """Start something and wait for its end; if nobody waits any more, kill it."""
        number, answer = self._client.begin({"op": "start", **request}, stdin)
        try:
            return await answer
        except asyncio.CancelledError:
            self._client.tell({"op": "cancel", "job": number})
            raise
        finally:
            self._client.forget(number)


class LocalBackend:
    """Makes sandboxes here: `podman` of level container, `bubblewrap` of namespace, `process` of rlimit."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def create(self, spec: SandboxSpec, *, main_source: str = "") -> LocalSandbox:
        """Return a fresh sandbox; see `SandboxBackend.create`.

        `main_source`: Python that defines `main`, for `run_main`. It is the caller's own: it is loaded once,
        outside of every sandbox, and must do no more than import and define.

        Raises: SandboxRefused with kind image, architecture, user, mounts, workspace, network, snapshot,
        no_space, missing (no bwrap or podman), graph_root, bubblewrap, podman, level or host.
        """
        refuse_network(spec.network, self.name)
        if spec.image is not None and self.name != "podman":
            raise SandboxRefused(
                f"image {spec.image!r} in a {self.name} sandbox",
                allowed="no image: its programs see this host's /usr",
                next_step="leave the image out, or use backend podman",
                kind="image",
            )
        if spec.user is not None:
            refuse_user(spec.user, self.name)
        if self.name == "process":
            refuse_mounts(spec)
            refuse_workspace(spec)
        program = find_program(*_PROGRAMS[self.name]) if self.name in _PROGRAMS else ""
        if self.name == "podman":
            await asyncio.to_thread(require_engine, program)
        snapshot = require_snapshot(spec, self.name)
        key = (self.name, spec.image)
        if key not in _pythons:
            # Once, in a sandbox of its own: the limits of `spec` may be too tight for it.
            plain = SandboxSpec(min_level=IsolationLevel.NONE, image=spec.image)
            async with await _start(self.name, plain, program, "", ()) as sandbox:
                _pythons[key] = await sandbox.find_python()
        async with AsyncExitStack() as stack:
            if snapshot is not None:
                stack.callback(release := snapshot.hold())
            made = await _start(self.name, spec, program, main_source, _pythons[key])
            if snapshot is not None:
                stack.pop_all()
                made.when_ended(release)
            await stack.enter_async_context(made)
            for path, data in spec.files.items():
                await made.write(path, data)
            # All are there: the sandbox is the caller's.
            stack.pop_all()
        return made


_PROGRAMS = {"bubblewrap": ("bwrap", "bubblewrap"), "podman": ("podman", "podman")}
"""What makes a backend's sandboxes, and the package that brings it."""
_ENGINE_VARIABLES = ("HOME", "PATH", "XDG_RUNTIME_DIR", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")
_pythons: dict[tuple[str, str | None], tuple[str, ...]] = {}
"""By backend and image, for the life of this process."""


async def _start(
    backend: str, spec: SandboxSpec, program: str, main_source: str, python_argv: tuple[str, ...]
) -> LocalSandbox:
    snapshot = require_snapshot(spec, backend)
    order = {
        "backend": backend,
        "limits": asdict(spec.limits),
        "min_level": int(spec.min_level),
        "network": str(parse_network(spec.network) or spec.network),
        "binds": _binds(spec, has_python=bool(program)),
        "program": program,
        "image": spec.image or "",
        "user": spec.user,
        "has_workspace": spec.has_workspace,
        "layers": [layer.path for layer in snapshot.layers] if snapshot is not None else [],
        "snapshot_uid": snapshot.uid if snapshot is not None else None,
        "engine_env": {name: os.environ[name] for name in _ENGINE_VARIABLES if name in os.environ},
    }
    client = Client(daemon_of(os.getpid()).start(order, main_source), backend)
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            header = await client.first_frame()
    except (ConnectionError, TimeoutError) as error:
        header = {
            "refused": "host",
            "why": f"its supervisor was not ready: {str(error) or 'no answer in time'}",
        }
    except asyncio.CancelledError:
        client.close()
        raise
    if "refused" in header:
        client.close()
        raise SandboxRefused(
            f"no {backend} sandbox of level {spec.min_level.word} or better was created: {header['why']}",
            allowed=f"a host where {backend} reaches that level",
            next_step="look at its message; user namespaces may be off, or a mounted path unreadable",
            kind=header["refused"],
        )
    facts = header["ready"]
    guards = {name: Guard(facts[name]) for name in ("memory", "pids", "cpu", "disk", "files")}
    isolation = Isolation(**{**facts, **guards, "level": IsolationLevel(facts["level"])})
    return LocalSandbox(client, isolation, spec, header, python_argv)


def _walk_host(top: Path) -> list[tuple[Path, int]]:
    """Return a file or directory and all below it with their modes, directories before what is in them."""
    return [(place, place.lstat().st_mode) for place in (top, *sorted(top.rglob("*")))]


def _require_free(path: Path) -> None:
    if os.path.lexists(path):
        raise SandboxError(
            f"cannot download to {str(path)!r}: something is there",
            allowed="a path where nothing is",
            next_step="remove it, or name another path",
            kind="exists",
        )


def refuse_user(user: int, backend: str) -> None:
    """Refuse a user that a backend cannot give.

    Raises: SandboxRefused with kind user.
    """
    if backend != "podman" or not 0 <= user < NUM_IDS or os.geteuid() != 0:
        raise SandboxRefused(
            f"user {user} in a {backend} sandbox",
            allowed=f"0 to {NUM_IDS - 1} of podman as root; programs of the others are a user of their own",
            next_step="leave the user out, or use backend podman",
            kind="user",
        )


def refuse_mounts(spec: SandboxSpec) -> None:
    """Refuse what a backend without a file system of its own cannot give.

    Raises: SandboxRefused with kind mounts.
    """
    moved = [one for one in spec.mounts if not one.read_only or one.inside_path != one.host_path]
    if moved:
        raise SandboxRefused(
            f"backend process was asked to mount {moved[0].host_path!r} at {moved[0].inside_path!r}"
            + (", to write to it" if not moved[0].read_only else ""),
            allowed="files that a program reads where they are, or where `find_mount` says",
            next_step="use backend bubblewrap, or write the files into the sandbox",
            kind="mounts",
        )


def refuse_workspace(spec: SandboxSpec) -> None:
    """Refuse a directory below a root that is the host's. Raises: SandboxRefused with kind workspace."""
    if spec.has_workspace:
        raise SandboxRefused(
            f"backend process was asked for a directory {WORKSPACE}",
            allowed="the private directory, which `scratch` names",
            next_step="use backend bubblewrap, or work in the private directory",
            kind="workspace",
        )


def find_program(name: str, package: str) -> str:
    """Return where a program is installed.

    Raises: SandboxRefused with kind missing.
    """
    path = shutil.which(name)
    if path is None:
        raise SandboxRefused(
            f"program {name} was not found on PATH",
            allowed="a host where it is installed",
            next_step=f"as root, run make system-deps, or install the package {package}",
            kind="missing",
        )
    return path


def _binds(spec: SandboxSpec, *, has_python: bool) -> list[tuple[str, str, bool]]:
    """Return host path, path inside and read-only of all mounts, with `has_python` this Python's own too."""
    prefix = os.path.realpath(sys.base_prefix)
    is_there = prefix == "/usr" or prefix.startswith("/usr/")
    python = [] if is_there or not has_python else [(prefix, prefix, True)]
    mounts = [(os.path.realpath(one.host_path), one.inside_path, one.read_only) for one in spec.mounts]
    return python + mounts
