"""Diagnose the sandboxes of this host: which backends work, how fast, and how to get better isolation.

Every backend is tried by real starts, commands and stops, and by five probes that a sandbox should hold. The
isolation is read from its sandboxes' records. The facts explain why a backend reached no more.
"""

from __future__ import annotations

import os
import platform
import resource
import secrets
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import SandboxError, SandboxRefused, given_of
from strop.hardware.disks import Disk, describe_disk
from strop.sandbox.cgroup import find_controllers, hand_down_controllers, make_cgroup
from strop.sandbox.choose import BACKENDS
from strop.sandbox.contract import ExecResult, Guard, Isolation, IsolationLevel, Limits, SandboxSpec
from strop.sandbox.daemon import SCRATCH_BASES
from strop.sandbox.family import find_descendants
from strop.sandbox.linux import read_or_empty
from strop.sandbox.local import LocalBackend
from strop.sandbox.rootless import count_ids, names_of, ranges_of
from strop.sandbox.served import ServedSandbox

_TIMES = 5
_PROGRAMS = ("bwrap", "podman", "docker", "runc", "crun", "apptainer", "enroot", "runsc")
_DEVICES = ("/dev/kvm", "/dev/fuse", "/dev/net/tun")
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
    """Time to the end of the first command; like the others, the median of a few."""
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
    times: list[tuple[float, float, float]] = []
    try:
        backend = LocalBackend(name)
        # The first one starts the processes that the others share.
        async with await backend.create(spec) as first:
            isolation = first.isolation
            not_held = await _probe(first)
        has_list = await _has_list(backend, spec)
        for _ in range(_TIMES):
            begun = time.perf_counter()
            sandbox = await backend.create(spec)
            await sandbox.exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
            started = time.perf_counter()
            await sandbox.exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
            ended = time.perf_counter()
            await sandbox.stop()
            times.append((started - begun, ended - started, time.perf_counter() - ended))
    except SandboxRefused as refusal:
        return BackendReport(name=name, isolation=None, refusal=str(refusal))
    except SandboxError as error:
        return BackendReport(name=name, isolation=None, refusal=given_of(error))
    start_s, command_s, stop_s = (statistics.median(column) for column in zip(*times, strict=True))
    return BackendReport(
        name=name,
        isolation=isolation,
        not_held=not_held,
        broken=tuple(name for name in not_held if _promises(isolation)[name]),
        has_list=has_list,
        start_s=start_s,
        command_s=command_s,
        stop_s=stop_s,
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


async def _has_list(backend: LocalBackend, spec: SandboxSpec) -> bool:
    try:
        # A port where nothing listens.
        async with await backend.create(replace(spec, network="allow:127.0.0.1:9")) as sandbox:
            return sandbox.isolation.network.startswith("allow:")
    except SandboxRefused:
        return False


def read_facts() -> dict[str, str]:
    """Return the facts that decide which sandboxes this host allows, by a short name."""
    user = os.geteuid()
    num_ids = count_ids(ranges_of(read_or_empty("/etc/subuid"), names_of(user)))
    return {
        "kernel": platform.release(),
        "user": "root" if user == 0 else f"uid {user}",
        "control groups": _describe_cgroups(),
        "user namespaces": _describe_namespaces(),
        "subordinate ids": f"{num_ids:,}" if num_ids else "none",
        "private directories": str(_private_disk()),
        "open files": _describe_limit(resource.RLIMIT_NOFILE),
        "processes": _describe_limit(resource.RLIMIT_NPROC),
        "devices": ", ".join(path for path in _DEVICES if os.path.exists(path)) or "none of the three",
        **{name: _version_of(name) for name in _PROGRAMS},
        "docker daemon": _version_of("docker", "version", "--format", "{{.Server.Version}}"),
    }


def _private_disk() -> Disk:
    places = [path for path in SCRATCH_BASES if os.access(path, os.W_OK)]
    return describe_disk(Path((places or SCRATCH_BASES)[0]))


def _describe_cgroups() -> str:
    hand_down_controllers()
    controllers = find_controllers()
    if not controllers:
        return "none may be used"
    group = make_cgroup(controllers, f"strop-doctor-{os.getpid()}", _LIMITS)
    names, version = sorted(group.dirs), group.version
    group.remove()
    return f"version {version}: {', '.join(names)}" if names else "none may be made"


def _describe_namespaces() -> str:
    if not Path("/proc/self/ns/user").exists():
        return "the kernel has none"
    for place, word in (
        ("/proc/sys/user/max_user_namespaces", "0"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        if read_or_empty(place).strip() == word:
            return f"restricted: {place} is {word}"
    return "allowed"


def _describe_limit(kind: int) -> str:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in resource.getrlimit(kind)
    )
    return f"{soft} of {hard}"


def _version_of(name: str, *words: str) -> str:
    path = shutil.which(name)
    if path is None:
        return "missing"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [path, *(words or ("--version",))],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
            timeout=_ANSWER_LIMIT_S,
        )
        if lines := (done.stdout or done.stderr).strip().splitlines():
            return lines[0]
    return f"{path} says no version"


def _advise(reports: tuple[BackendReport, ...], facts: Mapping[str, str]) -> Iterator[str]:
    failed = {report.name for report in reports if report.isolation is None}
    if facts["bwrap"] == "missing":
        yield "as root, run make system-deps: bubblewrap isolates quickest"
    if facts["podman"] == "missing":
        yield "as root, run make system-deps: podman gives level container, to ordinary users too"
    elif any(
        report.name == "podman"
        and report.isolation is not None
        and report.isolation.level < IsolationLevel.CONTAINER
        for report in reports
    ):
        yield f"podman makes no containers here for want of control groups: {_GET_GROUPS}"
    if facts["docker"] != "missing" and "docker" in failed:
        yield (
            "docker gives level container to root, beside a daemon of this machine; members of its group"
            " docker are root too, by what they can ask of it"
        )
    if facts["user namespaces"] != "allowed" and "bubblewrap" in failed:
        yield f"user namespaces are {facts['user namespaces']}; its administrators may allow them"
    if not facts["control groups"].startswith("version"):
        yield (
            "no control group may be made, so memory and processes are watched and processor time is not"
            f" bounded: {_GET_GROUPS}"
        )
    if _private_disk().is_network:
        yield "private directories are on a disk that machines share; give this host a local /tmp"
