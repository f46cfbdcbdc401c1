"""Diagnose the sandboxes of this host: which backends work, how fast, and how to get better isolation.

Every backend is tried by a real start, commands and a stop, and by five probes that a sandbox should hold.
The isolation is read from its sandboxes' records. The facts explain why a backend reached no more.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import SandboxError, SandboxRefused, given_of
from strop.hardware.disks import Disk, describe_disk
from strop.sandbox.agent import find_descendants, read_or_empty
from strop.sandbox.cgroup import find_controllers, hand_down_controllers, make_cgroup
from strop.sandbox.choose import BACKENDS
from strop.sandbox.contract import ExecResult, Guard, Isolation, IsolationLevel, Limits, SandboxSpec
from strop.sandbox.ground import SCRATCH_BASES, run_program
from strop.sandbox.local import LocalBackend
from strop.sandbox.served import ServedSandbox

_TIMES = 5
_PROGRAMS = ("bwrap", "podman", "docker", "runc", "crun")
_GET_GROUPS = (
    "be root, or, with control groups of version 2, start strop by: systemd-run --user --scope"
    " -p Delegate=yes strop ..."
)
_ANSWER_LIMIT_S = 10.0
_WALL_LIMIT_S = 30.0
_LIMITS = Limits(cpus=1.0, max_processes=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendReport:
    """The diagnosis of one backend."""

    name: str
    isolation: Isolation | None
    """None if it makes no sandbox."""
    refusal: str = ""
    not_held: tuple[str, ...] = ()
    """The probes that its sandboxes did not hold."""
    broken: tuple[str, ...] = ()
    """Those of them that its record promises to hold."""
    has_list: bool = False
    """Whether its sandboxes can be restricted to a list of hosts."""
    start_s: float = 0.0
    """Time to the end of the first command."""
    command_s: float = 0.0
    stop_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxDiagnosis:
    """The diagnosis of this host."""

    backends: tuple[BackendReport, ...]
    facts: Mapping[str, str]
    advice: tuple[str, ...]
    """Sentences on how to get better isolation."""


async def diagnose_sandboxes() -> SandboxDiagnosis:
    """Try every backend on this host. Takes some seconds."""
    facts = read_facts()
    reports = tuple([await _try(name) for name in BACKENDS])
    return SandboxDiagnosis(backends=reports, facts=facts, advice=tuple(_advise(reports, facts)))


async def _try(name: str) -> BackendReport:
    spec = SandboxSpec(limits=_LIMITS, min_level=IsolationLevel.NONE)
    try:
        backend = LocalBackend(name)
        # A port where nothing listens; with `process` there is no network of its own.
        network = "none" if name == "process" else "allow:127.0.0.1:9"
        async with await backend.create(replace(spec, network=network)) as first:
            isolation = replace(first.isolation, network="host" if name == "process" else "none")
            not_held = await _probe(first)
        begun = time.perf_counter()
        sandbox = await backend.create(spec)
        await sandbox.exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
        started = time.perf_counter()
        for _ in range(_TIMES):
            await sandbox.exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
        ended = time.perf_counter()
        await sandbox.stop()
        stopped = time.perf_counter()
    except SandboxRefused as refusal:
        return BackendReport(name=name, isolation=None, refusal=str(refusal))
    except SandboxError as error:
        return BackendReport(name=name, isolation=None, refusal=given_of(error))
    return BackendReport(
        name=name,
        isolation=isolation,
        not_held=not_held,
        broken=tuple(name for name in not_held if _promises(isolation)[name]),
        has_list=name != "process",
        start_s=started - begun,
        command_s=(ended - started) / _TIMES,
        stop_s=stopped - ended,
    )


async def _probe(sandbox: ServedSandbox) -> tuple[str, ...]:
    """Return the probes of `_promises` that a sandbox does not hold."""
    token = f"613.{secrets.randbelow(1 << 30)}"

    async def shell(script: str, wall_limit_s: float = _WALL_LIMIT_S) -> ExecResult:
        return await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=wall_limit_s)

    with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as listener:
        file.write(token.encode())
        file.flush()
        seen = (await shell(f"cat /proc/{os.getpid()}/cmdline")).stdout
        read = (await shell(f"cat {file.name}")).stdout
        call = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 5)"
        called = await sandbox.exec([*sandbox.python_argv, "-c", call], wall_limit_s=_WALL_LIMIT_S)
    forked = await shell(f"i=0; while [ $i -lt {4 * _LIMITS.max_processes} ]; do sleep 9 & i=$((i+1)); done")
    await shell(f"setsid sleep {token} & sleep 9", 0.2)
    lines = [read_or_empty(f"/proc/{pid}/cmdline") for pid in find_descendants(sandbox.supervisor_pid)]
    is_held = {
        "processes": seen.decode(errors="replace") != read_or_empty("/proc/self/cmdline"),
        "files": read != token.encode(),
        "network": called.exit_code != 0,
        "forks": forked.exit_code != 0,
        "survivors": not any(token in line for line in lines),
    }
    return tuple(name for name, held in is_held.items() if not held)


def _promises(isolation: Isolation) -> dict[str, bool]:
    """Return the probes, with whether a sandbox with this record must hold them."""
    return {
        "processes": isolation.pidns,
        "files": isolation.mountns or isolation.host_uid != os.geteuid(),
        "network": isolation.netns,
        "forks": isolation.pids is Guard.ENFORCED,
        "survivors": True,
    }


def read_facts() -> dict[str, str]:
    """Return the facts that decide which sandboxes this host allows, by a short name."""
    user = os.geteuid()
    return {
        "kernel": platform.release(),
        "user": "root" if user == 0 else f"uid {user}",
        "control groups": _describe_cgroups(),
        "user namespaces": _describe_namespaces(),
        "private directories": str(_private_disk()),
        **{name: _version_of(name) for name in _PROGRAMS},
    }


def _private_disk() -> Disk:
    places = [path for path in SCRATCH_BASES if os.access(path, os.W_OK)]
    return describe_disk(Path((places or SCRATCH_BASES)[0]))


def _describe_cgroups() -> str:
    hand_down_controllers()
    group = make_cgroup(find_controllers(), f"strop-box-{os.getpid()}-doctor", _LIMITS)
    names, version = sorted(group.dirs), group.version
    group.remove()
    return f"version {version}: {', '.join(names)}" if names else "none: limits are polled, not enforced"


def _describe_namespaces() -> str:
    for path, word in (
        ("/proc/sys/user/max_user_namespaces", "0"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        if read_or_empty(path).strip() == word:
            return f"restricted: {path} is {word}"
    return "allowed" if Path("/proc/self/ns/user").exists() else "the kernel has none"


def _version_of(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        return "missing"
    try:
        return run_program([path, "--version"], limit_s=_ANSWER_LIMIT_S).strip().splitlines()[0]
    except (OSError, IndexError) as error:
        return str(error)


def _advise(reports: tuple[BackendReport, ...], facts: Mapping[str, str]) -> Iterator[str]:
    if facts["bwrap"] == "missing":
        yield "as root, run make system-deps: bubblewrap isolates quickest"
    if facts["podman"] == "missing":
        yield "as root, run make system-deps: podman gives level container, to ordinary users too"
    if facts["user namespaces"] != "allowed":
        yield f"user namespaces are {facts['user namespaces']}; its administrators may allow them"
    if not facts["control groups"].startswith("version"):
        yield f"memory and processes are polled, and processor time is not limited: {_GET_GROUPS}"
    if _private_disk().is_network:
        yield "private directories are on a disk that machines share; give this host a local /tmp"
