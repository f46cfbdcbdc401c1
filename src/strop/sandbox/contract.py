"""What every sandbox promises, whatever it is built on.

A program's failure, its time-out and the limits it hits are values in `ExecResult`. A sandbox that fails
raises `SandboxError`. What isolation was reached is measured when a sandbox is created and stands in
its `Isolation` record; a backend that cannot keep a line of it says so there.

A sandbox is a session: its files stay from one command to the next, until it is stopped. Its commands are
waited for (`exec`), followed while they run (`start`) or given to a shell that stays open (`open_shell`; both
in `following`). All of it can stand still (`pause`), and others can begin where it is (`snapshot`). It names
no language; what the sandboxes of this machine have beside the contract is in `local`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from strop.sandbox.following import Job, Shell

KIB = 1 << 10
MIB = 1 << 20
WORKSPACE = "/workspace"
"""Where agents expect the files that they work on."""


class IsolationLevel(IntEnum):
    """How well the program is contained. Levels are ordered; each includes the one before."""

    NONE = 0
    """A private directory, nothing else."""
    RLIMIT = 1
    """All it started is killed, its environment is clean, memory and processes are at least watched."""
    NAMESPACE = 2
    """Own process, mount, IPC, host-name and network namespaces, no capability, no gain by set-uid."""
    CONTAINER = 3
    """Own root file system, filtered system calls, limits on memory, processes and files enforced."""
    VM = 4
    """Own kernel."""

    @property
    def word(self) -> str:
        """The name as it is written in run files and records."""
        return self.name.lower()


class Guard(StrEnum):
    """How a limit is kept."""

    ENFORCED = "enforced"
    """The kernel refuses more."""
    WATCHED = "watched"
    """A breach is found within a fraction of a second, and the program is killed."""
    NONE = "none"
    """A breach goes unnoticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """What isolation a sandbox reached, measured when it was created."""

    level: IsolationLevel
    backend: str
    userns: bool
    pidns: bool
    mountns: bool
    netns: bool
    ipcns: bool
    utsns: bool
    seccomp: bool
    no_new_privs: bool
    caps: str
    """The effective and bounding capabilities of a program, as hexadecimal numbers joined by '/'."""
    nested_userns: bool
    """Whether a program may make a user namespace, and be root in it."""
    host_root_maps_to: str
    """The user that the host's root is inside: a user id, 'unmapped', or '0' without a user namespace."""
    host_uid: int
    """The user that a program is on the host."""
    memory: Guard
    pids: Guard
    cpu: Guard
    disk: Guard
    files: Guard
    """Number of open files and size of each file."""
    network: str
    """'none', 'host', or the list of what it may reach, as in a spec."""
    kernel: str
    """Release of the kernel that serves the program's calls."""
    node: str = ""
    """The machine that has it, where a service was asked for it; empty: this one."""
    lacks: tuple[str, ...] = ()
    """What it does not offer, at a service's node or of an ordinary user's podman: 'mounts', 'snapshots',
    'users'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a sandbox may use. Source of the defaults: the rules for judging code of one sample."""

    memory_bytes: int = 512 * MIB
    """Memory of all processes together."""
    has_address_limit: bool = True
    """Whether the address space of each process is as small. Java, Go and Node ask for more than they use."""
    max_processes: int = 64
    """Processes and threads at once."""
    file_bytes: int = 16 * MIB
    """Largest file that a program can write."""
    scratch_bytes: int = 64 * MIB
    """All files of the private directory together."""
    max_scratch_files: int = 20_000
    max_open_files: int = 64
    cpus: float | None = None
    """Processors' worth of time that all programs together get; None: as much as there is."""
    output_head_bytes: int = 64 * KIB
    """Kept of the beginning of each output stream of one command."""
    output_tail_bytes: int = 64 * KIB
    """Kept of its end."""
    flood_bytes: int = 64 * MIB
    """A command that writes more than this, both streams together, is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A file or directory of the host that a program may see."""

    host_path: str
    inside_path: str
    read_only: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """A request for a sandbox."""

    limits: Limits = field(default_factory=Limits)
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the clean environment: PATH, LANG, HOME, TMPDIR and PYTHONHASHSEED."""
    image: str | None = None
    """A container image whose root the programs see: a name in the engine's store, or the absolute path of a
    directory tree. None: this host's /usr. A backend that has no images refuses one."""
    user: int | None = None
    """The image's user, 0 to 65535, that programs run as: root, for an image that changes owners and users.
    On the host it is unprivileged. None: a user of the sandbox's own, which the image need not know.
    A backend that has no images refuses one."""
    has_workspace: bool = False
    """Whether programs find a directory of theirs at `WORKSPACE` too, within the limits of the private one.
    A backend without a root of its own refuses it."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written before the first command, by path; a relative one starts in the private directory."""
    gpus: tuple[str, ...] = ()
    """GPUs of this machine, or MIG slices, that programs see, and no others; as CUDA_VISIBLE_DEVICES names
    them. Then the address space is not limited. A backend without a /dev of its own refuses them."""
    snapshot: Snapshot | None = None
    """What it begins with, instead of an empty private directory. Of the same backend and image."""
    network: str = "none"
    """'none'; 'host' where a backend has it; or 'allow:HOST:PORT,HOST:PORT': exactly what programs may reach,
    through an HTTP proxy that their environment names (`allowlist`). A backend that cannot give a sandbox a
    network of its own refuses a list; asked for 'none', it says 'host' in its record."""
    min_level: IsolationLevel = IsolationLevel.NAMESPACE
    """A sandbox that reaches less is refused."""


class ExecKind(StrEnum):
    """Why a command ended. The first that applies, from the top."""

    FROM_INSIDE = "from_inside"
    """A program killed what watches it; there is no exit code, and the sandbox is lost."""
    TIMED_OUT = "timed_out"
    OOM = "oom"
    """At least one process was killed for memory. The exit code may still be 0."""
    OUTPUT_FLOOD = "output_flood"
    OVER_LIMIT = "over_limit"
    """Killed because the watch saw too many processes, or too much in the private directory."""
    NOT_STARTED = "not_started"
    """No such program or directory, or not executable; `exit_code` is 127, and stderr says why."""
    SIGNALED = "signaled"
    EXITED = "exited"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """How one command ended. Nothing that the command writes can change these fields."""

    kind: ExecKind
    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None
    stdout: bytes
    """The kept bytes: all of them, or head and tail without anything between."""
    stderr: bytes
    stdout_total: int
    """Bytes that were written. Exact, also when not all are kept."""
    stderr_total: int
    oom_kills: int
    duration_s: float
    cpu_s: float
    """Of the command and all that it started."""

    @property
    def timed_out(self) -> bool:
        """Whether the wall limit ended it."""
        return self.kind is ExecKind.TIMED_OUT

    @property
    def truncated(self) -> bool:
        """Whether output was left out."""
        return self.stdout_omitted > 0 or self.stderr_omitted > 0

    @property
    def stdout_omitted(self) -> int:
        """Bytes left out of the middle, behind `Limits.output_head_bytes`."""
        return self.stdout_total - len(self.stdout)

    @property
    def stderr_omitted(self) -> int:
        """As `stdout_omitted`."""
        return self.stderr_total - len(self.stderr)


class FrozenBy(StrEnum):
    """What keeps a paused sandbox's programs from running."""

    CGROUP = "cgroup"
    """The kernel. Programs do not notice."""
    SIGNALS = "signals"
    """Each process was stopped by a signal, which a shell that waits for one may notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxStats:
    """What a sandbox uses and has done so far."""

    cpu_s: float
    """Of all its programs."""
    memory_bytes: int
    memory_peak_bytes: int | None
    """None where the kernel does not count it."""
    processes: int
    disk_bytes: int
    """Of what programs have written and not removed, where their writes are bounded."""
    disk_files: int
    oom_kills: int
    """By the kernel's count."""
    commands: int
    """That have ended, those of shells too."""
    exec_p50_s: float | None
    """Of the newest commands' durations; None before the first."""
    exec_p99_s: float | None
    is_paused: bool
    refused_calls: int = 0
    """What its programs asked of a network that is a list, and that is not in it."""


class Snapshot(Protocol):
    """What programs of a sandbox had written at one moment, to begin others with: files, not processes.

    It is the private directory; of a container everything below its root, without /dev/shm. It lasts until
    it is closed, by `close` or by leaving its `async with` block, and no sandbox that began with it lives.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk that it takes by itself."""
        ...

    async def close(self) -> None:
        """Start no more sandboxes with it. May be called twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class Sandbox(Protocol):
    """A place where untrusted programs run. Leaving its `async with` block stops it."""

    @property
    def isolation(self) -> Isolation:
        """What was reached."""
        ...

    @property
    def scratch(self) -> str:
        """The private directory as a program sees it: its HOME, and where commands start."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        wall_limit_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run a program until it exits, at most `wall_limit_s`; then kill all that it started.

        Several may run at once. `env` is added to that of the sandbox. `cwd` None is the private
        directory. A program that goes on reading after `stdin` meets the end of the file.

        Raises: SandboxLost if the sandbox does not answer. Never because of what the program does.
        """
        ...

    async def start(
        self,
        argv: Sequence[str],
        *,
        wall_limit_s: float = math.inf,
        has_stdin: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Job:
        """Start a program and return. If it cannot be started, its result says so, as that of `exec` does.

        Without `has_stdin` it meets the end of its standard input at once. `Limits.flood_bytes` holds for
        its whole life.

        Raises: SandboxLost.
        """
        ...

    async def open_shell(self, *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Shell:
        """Return a shell that stays open: bash where the sandbox has one, else /bin/sh.

        Raises: SandboxError with kind shell if there is none that answers; SandboxLost.
        """
        ...

    async def connect(self, address: int | str) -> socket.socket:
        """Return a blocking connection to a port of the sandbox's own loopback, or a Unix socket's path.

        It is opened inside as the programs' user, and works where the sandbox has no network. A sandbox that
        has the host's network connects to the host's loopback.

        Raises: SandboxError with kind refused, missing, denied, timed_out, or busy where the server's queue
        is full or 64 are being opened; SandboxLost.
        """
        ...

    async def read(self, path: str, *, offset: int = 0, max_bytes: int = 16 * MIB) -> bytes:
        """Return a regular file's bytes from `offset`. A relative path starts in the private directory.

        Raises: SandboxError with kind missing, directory, not_regular, denied or too_large.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Put a file in place, whole or not at all; its parents are made.

        Raises: SandboxError with kind missing, directory, denied or no_space.
        """
        ...

    async def upload(self, host_path: Path, path: str) -> None:
        """Copy a file, or a directory with all below it, of the host into the sandbox, with permission bits.

        Raises: SandboxError like `write`, and with kind not_regular for a link or a device in the tree.
        """
        ...

    async def download(
        self, path: str, host_path: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000
    ) -> tuple[str, ...]:
        """Copy a file, or a directory with all below it, out of the sandbox, to a place where nothing is yet.

        Only regular files and directories are made, with the permission bits that a user's files may have.
        Returns the paths, relative to `path`, of links and special files, which are left out.

        Raises: SandboxError like `read`, with kind too_large beyond `max_bytes` or `max_files` together, and
        with kind exists if something is at `host_path`.
        """
        ...

    async def pause(self) -> FrozenBy:
        """Return once none of its programs runs; their clocks stand still. No-op if it is paused.

        Until `resume`, what would run something is refused with a SandboxError of kind paused, and what is
        asked of its jobs waits.

        Raises: SandboxError with kind busy if a process could not be stopped, and all go on; SandboxLost.
        """
        ...

    async def resume(self) -> None:
        """Let its programs go on. No-op if it is not paused. Raises: SandboxLost."""
        ...

    async def snapshot(self) -> Snapshot:
        """Keep what its programs have written so far, for `SandboxSpec.snapshot`. They stand still meanwhile.

        Raises: SandboxError with kind no_space, busy (as `pause`), too_deep (a snapshot of a snapshot, and
        so on, 16 times) or io; SandboxLost.
        """
        ...

    async def stats(self) -> SandboxStats:
        """Return what it uses. Raises: SandboxLost."""
        ...

    async def stop(self) -> None:
        """End everything in it; when this returns, nothing is left. May be called twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class SandboxBackend(Protocol):
    """One way to make sandboxes."""

    @property
    def name(self) -> str:
        """The word in run files: 'process', 'bubblewrap', 'podman', 'docker', 'remote'."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Return a fresh sandbox that is ready for its first command.

        Raises: SandboxRefused if the host will not, or if less than `spec.min_level` was reached;
        SandboxError like `write` for one of `spec.files`.
        """
        ...
