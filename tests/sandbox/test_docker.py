"""What docker does otherwise than podman: roots that are exchanged, images that are lent, what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import SandboxRefused
from strop.sandbox import IsolationLevel, Mount, SandboxSpec, make_backend
from strop.sandbox.docker import _find_process, _own_image, _pack
from strop.sandbox.engine import Engine, require_engine
from strop.sandbox.family import find_descendants
from strop.sandbox.janitor import clear_abandoned
from strop.sandbox.local import LocalSandbox
from strop.sandbox.served import ServedSandbox
from tests.fixtures.docker_daemon import docker
from tests.fixtures.sandboxes import SOURCE_DIR, in_sandbox, spec_of

CLIENT = """
import asyncio, sys
from strop.sandbox import SandboxSpec, make_backend
async def main():
    async with await make_backend("docker").create(SandboxSpec(image=sys.argv[1])) as sandbox:
        print(sandbox.supervisor_pid, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


async def say(sandbox: ServedSandbox, script: str) -> str:
    done = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)
    return (done.stdout + done.stderr).decode()


def names() -> list[str]:
    return docker("ps", "--all", "--format", "{{.Names}}").split()


@pytest.mark.slow
@pytest.mark.docker
def test_a_root_has_its_mounts_and_nothing_of_dockers_own(tmp_path: Path) -> None:
    for name in ("read", "written"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        (tmp_path / name).chmod(0o777)
        (tmp_path / name / "file").chmod(0o666)
    mounts = (
        Mount(host_path=str(tmp_path / "read"), inside_path="/data/deep"),
        Mount(host_path=str(tmp_path / "read" / "file"), inside_path="/data/file"),
        Mount(host_path=str(tmp_path / "written"), inside_path="/written", read_only=False),
    )

    async def work(sandbox: ServedSandbox) -> None:
        assert await say(sandbox, "cat /data/deep/file /data/file /written/file") == "readreadwritten"
        assert "Read-only file system" in await say(sandbox, "echo x > /data/deep/new")
        assert "Read-only file system" in await say(sandbox, "echo x > /data/file")
        output = await say(sandbox, "echo x > /written/new; ls /new /.strop-init 2>&1 | grep -c 'No such'")
        assert output == "2\n"
        # One root, which is the overlay; and of docker's what hides parts of /proc and /sys.
        assert await say(sandbox, "grep -c ' / ' /proc/mounts; ls /sys/firmware; cat /proc/keys") == "1\n"
        assert "No such file" in await say(sandbox, "cat /etc/resolv.conf /etc/hosts")

    in_sandbox("docker", work, mounts=mounts)
    assert (tmp_path / "written" / "new").read_text() == "x\n"


@pytest.mark.slow
@pytest.mark.docker
async def test_with_the_hosts_network_names_are_found() -> None:
    async with await make_backend("docker").create(replace(spec_of(), network="host")) as sandbox:
        assert sandbox.isolation.network == "host"
        assert "localhost" in await say(sandbox, "cat /etc/hosts")
        assert "No such file" not in await say(sandbox, "cat /etc/resolv.conf")


@pytest.mark.slow
@pytest.mark.docker
async def test_whoever_tidies_images_up_stops_no_later_sandbox() -> None:
    backend = make_backend("docker")
    for _ in range(2):
        async with await backend.create(SandboxSpec(min_level=IsolationLevel.CONTAINER)):
            pass
        docker("rmi", "--force", _own_image()[0])


@pytest.mark.slow
@pytest.mark.docker
def test_the_death_of_a_supervisor_and_of_all_leaves_no_container(tmp_path: Path) -> None:
    image = "localhost/strop-test-docker-left"
    docker("import", "-", image, stdin=_pack({"/bin/": b"", "/etc/": b""}))

    async def killed(sandbox: ServedSandbox) -> str:
        assert isinstance(sandbox, LocalSandbox)
        (name,) = (name for name in names() if name.endswith(f"-{sandbox.supervisor_pid}"))
        os.kill(sandbox.supervisor_pid, signal.SIGKILL)
        assert await sandbox.wait_lost() == "infra"
        return name

    name = in_sandbox("docker", killed)
    deadline = time.monotonic() + 300.0
    while name in names():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Client, daemon and supervisor together, with what lends them the image.
    environ = {**os.environ, "PYTHONPATH": SOURCE_DIR}
    client = subprocess.Popen([sys.executable, "-c", CLIENT, image], stdout=subprocess.PIPE, env=environ)
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    (folder,) = (container.removesuffix(f"-{pid}") for container in names() if container.endswith(f"-{pid}"))
    assert {f"{folder}-{pid}", f"{folder}-image-0"} <= set(names())
    pids = [client.pid, *find_descendants(client.pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in pids:
            os.kill(each, number)
    client.wait()
    client.stdout.close()
    deadline = time.monotonic() + 300.0
    while any(entry.startswith(folder) for entry in names()):
        clear_abandoned()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    docker("rmi", image)


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


def test_a_daemon_of_another_machine_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "docker"
    # As a daemon in a virtual machine would say it.
    program.write_text(f"#!/bin/sh\necho 1234567890abcdef {os.getpid()}\n")
    program.chmod(0o755)
    engine = Engine(name="docker", program=str(program), environ=os.environ)
    with pytest.raises(OSError, match="not processes of this machine"):
        _find_process(engine, "any")
