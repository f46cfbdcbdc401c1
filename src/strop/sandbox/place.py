"""The interface between a supervisor and the place that its commands run in, whatever backend made it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from strop.sandbox.cgroup import Cgroup, Controller
from strop.sandbox.contract import Guard, Isolation, Limits


def identify(path: str) -> list[int] | None:
    """Return device, inode and type of what is at a path; None if nothing is."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode)]


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
    """`identify` of these, and of an image's path, by its client, which has this host's own mounts."""
    program: str = ""
    """Where the program is that makes the place: bwrap, podman or docker."""
    engine_env: dict[str, str] = field(default_factory=dict)
    """What podman or docker is started with."""
    image: str = ""
    """A name in the engine's store, or the absolute path of a directory tree; empty: this host's /usr."""
    image_root: str = ""
    """Where the image's tree is on this host; the daemon finds it."""
    user: int | None = None
    """The image's user that programs run as; None: a user of the sandbox's own."""
    has_workspace: bool = False
    layers: list[str] = field(default_factory=list)
    """Of the snapshot that it begins with, the newest first."""
    snapshot_uid: int | None = None
    """The user that these belong to."""
    network: str = "none"
    python_source: str | None = None
    """None if an earlier order brought it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPython:
    """A sandbox's Python source, and the `main` that it defined when it was loaded."""

    source: str
    main: Callable[[], None]


@dataclass(kw_only=True, slots=True)
class Ground:
    """What the daemon prepared for all its sandboxes."""

    runtime_dir: str
    """A directory that any user may enter; private directories are made in it."""
    kernel: str
    """Its release."""
    namespaces: dict[str, str]
    """What this host's namespaces are called, by their kind."""
    can_mount: bool
    """Whether file systems can be mounted below `runtime_dir`, unseen by the host."""
    first: str = ""
    """A copy of cat that programs may run and not read; empty where it would be readable all the same."""
    staged: dict[str, str] = field(default_factory=dict)
    """Host paths that a program's user or the daemon cannot reach, and where they can be reached."""
    controllers: list[Controller] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Limits that the kernel does not enforce and the runner of a command checks; None is not checked."""

    memory_bytes: int | None = None
    max_processes: int | None = None
    scratch_bytes: int | None = None
    max_scratch_files: int | None = None


class Place(Protocol):
    """Where commands of one sandbox run, from its supervisor's side."""

    limits: Limits
    scratch: str
    """The private directory as a program sees it."""
    user: tuple[int, int] | None
    """User and group that a program changes to, as they are called inside; None if it is them already."""
    capabilities: int
    """What a program may do beyond its user's rights, a bit each; only with a user namespace."""
    max_user_processes: int | None
    """The kernel's limit for this user; None if it would count other programs' processes too."""
    cgroup: Cgroup
    watch: Watch
    changes: str
    """Where, for this process, the directory is that holds what programs have written."""
    has_own_disk: bool
    """Whether `changes` is a file system of its own."""
    has_overlay: bool
    """Whether `changes` lies over `layers`, and is no whole by itself."""
    layers: Sequence[str]
    """What it began with."""
    first_id: int
    """The user of the host that owns what programs write, or the first of them."""
    has_own_pids: bool
    """Whether `enter` takes effect for processes in children only."""

    @property
    def moved_mounts(self) -> Mapping[str, str]:
        """Mounted host paths that are found elsewhere than the order says, and where."""
        ...

    def enter(self) -> None:
        """Move this process into the place. Raises: OSError."""
        ...

    @property
    def holder(self) -> int | None:
        """A descriptor of the process whose end is the end of the place (a pidfd), if there is one."""
        ...

    def kill(self) -> None:
        """Kill what holds the place, and with it all that runs there. May be called twice."""
        ...

    def describe(self, facts: dict[str, Any]) -> Isolation:
        """Return the isolation reached, from what a program inside reported about itself."""
        ...

    def close(self) -> None:
        """Remove everything. All commands must have ended."""
        ...


def clean_env(scratch: str) -> dict[str, str]:
    """Return the whole environment of a program that is given no variables."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": scratch,
        "TMPDIR": scratch,
        "PYTHONHASHSEED": "0",
    }


def guard(is_enforced: bool, *, is_watched: bool) -> Guard:
    """Return how a limit is kept."""
    if is_enforced:
        return Guard.ENFORCED
    return Guard.WATCHED if is_watched else Guard.NONE


def own_namespaces(facts: Mapping[str, Any], outside: Mapping[str, str]) -> dict[str, bool]:
    """Return which kinds of namespace a sandbox has for itself, by what its first command saw."""
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
    """Return whether a program has its own namespaces of the kinds that are needed, and no further rights.

    The network's counts unless a sandbox was asked to have the host's. `capabilities`: what it may have, over
    a user namespace of its own.
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
    """Return what `Isolation.network` says: with a network of its own, what a sandbox was asked to have."""
    return asked if own["net"] and asked != "host" else "host"


def inside_fields(facts: Mapping[str, Any], own: Mapping[str, bool]) -> dict[str, Any]:
    """Return the fields of `Isolation` that are as seen from inside, whatever the backend."""
    return {
        "userns": own["user"],
        "pidns": own["pid"],
        "mountns": own["mnt"],
        "netns": own["net"],
        "ipcns": own["ipc"],
        "utsns": own["uts"],
        **{name: facts[name] for name in ("seccomp", "no_new_privs", "caps", "nested_userns")},
    }
