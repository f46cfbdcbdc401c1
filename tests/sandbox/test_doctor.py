"""What a host allows is tried, and what would give more is said."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from strop.sandbox import IsolationLevel, doctor
from strop.sandbox.doctor import diagnose_sandboxes, read_facts
from tests.fixtures.commands import Run, run
from tests.fixtures.sandboxes import needs_bubblewrap, on_every_engine

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
    assert diagnosis.facts["podman"] == "the storage is locked"
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


def test_a_docker_without_a_daemon_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "BACKENDS", ("docker",))
    docker = tmp_path / "docker"
    docker.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo Docker version 20 && exit\n"
        "echo Cannot connect to the Docker daemon >&2; exit 1\n"
    )
    docker.chmod(0o755)
    diagnosis = asyncio.run(diagnose_sandboxes())
    assert diagnosis.backends[0].isolation is None
    assert "Cannot connect to the Docker daemon" in diagnosis.backends[0].refusal
    assert diagnosis.facts["docker daemon"] == "Cannot connect to the Docker daemon"
    assert any("group docker are root" in one for one in diagnosis.advice)


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("/proc/sys/user/max_user_namespaces", "0\n", "restricted: /proc/sys/user/max_user_namespaces is 0"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1\n",
            "restricted: /proc/sys/kernel/apparmor_restrict_unprivileged_userns is 1",
        ),
        ("/etc/subuid", "root:100000:65536\nother:1:2\nbroken\n", "allowed"),
    ],
)
def test_what_the_kernel_restricts_is_named(
    path: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "read_or_empty", lambda asked: text if asked == path else "")
    facts = read_facts()
    assert facts["user namespaces"] == said
    if path == "/etc/subuid" and os.geteuid() == 0:
        assert facts["subordinate ids"] == "65,536"
