"""Files and trees that go into a sandbox and come out of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import SandboxError, SandboxRefused
from strop.sandbox import Guard, Limits, Sandbox, make_backend
from strop.sandbox.contract import MIB
from tests.fixtures.sandboxes import (
    IS_ROOT,
    in_sandbox,
    on_every_backend,
    sandbox_of,
    say,
    spec_of,
    with_own_root,
)


@on_every_backend
def test_a_tree_goes_in_and_comes_out_as_it_was(backend: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "empty").mkdir(parents=True)
    (source / "a" / "data").write_bytes(bytes(range(256)) * 1000)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    odd = "one\ntwo ä"
    (source / odd).write_text("odd")

    async def work(sandbox: Sandbox) -> None:
        await sandbox.upload(source, "tree")
        assert (
            await say(sandbox, "tree/run.sh; ls -d tree/a/empty; echo more > tree/new")
            == "ran\ntree/a/empty\n"
        )
        assert await sandbox.download("tree", tmp_path / "back") == ()
        await sandbox.upload(source / "a" / "data", "one")
        assert await sandbox.download("one", tmp_path / "one") == ()

    in_sandbox(backend, work)
    back = tmp_path / "back"
    names = {str(path.relative_to(back)) for path in back.rglob("*")}
    assert names == {"a", "a/empty", "a/data", "run.sh", "new", odd}
    assert (back / "a" / "data").read_bytes() == (source / "a" / "data").read_bytes()
    assert (back / "a" / "data").read_bytes() == (tmp_path / "one").read_bytes()
    assert os.access(back / "run.sh", os.X_OK)


@on_every_backend
def test_links_and_pipes_do_not_come_out_and_lead_nowhere(backend: str, tmp_path: Path) -> None:
    async def work(sandbox: Sandbox) -> None:
        await say(
            sandbox,
            "mkdir -p tree/d && cd tree && echo x > d/file && ln -s /etc/passwd link && ln -s / root"
            " && mkfifo pipe && chmod 4777 d/file",
        )
        left_out = await sandbox.download("tree", tmp_path / "back")
        assert sorted(left_out) == ["link", "pipe", "root"]
        # What stands at the top is no exception.
        assert await sandbox.download("tree/link", tmp_path / "link") == ("",)

    in_sandbox(backend, work)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "back",
        "back/d",
        "back/d/file",
    ]
    # No set-uid bit, and nothing that others could write to.
    assert (tmp_path / "back/d/file").stat().st_mode & 0o7777 == 0o755


@on_every_backend
def test_what_does_not_fit_or_is_no_file_is_an_error(backend: str, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "link").symlink_to("/etc/passwd")
    (tmp_path / "there").write_text("mine")

    async def work(sandbox: Sandbox) -> None:
        zeros = "head -c 3000 /dev/zero"
        await say(
            sandbox, f"mkdir big many && {zeros} > big/a && {zeros} > big/b && touch many/1 many/2 many/3"
        )
        cases: tuple[tuple[str, Awaitable[object]], ...] = (
            ("too_large", sandbox.download("big", tmp_path / "big", max_bytes=5000)),
            ("too_large", sandbox.download("many", tmp_path / "many", max_files=3)),
            ("missing", sandbox.download("absent", tmp_path / "absent")),
            ("exists", sandbox.download("big", tmp_path / "there")),
            ("not_regular", sandbox.upload(tmp_path / "linked", "tree")),
            ("directory", sandbox.upload(tmp_path / "there", "big")),
        )
        for kind, attempt in cases:
            with pytest.raises(SandboxError) as caught:
                await attempt
            assert caught.value.kind == kind

    in_sandbox(backend, work)
    assert (tmp_path / "there").read_text() == "mine"


@on_every_backend
async def test_a_full_disk_is_told_and_leaves_no_part(backend: str) -> None:
    async with sandbox_of(backend, limits=Limits(scratch_bytes=2 * MIB)) as sandbox:
        if sandbox.isolation.disk is not Guard.ENFORCED:
            pytest.skip("the private directory is watched, not bounded")
        with pytest.raises(SandboxError) as caught:
            await sandbox.write("big", bytes(3 * MIB))
        assert caught.value.kind == "no_space"
        assert await say(sandbox, "ls -A") == ""
        await sandbox.write("small", b"fits")


@on_every_backend
def test_no_path_leads_out(backend: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    secret = outside / "secret"
    secret.write_text("of the host")
    secret.chmod(0o600)

    async def work(sandbox: Sandbox) -> None:
        climb = "../" * 20
        await say(sandbox, f"ln -s {outside} link; ln -s {climb}{outside} climb; mkdir real")
        paths = (f"link/{outside.name}", "link/new", "climb/new", f"{climb}{outside}/new", f"{climb}etc/new")
        for path in paths:
            with suppress(SandboxError):
                await sandbox.write(path, b"x")
        for path in ("link/secret", f"{climb}{secret}", "climb/secret"):
            with pytest.raises(SandboxError) as caught:
                await sandbox.read(path)
            assert caught.value.kind in ("missing", "denied")
        # A tree in which a name leads elsewhere comes out without it.
        assert set(await sandbox.download(".", tmp_path / "back")) == {"climb", "link"}

    if backend == "process" and not IS_ROOT:
        pytest.skip("its programs are this user")
    in_sandbox(backend, work)
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert secret.read_text() == "of the host"
    assert not Path("/etc/new").exists()


@on_every_backend
async def test_files_of_a_spec_are_there_before_the_first_command(backend: str) -> None:
    spec = replace(spec_of(), files={"a/b": b"given"})
    async with await make_backend(backend).create(spec) as sandbox:
        assert await say(sandbox, "cat a/b") == "given"
    with pytest.raises(SandboxError) as caught:
        await make_backend(backend).create(replace(spec_of(), files={"/proc/no": b""}))
    assert caught.value.kind in ("denied", "missing")


@with_own_root
async def test_a_workspace_is_the_programs_own_and_bounded(backend: str) -> None:
    async with await make_backend(backend).create(
        replace(spec_of(Limits(scratch_bytes=4 * MIB)), has_workspace=True)
    ) as sandbox:
        await sandbox.write("/workspace/deep/file", b"one")
        assert await say(sandbox, "cd /workspace && mkdir made && cat deep/file") == "one"
        script = "head -c 8388608 /dev/zero > /workspace/much"
        assert b"No space left" in (await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)).stderr


@on_every_backend
def test_an_image_is_refused_where_there_are_none(backend: str, tmp_path: Path) -> None:
    for name in ("debian:12", "localhost/none", str(tmp_path / "none")):
        with pytest.raises(SandboxRefused) as caught:
            asyncio.run(make_backend(backend).create(replace(spec_of(), image=name)))
        assert caught.value.kind == "image"
