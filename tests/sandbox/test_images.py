"""Containers of images: from podman's store or a directory, without a shell, and what is refused."""

from __future__ import annotations

import asyncio
import io
import os
import platform
import subprocess
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import SandboxError, SandboxRefused
from strop.sandbox import ExecKind, IsolationLevel, Limits, make_backend
from strop.sandbox.ground import NUM_IDS
from strop.sandbox.served import ServedSandbox
from tests.fixtures.docker_daemon import docker
from tests.fixtures.sandboxes import (
    appearance_of,
    needs_podman,
    on_every_backend,
    say,
    spec_of,
)
from tests.fixtures.small_root import imported

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


@asynccontextmanager
async def user_sandbox(user: int, image: str | None = None) -> AsyncIterator[ServedSandbox]:
    spec = replace(spec_of(), user=user, image=image, min_level=IsolationLevel.CONTAINER)
    async with await make_backend("podman").create(spec) as sandbox:
        yield sandbox


@needs_podman
@pytest.mark.slow
async def test_root_inside_has_its_container_and_is_nobody_outside() -> None:
    async with user_sandbox(0) as sandbox:
        reached = sandbox.isolation
        assert reached.userns
        assert reached.host_root_maps_to == "unmapped"
        assert reached.host_uid >= 0x70000000
        assert reached.caps == "800404db/800404db"
        # The work of an installer: anywhere, for others, as others.
        output = await say(sandbox, "id -u; echo x > /new; chown 33:44 /new; stat -c %u:%g / /tmp /new")
        assert output == "0\n0:0\n0:0\n33:44\n"
        switched = "setpriv --reuid 33 --regid 44 --clear-groups id -u"
        assert await say(sandbox, switched) == "33\n"
        await sandbox.write("/root-file", b"x")
        assert await say(sandbox, "stat -c %u /root-file") == "0\n"
        # Seen from the host.
        job = await sandbox.start(["/bin/sleep", "7901"])
        (pid,) = await appearance_of("7901")
        assert os.stat(f"/proc/{pid}").st_uid == reached.host_uid
        await job.stop()


@needs_podman
@pytest.mark.slow
async def test_root_inside_has_no_way_further() -> None:
    async with user_sandbox(0) as sandbox:
        attempts = (
            "mount -t tmpfs none /tmp",
            "unshare -U true",
            "unshare -m true",
            "mknod /tmp/disk b 8 0",
            "hostname other",
            "cat /proc/$PPID/environ",
            "echo 1 > /proc/sys/kernel/panic",
            "setpriv --reuid 70000 true",
            "nice -n -5 sh -c '[ $(nice) = -5 ]'",
        )
        for attempt in attempts:
            result = await sandbox.exec(["/bin/sh", "-c", attempt], wall_limit_s=60)
            assert result.kind is ExecKind.EXITED, (attempt, result)
            assert result.exit_code, attempt
        assert await say(sandbox, "echo lives") == "lives\n"


@needs_podman
@pytest.mark.slow
def test_files_of_a_tree_belong_to_its_users_and_stay_as_they_are(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    # Its programs are bound from this host, so that the tree needs no copy of them.
    for name in ("etc", "home", "tmp"):
        (tree / name).mkdir(parents=True)
    for number, name in ((0, "of_root"), (1000, "of_user")):
        (tree / "etc" / name).write_text(name)
        (tree / "etc" / name).chmod(0o600)
        os.chown(tree / "etc" / name, number, number)
    for path in (tree, *tree.parents):
        if path.stat().st_mode & 0o001 == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)

    async def look(image: str) -> None:
        async with user_sandbox(0, image) as sandbox:
            assert await sandbox.read("/etc/of_root") == b"of_root"
            await sandbox.write("/etc/of_root", b"changed", mode=0o600)
        async with user_sandbox(1000, image) as sandbox:
            assert sandbox.isolation.caps == "0/0"
            assert await sandbox.read("/etc/of_user") == b"of_user"
            with pytest.raises(SandboxError) as caught:
                await sandbox.read("/etc/of_root")
            assert caught.value.kind == "denied"

    with pytest.raises(SandboxRefused) as refused:
        asyncio.run(look(str(tree)))
    assert refused.value.kind == "image"
    with imported(tree) as image:
        asyncio.run(look(image))
    assert (tree / "etc" / "of_root").read_text() == "of_root"
    assert (tree / "etc" / "of_user").stat().st_uid == 1000


@on_every_backend
def test_a_user_that_cannot_be_is_refused(backend: str) -> None:
    for user in (0, 1000) if backend != "podman" else (-1, NUM_IDS):
        with pytest.raises(SandboxRefused, match=f"user {user} in a {backend} sandbox") as caught:
            asyncio.run(make_backend(backend).create(replace(spec_of(), user=user)))
        assert caught.value.kind == "user"
