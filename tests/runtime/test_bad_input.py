"""What a host or an image gets wrong is a failure with its owner, and a code, and no result of a command."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.errors import SandboxRefused
from strop.runtime import host as of_hosts
from strop.runtime.contract import Options, State
from strop.runtime.host import LocalHost
from strop.sandbox import choose
from strop.sandbox.ground import NUM_IDS
from tests.fixtures.hosts import host_of, workspace_at
from tests.fixtures.sandboxes import IS_ROOT, make_foreign_program, needs_podman
from tests.fixtures.small_root import imported

OTHER_MACHINE = "aarch64" if platform.machine() == "x86_64" else "x86_64"


def make_tree(top: Path, *, has_shell: bool) -> Path:
    """Make the tree of an image; its shell, if it has one, is a program for another machine."""
    for name in ("bin", "tmp"):
        (top / name).mkdir(parents=True)
    if has_shell:
        shell = top / "bin" / "sh"
        shell.write_bytes(make_foreign_program())
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
async def test_a_command_that_does_not_start_is_the_images_error(
    has_shell: bool, why: str, tmp_path: Path
) -> None:
    tree = make_tree(tmp_path / "tree", has_shell=has_shell)

    with imported(tree) as image:
        await require_not_started(image, why)


async def require_not_started(image: str, why: str) -> None:
    async with host_of("podman") as orders:
        await orders.start("r1", image=image, command=("/bin/sh", "-c", "true"))
        failed = await orders.wait_for("r1", State.FAILED)
        assert failed["failure_kind"] == "image_error"
        assert why in failed["cause"]


@pytest.mark.slow
@needs_podman
async def test_who_programs_are_is_a_hint() -> None:
    """Programs are the user that is asked for where the host can give it; else one that nobody else is."""
    async with host_of("podman") as orders:
        for user in (10001, 70_000):
            url = await orders.start(f"r{user}", run_as_user=user)
            ready = await orders.wait_for(f"r{user}", State.READY, State.FAILED)
            assert ready["status"] == "running", ready["cause"]
            async with workspace_at(url) as workspace:
                result = await workspace.run("id -u; echo x > /workspace/x")
            own = ready["isolation"]["host_uid"]
            has_own = user >= NUM_IDS or not ready["isolation"]["userns"]
            assert result == (0, f"{own if has_own else user}\n")
            assert own != user
            assert has_own is (user >= NUM_IDS)
            await orders.stop(f"r{user}")


async def test_a_refusal_has_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an image is to blame that no sandbox was made, or the machine."""
    owners = {
        "image_error": ("image", "architecture", "interpreter"),
        "infra_lost": (
            "registry",
            "graph_root",
            "subuid",
            "newuidmap",
            "level",
            "host",
            "podman",
            "no_space",
        ),
    }
    async with host_of("process") as orders:
        for owner, kinds in owners.items():
            for kind in kinds:

                async def refuse(*_: object, kind: str = kind) -> None:
                    raise SandboxRefused("it is so", kind=kind)

                monkeypatch.setattr(LocalHost, "make", refuse)
                await orders.start(kind)
                assert (await orders.wait_for(kind, State.FAILED))["failure_kind"] == owner


@pytest.mark.skipif(not IS_ROOT, reason="podman of an ordinary user is asked for more than its graph root")
def test_a_node_does_without_an_engine_on_a_shared_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "podman"
    program.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    shared = SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [shared])
    monkeypatch.setattr(of_hosts, "BACKENDS", ("podman", "process"))
    monkeypatch.setattr(of_hosts, "ENGINES", ("podman",))
    monkeypatch.setattr(choose, "_tried", {})

    async def ask() -> None:
        async with host_of() as orders:
            await orders.start("plain")
            await orders.wait_for("plain", State.READY)
            await orders.start("image", image="img")
            failed = await orders.wait_for("image", State.FAILED)
            assert failed["failure_kind"] == "image_error"
            assert f"nfs4, over the network, mounted at {tmp_path}" in failed["cause"]

    asyncio.run(ask())
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(LocalHost(Options(folder=tmp_path, backends=("podman",))).open())
    assert caught.value.kind == "graph_root"
