"""Backend `bubblewrap`: user, process, mount, network, IPC and host-name namespaces, made by bwrap.

The root holds /usr, the links into it, /proc, a small /dev and the spec's mounts, all read-only; /tmp and
/dev/shm are in memory and bounded. Process 1 is the agent, started by this host's Python. For host root the
agent is root, without a user namespace and with few capabilities, and programs are a private user in a user
namespace of theirs; for an ordinary user all have this user's id.

Covered: all of level `namespace`; the end of process 1 kills all processes. Every release of bubblewrap since
0.4 does: sizes are set by the agent. Not covered: a private root; an ordinary user's programs may end their
sandbox. Tried with bubblewrap 0.8.0 on Linux 6.18, as root and as an ordinary user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from strop.sandbox.contract import WORKSPACE, SandboxSpec

AGENT = "/.strop/agent.pyc"
_CAPABILITIES = {
    name: 1 << number
    for name, number in (
        ("CAP_CHOWN", 0),
        ("CAP_DAC_READ_SEARCH", 2),
        ("CAP_KILL", 5),
        ("CAP_SETGID", 6),
        ("CAP_SETUID", 7),
        ("CAP_SETPCAP", 8),
        ("CAP_SYS_PTRACE", 19),
        ("CAP_SYS_ADMIN", 21),
    )
}
"""The agent's at its start: to become programs' users, and to measure and kill their processes."""
AGENT_CAPABILITIES = sum(_CAPABILITIES.values()) & ~(
    _CAPABILITIES["CAP_SYS_ADMIN"] | _CAPABILITIES["CAP_CHOWN"]
)
"""Those that it keeps."""


def bubblewrap_argv(
    program: str,
    spec: SandboxSpec,
    binds: Sequence[tuple[str, str, bool]],
    devices: Mapping[str, str],
) -> list[str]:
    """Return the words that start a command as process 1 of a sandbox; the command follows them."""
    words = [program, "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        words += ["--unshare-user", "--uid", "0", "--gid", "0"]
    if spec.network != "host":
        words.append("--unshare-net")
    words += ["--die-with-parent", "--as-pid-1", "--hostname", "sandbox", "--cap-drop", "ALL"]
    for name in _CAPABILITIES:
        words += ["--cap-add", name]
    links, shown = system_tree()
    for path, target in links.items():
        words += ["--symlink", target, path]
    words += _parents_of(shown)
    for path in shown:
        words += ["--ro-bind", path, path]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
    if spec.has_workspace:
        # The root is read-only, and another tmpfs would add another size limit.
        words += ["--symlink", f"/tmp{WORKSPACE}", WORKSPACE]
    words += _parents_of((*devices.values(), *(inside for _, inside, _ in binds)))
    words += [word for pair in devices.items() for word in ("--dev-bind", *pair)]
    for host_path, inside_path, read_only in binds:
        words += ["--ro-bind" if read_only else "--bind", host_path, inside_path]
    # The file systems in which bwrap created these directories have no size limit.
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--"]


def _parents_of(paths: Iterable[str]) -> list[str]:
    """Return the words that make parents: bwrap would close those of what is private here to other users."""
    parents = dict.fromkeys(str(parent) for path in paths for parent in reversed(Path(path).parents))
    return [word for parent in parents for word in ("--dir", parent)]


@cache
def system_tree() -> tuple[dict[str, str], tuple[str, ...]]:
    """Return this host's links into /usr, and the paths to show: /usr and files of the dynamic loader."""
    links, shown = {}, ["/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            links[str(path)] = os.readlink(path)
        elif path.is_dir():
            shown.append(str(path))
    shown += [path for path in ("/etc/ld.so.cache", "/etc/alternatives") if os.path.exists(path)]
    return links, tuple(shown)
