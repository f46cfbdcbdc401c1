"""The interface between a supervisor and the place in which its commands run, for every backend."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from strop.sandbox.cgroup import Cgroup, Controller
from strop.sandbox.contract import Guard, Isolation, Limits


def identify(path: str) -> list[int] | None:
    """Return device, inode and file type of a path; None if it does not exist."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return [info.st_dev, info.st_ino, stat.S_IFMT(info.st_mode)]


@dataclass(kw_only=True, slots=True)
class Order:
    """A request to a daemon for a sandbox."""

    backend: str
    limits: Limits
    min_level: int
    binds: list[tuple[str, str, bool]]
    """Host path, path inside, read-only."""
    devices: dict[str, str] = field(default_factory=dict)
    """Device files: host path to path inside."""
    seen: dict[str, list[int] | None] = field(default_factory=dict)
    """The client's `identify` of these and of an image's path; the client sees this host's mounts."""
    program: str = ""
    """Path of bwrap, podman or docker."""
    engine_env: dict[str, str] = field(default_factory=dict)
    """Environment for podman or docker."""
    image: str = ""
    """A name in the engine's store, or the absolute path of a directory tree; empty: this host's /usr."""
    image_root: str = ""
    """Path of the image's tree on this host, set by the daemon."""
    user: int | None = None
    """The image's user for programs; None: the sandbox's private user."""
    has_workspace: bool = False
    network: str = "none"
    python_source: str | None = None
    """None if an earlier order contained it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPython:
    """A sandbox's Python source, and the `main` that it defines."""

    source: str
    main: Callable[[], None]


@dataclass(kw_only=True, slots=True)
class Ground:
    """The daemon's preparations for all its sandboxes."""

    runtime_dir: str
    """A directory that any user may enter. It contains the private directories."""
    kernel: str
    """The kernel's release."""
    namespaces: dict[str, str]
    """Identities of this host's namespaces, by kind."""
    can_mount: bool
    """Whether file systems can be mounted below `runtime_dir`, unseen by the host."""
    first: str = ""
    """A copy of cat that programs may run but not read; empty where it cannot be protected."""
    staged: dict[str, str] = field(default_factory=dict)
    """Host paths that a program's user or the daemon cannot reach, and the paths of their bind mounts."""
    controllers: list[Controller] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Limits that the kernel does not enforce and a command's runner checks; None: not checked."""

    memory_bytes: int | None = None
    max_processes: int | None = None
    scratch_bytes: int | None = None
    max_scratch_files: int | None = None


class Place(Protocol):
    """The supervisor's view of the place in which commands of a sandbox run."""

    limits: Limits
    scratch: str
    """The private directory as a program sees it."""
    user: tuple[int, int] | None
    """User and group ids inside that a program changes to; None if it has them already."""
    ipc_uid: int | None
    """Owner of the programs' System V objects, by its id inside; None if others of this host share it."""
    capabilities: int
    """Bit mask of capabilities that programs keep; only with a user namespace."""
    max_user_processes: int | None
    """RLIMIT_NPROC; None if it would count other programs' processes too."""
    cgroup: Cgroup
    watch: Watch
    changes: str
    """The directory with the programs' files, as this process sees it."""
    has_own_disk: bool
    """Whether `changes` is a separate file system."""
    has_own_pids: bool
    """Whether `enter` takes effect for processes in children only."""

    @property
    def moved_mounts(self) -> Mapping[str, str]:
        """Mounted host paths whose path inside differs from the order's, with the path inside."""
        ...

    def enter(self) -> None:
        """Move this process into the place. Raises: OSError."""
        ...

    @property
    def holder(self) -> int | None:
        """A pidfd of the process whose end is the end of the place, if there is one."""
        ...

    def kill(self) -> None:
        """Kill the holder of the place, and with it everything that runs there. May be called twice."""
        ...

    def describe(self, facts: dict[str, Any]) -> Isolation:
        """Return the isolation reached, from the self-measurement of a process inside."""
        ...

    def close(self) -> None:
        """Remove everything. All commands must have ended."""
        ...


def clean_env(scratch: str) -> dict[str, str]:
    """Return the complete environment of a program without further variables."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": scratch,
        "TMPDIR": scratch,
        "PYTHONHASHSEED": "0",
    }


def guard(is_enforced: bool, *, is_watched: bool) -> Guard:
    """Return how a limit is enforced."""
    if is_enforced:
        return Guard.ENFORCED
    return Guard.WATCHED if is_watched else Guard.NONE


def own_namespaces(facts: Mapping[str, Any], outside: Mapping[str, str]) -> dict[str, bool]:
    """Return, by kind, whether the sandbox's first command was in another namespace than the host."""
    return {name: facts["namespaces"][name] != identity for name, identity in outside.items()}


def is_contained(
    facts: Mapping[str, Any],
    own: Mapping[str, bool],
    needed: Collection[str],
    *,
    uid: int,
    network: str,
    capabilities: int = 0,
) -> bool:
    """Return whether a program has its own namespaces of the `needed` kinds, and no further privileges.

    The network namespace is not needed if the host's network was requested. `capabilities`: those that it may
    have over its own user namespace.
    """
    allowed = capabilities if own["user"] else 0
    return (
        all(own[name] for name in needed if name != "net" or network != "host")
        and facts["no_new_privs"]
        and facts["permitted"] & ~allowed == 0
        and not facts["nested_userns"]
        and uid != 0
    )


def network_word(own: Mapping[str, bool], asked: str) -> str:
    """Return the value of `Isolation.network`: with a network namespace the requested one."""
    return asked if own["net"] and asked != "host" else "host"


def inside_fields(facts: Mapping[str, Any], own: Mapping[str, bool]) -> dict[str, Any]:
    """Return the fields of `Isolation` that are measured inside, for every backend."""
    return {
        "userns": own["user"],
        "pidns": own["pid"],
        "mountns": own["mnt"],
        "netns": own["net"],
        "ipcns": own["ipc"],
        "utsns": own["uts"],
        **{name: facts[name] for name in ("seccomp", "no_new_privs", "caps", "nested_userns")},
    }
