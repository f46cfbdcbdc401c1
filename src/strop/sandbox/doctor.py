"""Diagnose the sandboxes of this host: which backends work, how fast, and how to get better isolation.

Every backend is tried by real starts, commands and stops. The isolation is read from its sandboxes' records.
The level that attacks confirmed is shown if they ran since the host's boot, with the same programs. The facts
explain why a backend reached no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from strop import __version__
from strop.errors import SandboxError, SandboxRefused, given_of
from strop.hardware.disks import Disk, describe_disk
from strop.hardware.identity import read_boot_id
from strop.io.atomic import write_bytes_atomically
from strop.io.variables import user_cache_dir
from strop.sandbox.cgroup import find_controllers, hand_down_controllers, make_cgroup
from strop.sandbox.choose import BACKENDS, make_backend
from strop.sandbox.contract import Isolation, IsolationLevel, Limits, SandboxBackend, SandboxSpec
from strop.sandbox.daemon import SCRATCH_BASES
from strop.sandbox.linux import read_or_empty
from strop.sandbox.rootless import count_ids, names_of, ranges_of

_TIMES = 5
_PROGRAMS = ("bwrap", "podman", "docker", "runc", "crun", "apptainer", "enroot", "runsc")
_DECIDING = (
    *("kernel", "user", "control groups", "user namespaces", "subordinate ids", "docker daemon"),
    *_PROGRAMS,
)
_CONFIRMED_NAME = "sandbox-attacks.json"
_DEVICES = ("/dev/kvm", "/dev/fuse", "/dev/net/tun")
_GET_GROUPS = (
    "be root, or, with control groups of version 2, start strop by: systemd-run --user --scope"
    " -p Delegate=yes strop ..."
)
_ANSWER_LIMIT_S = 10.0
_WALL_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendReport:
    """The diagnosis of one backend."""

    name: str
    isolation: Isolation | None
    """None if it makes no sandbox."""
    refusal: str = ""
    confirmed: IsolationLevel | None = None
    """The level that attacks on this host have confirmed; None if some were not run."""
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
    confirmed = read_confirmed(facts)
    reports = tuple([replace(await _try(name), confirmed=confirmed.get(name)) for name in BACKENDS])
    return SandboxDiagnosis(backends=reports, facts=facts, advice=tuple(_advise(reports, facts)))


async def _try(name: str) -> BackendReport:
    spec = SandboxSpec(limits=Limits(cpus=1.0), min_level=IsolationLevel.NONE)
    times: list[tuple[float, float, float]] = []
    try:
        backend = make_backend(name)
        # The first one starts the processes that the others share.
        async with await backend.create(spec) as first:
            isolation = first.isolation
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
        has_list=has_list,
        start_s=start_s,
        command_s=command_s,
        stop_s=stop_s,
    )


async def _has_list(backend: SandboxBackend, spec: SandboxSpec) -> bool:
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


def keep_confirmed(levels: Mapping[str, IsolationLevel]) -> None:
    """Store the levels that attacks have confirmed, by backend, until this host's facts change."""
    facts = read_facts()
    kept = {name: level.word for name, level in (read_confirmed(facts) | dict(levels)).items()}
    content = {"host": _digest_host(facts), "confirmed": kept}
    path = user_cache_dir() / _CONFIRMED_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, json.dumps(content).encode())


def read_confirmed(facts: Mapping[str, str]) -> dict[str, IsolationLevel]:
    """Return the levels that `keep_confirmed` stored for a host with these facts."""
    try:
        content = json.loads((user_cache_dir() / _CONFIRMED_NAME).read_bytes())
        if content["host"] != _digest_host(facts):
            return {}
        return {name: IsolationLevel[word.upper()] for name, word in content["confirmed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _digest_host(facts: Mapping[str, str]) -> str:
    """Return a digest of everything that decides the outcome of attacks."""
    deciding = {name: facts[name] for name in _DECIDING}
    parts = [read_boot_id(), __version__, deciding]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _private_disk() -> Disk:
    places = [path for path in SCRATCH_BASES if os.access(path, os.W_OK)]
    return describe_disk(Path((places or SCRATCH_BASES)[0]))


def _describe_cgroups() -> str:
    hand_down_controllers()
    controllers = find_controllers()
    if not controllers:
        return "none may be used"
    group = make_cgroup(controllers, f"strop-doctor-{os.getpid()}", Limits(cpus=1.0))
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
    working = [(report, report.isolation) for report in reports if report.isolation is not None]
    for report, isolation in working:
        if report.confirmed is not None and report.confirmed < isolation.level:
            which = f"strop sandbox attack {report.name} says which succeed"
            yield f"{report.name}: attacks confirm level {report.confirmed.word} alone; {which}"
    if any(report.confirmed is None for report, _ in working):
        yield "strop sandbox attack confirms the levels, in about a minute"
    if _private_disk().is_network:
        yield "private directories are on a disk that machines share; give this host a local /tmp"
