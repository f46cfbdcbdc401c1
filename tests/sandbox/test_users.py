"""Users of an image inside a container, root too: what they may there, and what they are to the host."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import SandboxError, SandboxRefused
from strop.sandbox import ExecKind, IsolationLevel, make_backend
from strop.sandbox.idmap import NUM_IDS, claim_ids
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import (
    appearance_of,
    needs_podman,
    on_every_backend,
    on_every_engine,
    say,
    spec_of,
)
from tests.fixtures.small_root import imported


@asynccontextmanager
async def user_sandbox(
    user: int, image: str | None = None, backend: str = "podman"
) -> AsyncIterator[ServedSandbox]:
    spec = replace(spec_of(), user=user, image=image, min_level=IsolationLevel.CONTAINER)
    async with await make_backend(backend).create(spec) as sandbox:
        yield sandbox


@on_every_engine
async def test_root_inside_has_its_container_and_is_nobody_outside(backend: str) -> None:
    async with user_sandbox(0, backend=backend) as sandbox:
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


@on_every_engine
async def test_root_inside_has_no_way_further(backend: str) -> None:
    async with user_sandbox(0, backend=backend) as sandbox:
        attempts = (
            "kill -9 $PPID",
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

    asyncio.run(look(str(tree)))
    # An image's layers are shown so one by one.
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


def test_no_two_have_the_same_range() -> None:
    claims = [claim_ids(7) for _ in range(3)]
    try:
        firsts = sorted(first for first, _ in claims)
        assert all(later - earlier >= NUM_IDS for earlier, later in itertools.pairwise(firsts))
        assert firsts[0] >= 0x70400000
    finally:
        for _, claim in claims:
            claim.close()
