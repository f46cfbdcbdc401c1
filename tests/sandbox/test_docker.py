"""What docker does otherwise than podman, and engines that make no sandboxes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import SandboxRefused
from strop.sandbox import IsolationLevel, Mount, SandboxSpec, make_backend
from strop.sandbox.container import _SKELETON, require_engine
from strop.sandbox.local import LocalSandbox
from strop.sandbox.served import ServedSandbox
from tests.fixtures.docker_daemon import docker
from tests.fixtures.sandboxes import in_sandbox, spec_of


async def say(sandbox: ServedSandbox, script: str) -> str:
    return (await sandbox.exec(["/bin/sh", "-c", f"({script}) 2>&1"], wall_limit_s=60)).stdout.decode()


@pytest.mark.slow
@pytest.mark.docker
def test_a_root_has_its_mounts(tmp_path: Path) -> None:
    for name in ("read", "written"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        (tmp_path / name).chmod(0o777)
    mounts = (
        Mount(host_path=str(tmp_path / "read"), inside_path="/data"),
        Mount(host_path=str(tmp_path / "written"), inside_path="/written", read_only=False),
    )

    async def work(sandbox: ServedSandbox) -> None:
        assert await say(sandbox, "cat /data/file /written/file") == "readwritten"
        assert "Read-only file system" in await say(sandbox, "echo x > /data/new")
        assert "Read-only file system" in await say(sandbox, "echo x > /new")
        assert await say(sandbox, "echo x > /written/new; ls /sys/firmware; cat /proc/keys") == ""

    in_sandbox("docker", work, mounts=mounts)
    assert (tmp_path / "written" / "new").read_text() == "x\n"


@pytest.mark.slow
@pytest.mark.docker
async def test_with_the_hosts_network_names_are_found() -> None:
    async with await make_backend("docker").create(replace(spec_of(), network="host")) as sandbox:
        assert "localhost" in await say(sandbox, "cat /etc/hosts")


@pytest.mark.slow
@pytest.mark.docker
async def test_whoever_tidies_images_up_stops_no_later_sandbox() -> None:
    backend = make_backend("docker")
    for _ in range(2):
        async with await backend.create(SandboxSpec(min_level=IsolationLevel.CONTAINER)):
            pass
        docker("rmi", "--force", _SKELETON)


@pytest.mark.slow
@pytest.mark.docker
def test_the_death_of_an_agent_leaves_no_container() -> None:
    async def killed(sandbox: ServedSandbox) -> None:
        assert isinstance(sandbox, LocalSandbox)
        os.kill(sandbox.supervisor_pid, signal.SIGKILL)
        assert await sandbox.wait_lost() == "infra"

    in_sandbox("docker", killed)
    deadline = time.monotonic() + 100.0
    while "strop-sandbox-" in docker("ps", "--all", "--format", "{{.Names}}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.docker
async def test_the_root_of_an_image_is_the_hosts_and_so_recorded() -> None:
    with pytest.raises(SandboxRefused) as refused:
        await make_backend("docker").create(SandboxSpec(user=0))
    assert refused.value.kind == "level"
    spec = SandboxSpec(user=0, min_level=IsolationLevel.NONE)
    async with await make_backend("docker").create(spec) as sandbox:
        assert (sandbox.isolation.host_uid, sandbox.isolation.level) == (0, IsolationLevel.NONE)


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("docker", "echo permission denied while trying to connect >&2; exit 1", "permission denied"),
        ("docker", "echo null", "docker"),
        # Asked by an ordinary user.
        ("docker", "echo '[]'", "this process to an ordinary user"),
        ("docker", 'echo \'["name=seccomp", "name=rootless"]\'', "ordinary user"),
        ("docker", "echo '[\"name=userns\"]'", "userns-remap"),
        ("podman", "echo cannot find subuid ranges >&2; exit 125", "cannot find subuid ranges"),
        ("podman", None, "No such file"),
    ],
)
def test_an_engine_that_makes_no_sandboxes_is_refused(
    name: str, said: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "this process" in why:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    program = tmp_path / name
    if said is not None:
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o755)
    with pytest.raises(SandboxRefused, match=why) as caught:
        require_engine(name, str(program))
    assert caught.value.kind == name
