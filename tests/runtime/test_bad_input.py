"""What a host or an image gets wrong is a failure with its owner, and a code, and no result of a command."""

from __future__ import annotations

import asyncio
import platform
from functools import partial
from pathlib import Path

import httpx
import pytest

from strop.errors import SandboxRefused
from strop.runtime import host as of_hosts
from strop.runtime.contract import FailureKind, State
from strop.runtime.held import as_failure
from strop.runtime.planes import DataPlane
from strop.sandbox import engine
from strop.sandbox.idmap import NUM_IDS
from strop.sandbox.linux import detach_mount, mount_overlay
from strop.sandbox.podman import make_init
from tests.fixtures.hosts import SLOT, Orders, Workspace, host_of, workspace_at
from tests.fixtures.sandboxes import IS_ROOT, needs_podman

OTHER_MACHINE = "aarch64" if platform.machine() == "x86_64" else "x86_64"


def make_tree(top: Path, *, has_shell: bool) -> Path:
    """Make the tree of an image; its shell, if it has one, is a program for another machine."""
    for name in ("bin", "tmp"):
        (top / name).mkdir(parents=True)
    if has_shell:
        shell = top / "bin" / "sh"
        shell.write_bytes(make_init(OTHER_MACHINE))
        shell.chmod(0o755)
    # Others enter it as they would enter an image's.
    for path in (top, *top.parents):
        if path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    return top


@pytest.mark.slow
@needs_podman
@pytest.mark.skipif(
    Path(f"/proc/sys/fs/binfmt_misc/qemu-{OTHER_MACHINE}").exists(), reason="this kernel emulates the other"
)
@pytest.mark.parametrize(("has_shell", "why"), [(False, "No such file"), (True, "Exec format error")])
async def test_a_shell_that_does_not_start_is_no_result(has_shell: bool, why: str, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", has_shell=has_shell)

    async with host_of("podman", data_plane=DataPlane.AUTO, image_dirs=(str(tmp_path),)) as orders:
        url = await orders.start("r1", image=str(tree))
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            for answer in await ask_both(workspace, "true"):
                assert answer.status_code == 501, answer.text
                assert "no shell of the image starts" in answer.json()["detail"]
                assert why in answer.json()["detail"]
            # Files need none.
            upload = await workspace.client.post(
                "/api/file/upload", params={"path": "/tmp/x"}, files={"file": ("x", b"x")}
            )
            assert upload.json() == {"success": True, "file_size": 1}
        await orders.start("r2", image=str(tree), command=("/bin/sh", "-c", "true"))
        failed = await orders.wait_for("r2", State.FAILED)
        assert failed.failure_kind is FailureKind.IMAGE_ERROR
        assert why in failed.cause


@pytest.mark.slow
@needs_podman
def test_who_programs_are_is_a_hint(tmp_path: Path) -> None:
    """Programs are the user that is asked for where the host can give it; else one that nobody else is."""

    async def work() -> None:
        async with host_of("podman", image_dirs=(str(tmp_path),)) as orders:
            await look(orders)

    async def look(orders: Orders) -> None:
        for index, (user, image) in enumerate(((10001, "host"), (70_000, "host"), (10001, str(merged)))):
            url = await orders.start(f"r{index}", run_as_user=user, image=image)
            ready = await orders.wait_for(f"r{index}", State.READY, State.FAILED)
            assert ready.state is State.READY, ready.cause
            async with workspace_at(url) as workspace:
                result = await workspace.run("id -u; echo x > /workspace/x")
            own = ready.isolation["host_uid"]
            has_own = user >= NUM_IDS or not ready.isolation["userns"]
            assert result == (0, f"{own if has_own else user}\n", "")
            assert own != user
            assert has_own is (index > 0)
            await orders.host.stop(f"r{index}", "it is asked for")

    # The kernel does not show one overlay to other users.
    merged = tmp_path / "merged"
    parts = [tmp_path / name for name in ("upper", "work", "merged")]
    for path in parts:
        path.mkdir()
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    mount_overlay("/", *map(str, parts))
    try:
        asyncio.run(work())
    finally:
        detach_mount(str(merged))


async def ask_both(workspace: Workspace, command: str) -> list[httpx.Response]:
    """Run a command in both ways that clients have; return the answers that should tell its end."""
    body = {"command": command, "timeout": 20}
    at_once = await workspace.client.post("/api/bash/execute_bash_command", json=body)
    started = await workspace.client.post("/api/bash/start_bash_command", json=body)
    query = {"command_id__eq": started.json()["id"], "sort_order": "TIMESTAMP"}
    return [at_once, await workspace.client.get("/api/bash/bash_events/search", params=query)]


def test_a_refusal_has_an_owner() -> None:
    """Whether an image is to blame that no sandbox was made, or the machine."""
    owners = {
        FailureKind.IMAGE_ERROR: ("image", "architecture", "interpreter"),
        FailureKind.INFRA_LOST: ("graph_root", "subuid", "newuidmap", "level", "host", "podman", "no_space"),
    }
    for owner, kinds in owners.items():
        for kind in kinds:
            failure = as_failure(SandboxRefused("it is so", kind=kind))
            assert (failure.kind, failure.refusal) == (owner, kind)


@pytest.mark.skipif(not IS_ROOT, reason="podman of an ordinary user is asked for more than its graph root")
def test_a_node_does_without_an_engine_on_a_shared_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "podman"
    program.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    mounts = f"32 24 0:28 / {tmp_path} rw - nfs4 server:/export rw\n"
    monkeypatch.setattr(engine, "require_local", partial(engine.require_local, mounts=mounts))
    monkeypatch.setattr(of_hosts, "BACKENDS", ("podman", "process"))
    lines: list[str] = []
    assert asyncio.run(of_hosts.find_backends((), lines.append)) == ("process",)
    (line,) = lines
    assert "no sandboxes by podman" in line
    assert "on a disk that machines share" in line
    assert f"nfs4, over the network, mounted at {tmp_path}" in line
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(of_hosts.find_backends(("podman",), lines.append))
    assert caught.value.kind == "graph_root"


async def test_a_full_disk_of_a_sandbox_takes_no_upload() -> None:
    async with host_of("process") as orders:
        url = await orders.start("r1", SLOT.model_copy(update={"disk_bytes": 1 << 20}))
        ready = await orders.wait_for("r1", State.READY)
        if ready.isolation["disk"] != "enforced":
            pytest.skip("the private directory is watched, not bounded")
        async with workspace_at(url) as workspace:
            top = (await workspace.run("echo $HOME"))[1].strip()
            for name, status in (("kept", 200), ("more", 507)):
                answer = await workspace.client.post(
                    "/api/file/upload",
                    params={"path": f"{top}/{name}"},
                    files={"file": ("x", bytes(700_000))},
                )
                assert answer.status_code == status, answer.text
            assert (await workspace.run("ls -A ~"))[1] == "kept\n"


async def test_a_gigabyte_of_output_is_bounded_and_its_exit_code_true() -> None:
    async with host_of("process") as orders:
        url = await orders.start("r1")
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            code, out, _ = await workspace.run("head -c 1000000000 /dev/zero; exit 3", limit_s=600)
        assert code == 3
        assert len(out) < 32 << 20
        assert "bytes are not kept" in out or "bytes left out" in out
