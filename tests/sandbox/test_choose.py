"""Which backend a host gets, and that it is never less than what was asked for."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, SandboxRefused
from strop.run.inference import hold_judge
from strop.sandbox import (
    Guard,
    IsolationLevel,
    Mount,
    SandboxSpec,
    choose_backend,
    doctor,
    local,
    make_backend,
)
from strop.sandbox.doctor import diagnose_sandboxes, read_facts
from strop.sandbox.served import ServedSandbox
from strop.tasks.rows.judged_rows import ProgramSpec
from tests.fixtures.commands import Run, run
from tests.fixtures.sandboxes import (
    SOURCE_DIR,
    in_sandbox,
    needs_bubblewrap,
    on_every_engine,
    sandbox_of,
    spec_of,
    where_users_differ,
)


@needs_bubblewrap
def test_auto_takes_the_best() -> None:
    assert asyncio.run(choose_backend()).name == "bubblewrap"
    assert asyncio.run(choose_backend("process", IsolationLevel.RLIMIT)).name == "process"


@pytest.mark.parametrize("level", [IsolationLevel.NAMESPACE, IsolationLevel.VM])
def test_a_level_that_is_not_reached_is_refused_and_says_what_was_reached(level: IsolationLevel) -> None:
    with pytest.raises(SandboxRefused, match=f"level {level.word} or better.*rlimit was reached") as caught:
        asyncio.run(choose_backend("process", level))
    assert caught.value.kind == "level"
    with pytest.raises(SandboxRefused, match="rlimit was reached"):
        asyncio.run(make_backend("process").create(SandboxSpec(min_level=level)))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'vm'. Allowed: auto, bubblewrap, podman, docker, process"):
        asyncio.run(choose_backend("vm"))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("mounts", {"mounts": (Mount(host_path="/usr", inside_path="/data"),)}),
        ("workspace", {"has_workspace": True}),
        ("network", {"network": "allow:packages.example.org:443"}),
    ],
)
def test_what_needs_a_file_system_or_network_of_ones_own_is_refused(
    kind: str, wanted: dict[str, Any]
) -> None:
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(make_backend("process").create(replace(spec_of(), **wanted)))
    assert caught.value.kind == kind


@needs_bubblewrap
def test_a_mount_that_is_not_there_is_told_in_the_words_of_bwrap() -> None:
    mounts = (Mount(host_path="/no/such/place", inside_path="/data"),)
    with pytest.raises(SandboxRefused, match="/no/such/place") as caught:
        asyncio.run(make_backend("bubblewrap").create(spec_of(mounts=mounts)))
    assert caught.value.kind == "bubblewrap"


async def test_a_host_without_a_python_for_programs_is_told_when_one_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(local._pythons, ("process", None), ())

    async with await make_backend("process").create(spec_of()) as sandbox:
        assert (await sandbox.exec(["/bin/true"], wall_limit_s=60)).exit_code == 0
        with pytest.raises(SandboxRefused, match="no Python can be started") as caught:
            _ = sandbox.python_argv
        assert caught.value.kind == "interpreter"


CHOOSE = """
import asyncio, sys
from strop.errors import SandboxRefused
from strop.sandbox import IsolationLevel, choose_backend
for level in (IsolationLevel.NAMESPACE, IsolationLevel.RLIMIT):
    try:
        print(asyncio.run(choose_backend("auto", level)).name)
    except SandboxRefused as refusal:
        print("refused", refusal.kind, refusal)
"""


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A directory for programs that the user of a sandbox can enter too."""
    with tempfile.TemporaryDirectory(prefix="shelf ") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("", "program bwrap was not found"),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions"),
    ],
)
def test_without_a_bwrap_that_works_nothing_less_is_taken_unless_it_is_enough(
    shelf: Path, program: str, cause: str
) -> None:
    if program:
        _make_program(shelf / "bwrap", program)
    refused, taken = _choose(shelf)
    assert cause in refused
    assert taken == "process"


@needs_bubblewrap
def test_what_counts_is_what_was_reached_not_what_was_asked(shelf: Path) -> None:
    """A bwrap that leaves out one word makes sandboxes whose programs share the host's memory segments."""
    _make_program(
        shelf / "bwrap",
        'for word; do shift; [ "$word" = --unshare-ipc ] || set -- "$@" "$word"; done\n'
        f'exec {shutil.which("bwrap")} "$@"',
    )
    refused, _ = _choose(shelf)
    assert "ipcns=False" in refused


def _make_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _choose(shelf: Path) -> tuple[str, str]:
    """Return the answers for level namespace and rlimit of a process with only that shelf on its PATH."""
    env = {"PATH": str(shelf), "PYTHONPATH": SOURCE_DIR}
    ended = subprocess.run(
        [sys.executable, "-c", CHOOSE], env=env, capture_output=True, text=True, check=True
    )
    first, second = ended.stdout.splitlines()
    return first, second


STARVE = """
import asyncio, os, resource
from strop.errors import SandboxRefused
from strop.sandbox import SandboxSpec, local, make_backend
async def main():
    # Loaded before nothing can be opened any more.
    backend = make_backend("process")
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    try:
        await backend.create(SandboxSpec())
    except SandboxRefused as refusal:
        print(refusal.kind, refusal)
asyncio.run(main())
"""


def test_a_host_without_descriptors_is_told() -> None:
    env = {"PYTHONPATH": SOURCE_DIR}
    ended = subprocess.run(
        [sys.executable, "-c", STARVE], env=env, capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("host ")


@needs_bubblewrap
def test_only_declared_paths_are_there_and_those_declared_writable_are(tmp_path: Path) -> None:
    for name in ("given", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    (tmp_path / "given/file").write_text("seen\n")
    mounts = (
        Mount(host_path=str(tmp_path / "given"), inside_path="/data"),
        Mount(host_path=str(tmp_path / "out"), inside_path="/out", read_only=False),
    )

    async def work(sandbox: ServedSandbox) -> None:
        script = "cat /data/file; echo x > /data/file; echo made > /out/file; ls /"
        result = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)
        prefix_tops = {sandbox.python_argv[0].split("/")[1]}
        seen, *names = result.stdout.decode().split()
        usual = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "proc", "dev", "tmp"} | {
            "data",
            "out",
        }
        assert seen == "seen"
        assert set(names) - usual <= prefix_tops | {"root", "home", "opt"}
        etc = await sandbox.exec(["/bin/ls", "-A", "/etc"], wall_limit_s=60)
        assert set(etc.stdout.decode().split()) <= {"ld.so.cache", "alternatives"}

    in_sandbox("bubblewrap", work, mounts=mounts)
    assert (tmp_path / "given/file").read_text() == "seen\n"
    assert (tmp_path / "out/file").read_text() == "made\n"


@where_users_differ
async def test_what_was_reached_is_recorded(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        reached = sandbox.isolation
        assert reached.backend == backend
        assert reached.network == ("host" if backend == "process" else "none")
        assert reached.no_new_privs
        assert reached.caps.startswith("0/")
        assert reached.host_uid != 0
        assert Guard.NONE not in (reached.memory, reached.pids, reached.disk, reached.files)
        if backend == "process":
            assert reached.level is IsolationLevel.RLIMIT
            assert not (reached.pidns)
            assert not (reached.netns)
            assert not (reached.userns)
        else:
            is_container = backend == "podman"
            assert reached.level is (IsolationLevel.CONTAINER if is_container else IsolationLevel.NAMESPACE)
            assert reached.userns is not is_container
            assert reached.pidns
            assert reached.mountns
            assert reached.netns
            assert not reached.nested_userns
            assert reached.host_root_maps_to == ("0" if is_container else "unmapped")
            assert (reached.pids, reached.disk) == (Guard.ENFORCED, Guard.ENFORCED)


__all__ = ["run"]


@needs_bubblewrap
def test_what_it_says_of_a_backend_is_what_its_sandboxes_reach(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TIMES", 1)
    # Engines, which are slow, have a test of their own.
    monkeypatch.setattr(doctor, "BACKENDS", ("bubblewrap", "process"))
    diagnosis = json.loads(run("doctor", "--sandboxes", "--json").out)
    by_name = {one["name"]: one for one in diagnosis["backends"]}
    for name, level in (("bubblewrap", IsolationLevel.NAMESPACE), ("process", IsolationLevel.RLIMIT)):
        assert by_name[name]["isolation"]["level"] == level
        assert by_name[name]["has_list"] is (name == "bubblewrap")
        assert by_name[name]["start_s"] > 0.0
        assert by_name[name]["command_s"] > 0.0
        assert by_name[name]["broken"] == []
    assert by_name["bubblewrap"]["not_held"] == []
    assert {"processes", "network"} <= set(by_name["process"]["not_held"])
    assert diagnosis["facts"]["bwrap"].startswith("bubblewrap ")
    monkeypatch.setattr(doctor, "BACKENDS", ("bubblewrap",))
    shown = run("doctor", "--sandboxes")
    assert shown.code == 0
    assert "namespace" in shown.out
    assert "control groups" in shown.out


@on_every_engine
def test_an_engine_reaches_a_container(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", (backend,))
    (report,) = asyncio.run(diagnose_sandboxes()).backends
    assert report.isolation is not None, report.refusal
    assert report.isolation.level is IsolationLevel.CONTAINER
    assert report.not_held == ()


def test_a_host_without_programs_is_told_what_would_give_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "find_controllers", list)
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\necho 'the storage is locked' >&2\nexit 125\n")
    program.chmod(0o755)
    diagnosis = asyncio.run(diagnose_sandboxes())
    bubblewrap, podman, docker, process = diagnosis.backends
    assert bubblewrap.isolation is podman.isolation is docker.isolation is None
    assert process.isolation is not None
    assert "program bwrap was not found" in bubblewrap.refusal
    assert "program docker was not found" in docker.refusal
    assert ("the storage is locked" if os.geteuid() == 0 else "newuidmap is not installed") in podman.refusal
    assert diagnosis.facts["bwrap"] == "missing"
    assert "the storage is locked" in diagnosis.facts["podman"]
    assert any("bubblewrap isolates quickest" in one for one in diagnosis.advice)
    assert any("Delegate=yes" in one for one in diagnosis.advice)


def test_a_probe_that_a_record_promises_to_hold_fails_the_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", ("process",))
    monkeypatch.setattr(doctor, "_TIMES", 1)
    names = ("processes", "files", "network", "forks", "survivors")
    monkeypatch.setattr(doctor, "_promises", lambda _: dict.fromkeys(names, True))
    ended = run("doctor", "--sandboxes", "--json")
    (report,) = json.loads(ended.out)["backends"]
    assert {"processes", "network"} <= set(report["broken"]) < set(names)
    assert report["broken"] == report["not_held"]
    assert ended.code == 1


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("/proc/sys/user/max_user_namespaces", "0\n", "restricted: /proc/sys/user/max_user_namespaces is 0"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1\n",
            "restricted: /proc/sys/kernel/apparmor_restrict_unprivileged_userns is 1",
        ),
    ],
)
def test_what_the_kernel_restricts_is_named(
    path: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "read_or_empty", lambda asked: text if asked == path else "")
    assert read_facts()["user namespaces"] == said


async def test_sandboxes_of_a_run_on_ray_are_refused_without_it() -> None:
    task: Any = None
    held = hold_judge(ProgramSpec(name="mbpp", source="rows", sandbox="ray"), task)
    for made in (choose_backend("ray"), held.__aenter__()):
        with pytest.raises(ConfigError, match="sandbox=ray"):
            await made
