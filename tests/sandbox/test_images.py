"""Containers of images: from podman's store or a directory, without a shell, and what is refused."""

from __future__ import annotations

import asyncio
import io
import platform
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import SandboxError, SandboxRefused
from strop.sandbox import ExecKind, IsolationLevel, Limits, make_backend
from strop.sandbox.engine import require_local
from strop.sandbox.linux import read_file
from strop.sandbox.podman import make_init
from strop.sandbox.served import ServedSandbox
from tests.fixtures.docker_daemon import docker
from tests.fixtures.sandboxes import needs_podman, on_every_engine, spec_of

PROGRAM = r"""
#include <stdio.h>
int main(int argc, char **argv) {
    FILE *file = fopen("/etc/word", "r+");
    if (!file) { file = fopen("/etc/word", "r"); }
    char word[64] = "";
    if (file) { fgets(word, sizeof word, file); }
    printf("%s of %s", argv[0], word);
    return argc;
}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root that has one program, and no shell, no libc and no /tmp."""
    root = tmp_path_factory.mktemp("image") / "root"
    for name in ("bin", "etc"):
        (root / name).mkdir(parents=True)
    (root / "etc" / "word").write_text("the image")
    words = ["cc", "-static", "-x", "c", "-", "-o", str(root / "bin" / "tell")]
    subprocess.run(words, input=PROGRAM, text=True, check=True)
    # Others enter it as they would enter an image's.
    for path in (root, *root.parents):
        if path.stat().st_mode & 0o001 == 0 and path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    return root


@pytest.fixture(scope="module")
def image(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same as an image of podman's."""
    name = f"localhost/strop-test-{uuid.uuid4().hex[:8]}"
    archive = tmp_path_factory.mktemp("archive") / "root.tar"
    with tarfile.open(archive, "w") as file:
        file.add(tree, arcname=".")
    subprocess.run(["podman", "import", "--quiet", archive, name], check=True, capture_output=True)
    yield name
    subprocess.run(["podman", "image", "unmount", name], check=False, capture_output=True)
    subprocess.run(["podman", "rmi", "--force", name], check=True, capture_output=True)


@pytest.fixture(scope="module")
def docker_image(docker_daemon: None, tree: Path) -> Iterator[str]:
    """The same as an image of docker's."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        file.add(tree, arcname=".")
    name = f"localhost/strop-test-{uuid.uuid4().hex[:8]}"
    docker("import", "-", name, stdin=packed.getvalue())
    yield name
    docker("rmi", "--force", name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param("podman", "image", marks=needs_podman),
        pytest.param("podman", "tree", marks=needs_podman),
        pytest.param("docker", "docker_image", marks=pytest.mark.docker),
    ],
)
def test_an_image_needs_nothing_but_its_program(
    backend: str, kind: str, request: pytest.FixtureRequest, tree: Path
) -> None:
    spec = replace(spec_of(Limits(cpus=0.5)), image=str(request.getfixturevalue(kind)))
    spec = replace(spec, min_level=IsolationLevel.CONTAINER, files={"/tmp/given": b"a word"})

    async def work(sandbox: ServedSandbox) -> None:
        assert sandbox.isolation.level is IsolationLevel.CONTAINER
        assert sandbox.isolation.cpu.value == "enforced"
        result = await sandbox.exec(["/bin/tell", "x"], wall_limit_s=60)
        assert (result.exit_code, result.stdout) == (2, b"/bin/tell of the image")
        assert (await sandbox.exec(["/bin/sh"], wall_limit_s=60)).kind is ExecKind.NOT_STARTED
        with pytest.raises(SandboxRefused, match="no Python can be started"):
            _ = sandbox.python_argv
        with pytest.raises(SandboxError, match="no shell answers") as caught:
            await sandbox.open_shell()
        assert caught.value.kind == "shell"
        # What is read and written is the container's; the image stays as it is.
        assert await sandbox.read("/tmp/given") == b"a word"
        await sandbox.write("/tmp/word", b"other")
        assert await sandbox.read("/etc/word") == b"the image"

    async def act() -> None:
        async with await make_backend(backend).create(spec) as sandbox:
            await work(sandbox)

    asyncio.run(act())
    assert sorted(path.name for path in tree.iterdir()) == ["bin", "etc"]


@pytest.mark.slow
@needs_podman
def test_an_image_for_another_machine_is_refused(tree: Path) -> None:
    other = {"x86_64": "arm64"}.get(platform.machine(), "amd64")
    name = f"localhost/strop-test-{uuid.uuid4().hex[:8]}"
    archive = tree.parent / "other.tar"
    with tarfile.open(archive, "w") as file:
        file.add(tree / "etc", arcname="etc")
    words = ["podman", "import", "--quiet", "--arch", other, str(archive), name]
    subprocess.run(words, check=True, capture_output=True)
    try:
        with pytest.raises(SandboxRefused, match=f"is for {other}") as caught:
            asyncio.run(make_backend("podman").create(replace(spec_of(), image=name)))
        assert caught.value.kind == "architecture"
    finally:
        subprocess.run(["podman", "rmi", "--force", name], check=True, capture_output=True)


def test_containers_on_a_shared_disk_are_refused(tmp_path: Path) -> None:
    mounts = f"32 24 0:28 / {tmp_path} rw - nfs4 server:/export rw\n"
    with pytest.raises(SandboxRefused, match="nfs4, over the network") as caught:
        require_local(tmp_path / "storage", mounts=mounts)
    assert caught.value.kind == "graph_root"
    require_local(tmp_path, mounts=mounts.replace("nfs4", "ext4"))


@on_every_engine
def test_what_is_no_image_is_refused(backend: str, tmp_path: Path) -> None:
    unknown = "image not known" if backend == "podman" else "[Nn]o such image"
    for name, message in (("localhost/none", unknown), (str(tmp_path / "none"), "No such file")):
        with pytest.raises(SandboxRefused, match=message) as caught:
            asyncio.run(make_backend(backend).create(replace(spec_of(), image=name)))
        assert caught.value.kind == "image"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_process_1_waits_and_reaps(machine: str, tmp_path: Path) -> None:
    """Here by itself, or by an emulator, whose processes the kernel shows alike."""
    program = tmp_path / "init"
    program.write_bytes(make_init(machine))
    program.chmod(0o755)
    emulator = [] if machine == platform.machine() else [f"qemu-{machine}-static"]
    try:
        child = subprocess.Popen([*emulator, program])
    except FileNotFoundError:
        pytest.skip(f"{emulator[0]} is missing")
    try:
        deadline = time.monotonic() + 60
        while not _ignores_children(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _ignores_children(child.pid)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    with pytest.raises(OSError, match="no process 1 for riscv64"):
        make_init("riscv64")


def _ignores_children(pid: int) -> bool:
    lines = read_file(f"/proc/{pid}/status").splitlines()
    ignored = next(line for line in lines if line.startswith("SigIgn"))
    return bool(int(ignored.split()[1], 16) & 1 << 16)
