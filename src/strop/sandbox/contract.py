"""The contract of every sandbox, independent of the backend.

A program's failure, its time-out and the limits it hits are values in `ExecResult`. A sandbox that fails
raises `SandboxError`. The isolation reached is measured when a sandbox is created and recorded in
`Isolation`, with every guarantee that the backend cannot keep.

The operations are those of `served.ServedSandbox`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

KIB = 1 << 10
MIB = 1 << 20
WORKSPACE = "/workspace"
"""The directory in which agents expect their files."""


class IsolationLevel(IntEnum):
    """How well the program is contained. Levels are ordered; each includes the one before."""

    NONE = 0
    """A private directory, nothing else."""
    RLIMIT = 1
    """All its processes are killed, its environment is clean, memory and processes are at least watched."""
    NAMESPACE = 2
    """Own process, mount, IPC, host-name and network namespaces, no capability, no gain by set-uid."""
    CONTAINER = 3
    """Own root file system, filtered system calls, limits on memory, processes and files enforced."""
    VM = 4
    """Own kernel."""

    @property
    def word(self) -> str:
        """The level's name in run files and records."""
        return self.name.lower()


class Guard(StrEnum):
    """How a limit is enforced."""

    ENFORCED = "enforced"
    """The kernel refuses more."""
    WATCHED = "watched"
    """A breach is found within a fraction of a second, and the program is killed."""
    NONE = "none"
    """A breach goes unnoticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """The isolation that a sandbox reached, measured when it was created."""

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
    """Whether a program may create a user namespace and become root in it."""
    host_root_maps_to: str
    """The host's root as seen inside: a user id, 'unmapped', or '0' without a user namespace."""
    host_uid: int
    """The program's user id on the host."""
    memory: Guard
    pids: Guard
    cpu: Guard
    disk: Guard
    files: Guard
    """Number of open files and size of each file."""
    network: str
    """'none', 'host', or the list of allowed hosts, as in a spec."""
    kernel: str
    """Release of the kernel that serves the program's system calls."""
    node: str = ""
    """The node of the Ray cluster that runs the sandbox; empty: this machine."""
    lacks: tuple[str, ...] = ()
    """Features missing on another node or in rootless podman: 'mounts', 'servers', 'users'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Resource limits of a sandbox. The defaults are those for judging the code of one sample."""

    memory_bytes: int = 512 * MIB
    """Memory of all processes together, with the files in /dev/shm."""
    has_address_limit: bool = True
    """Whether `memory_bytes` also limits each process's address space. Java, Go and Node reserve more than
    they use."""
    max_processes: int = 64
    """Processes and threads at once."""
    file_bytes: int = 16 * MIB
    """Size of the largest file that a program can write."""
    scratch_bytes: int = 64 * MIB
    """Total size of the files in the private directory."""
    max_scratch_files: int = 20_000
    max_open_files: int = 64
    cpus: float | None = None
    """CPUs for all programs together; None: no limit."""
    output_head_bytes: int = 64 * KIB
    """Bytes kept from the beginning of each output stream of a command."""
    output_tail_bytes: int = 64 * KIB
    """Bytes kept from its end."""
    flood_bytes: int = 64 * MIB
    """A command that writes more than this, both streams together, is killed."""

    @property
    def shm_bytes(self) -> int:
        """Size of /dev/shm: at most half of the memory, so that full files leave room for processes."""
        return min(self.scratch_bytes, self.memory_bytes // 2)

    @property
    def group_bytes(self) -> int:
        """What a control group may charge: the private directory's files are in memory too.

        The kernel charges up to a KiB for each file itself.
        """
        return self.memory_bytes + self.scratch_bytes + self.max_scratch_files * KIB


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
    """Variables added to the clean environment of PATH, LANG, HOME, TMPDIR and PYTHONHASHSEED."""
    image: str | None = None
    """The container image of the root file system: a name in the engine's store, or the absolute path of a
    directory tree. None: this host's /usr. A backend without images refuses one."""
    user: int | None = None
    """User id in the image, 0 to 65535, for programs: 0 for an image that changes owners and users.
    On the host this user is unprivileged. None: the sandbox's private user, which the image need not know.
    A backend without images refuses one."""
    has_workspace: bool = False
    """Whether programs also have a writable directory at `WORKSPACE`, within the private directory's limits.
    A backend without a private root refuses it."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files written before the first command, by path; a relative path starts in the private directory."""
    gpus: tuple[str, ...] = ()
    """The only GPUs or MIG slices of this machine that programs see, as in CUDA_VISIBLE_DEVICES.
    With GPUs the address space is not limited. A backend without a private /dev refuses them."""
    network: str = "none"
    """'none'; 'host' where a backend has it; or 'allow:HOST:PORT,HOST:PORT': the only hosts that programs may
    reach, through an HTTP proxy named in their environment (`allowlist`). A backend without network
    namespaces refuses a list; for 'none' its record says 'host'."""
    min_level: IsolationLevel = IsolationLevel.NAMESPACE
    """A sandbox that reaches less is refused."""


class ExecKind(StrEnum):
    """Why a command ended: the first value, from the top, that applies."""

    FROM_INSIDE = "from_inside"
    """A program killed its runner; there is no exit code, and the sandbox is lost."""
    TIMED_OUT = "timed_out"
    OOM = "oom"
    """At least one process was killed for memory. The exit code may still be 0."""
    OUTPUT_FLOOD = "output_flood"
    OVER_LIMIT = "over_limit"
    """Killed for too many processes, or too much data in the private directory, where these are watched."""
    NOT_STARTED = "not_started"
    """The program or directory does not exist or is not executable; `exit_code` is 127, stderr says why."""
    SIGNALED = "signaled"
    EXITED = "exited"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """The result of a command. Nothing that the command writes can change these fields."""

    kind: ExecKind
    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None
    stdout: bytes
    """The kept bytes: all of them, or head and tail without anything between."""
    stderr: bytes
    stdout_total: int
    """Bytes written; exact, also when not all are kept."""
    stderr_total: int
    oom_kills: int
    duration_s: float
    cpu_s: float
    """CPU time of the command and its descendants."""

    @property
    def timed_out(self) -> bool:
        """Whether the wall limit ended it."""
        return self.kind is ExecKind.TIMED_OUT

    @property
    def truncated(self) -> bool:
        """Whether output was omitted."""
        return self.stdout_omitted > 0 or self.stderr_omitted > 0

    @property
    def stdout_omitted(self) -> int:
        """Bytes omitted from the middle, behind `Limits.output_head_bytes`."""
        return self.stdout_total - len(self.stdout)

    @property
    def stderr_omitted(self) -> int:
        """Like `stdout_omitted`."""
        return self.stderr_total - len(self.stderr)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxStats:
    """Resource use of a sandbox so far."""

    cpu_s: float
    """CPU time of all its programs."""
    memory_bytes: int
    memory_peak_bytes: int | None
    """None where the kernel does not count it."""
    processes: int
    disk_bytes: int
    """Bytes in the files that programs have written, where their writes are bounded."""
    disk_files: int
    oom_kills: int
    """The kernel's count."""
    commands: int
    """Finished commands, those of shells included."""
    exec_p50_s: float | None
    """Median duration of the newest commands; None before the first."""
    exec_p99_s: float | None
    refused_calls: int = 0
    """Connections that programs tried to hosts outside the sandbox's list of allowed ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellResult(ExecResult):
    """The result of a shell's command.

    `exit_code` is the shell's own report: 128 plus the number for a signal. A command that the shell itself
    evaluates could falsify it, for that command and later ones.
    """

    has_shell: bool
    """Whether the shell still runs. It ends with `exit`, with a command that cannot be interrupted at the
    wall limit, or when it exceeds a limit of the sandbox."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutput:
    """Output of a running command since the last read."""

    stdout: bytes
    stderr: bytes
    stdout_omitted: int
    """Bytes dropped in front of `stdout`, because they were written faster than read."""
    stderr_omitted: int
