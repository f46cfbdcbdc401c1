"""Sandboxes that begin where another one was, and what is left of a snapshot."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import SandboxError, SandboxLost, SandboxRefused
from strop.sandbox import Limits, Snapshot, make_backend
from strop.sandbox.contract import MIB
from strop.sandbox.daemon import SCRATCH_BASES
from strop.sandbox.family import find_descendants, parent_of
from strop.sandbox.local_snapshot import LocalSnapshot
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import (
    appearance_of,
    in_sandbox,
    needs_bubblewrap,
    needs_podman,
    on_every_backend,
    say,
    spec_of,
)


def forking(backend: str, prepare: str, work: Callable[[ServedSandbox, Snapshot], Awaitable[None]]) -> None:
    """Do some work with a sandbox in which something was done, and a snapshot of it."""

    async def act(sandbox: ServedSandbox) -> None:
        await say(sandbox, prepare)
        async with await sandbox.snapshot() as snapshot:
            await work(sandbox, snapshot)

    in_sandbox(backend, act)


def layers_of_daemons() -> list[str]:
    """Return the layers that any daemon below this process has, by the mounts and directories it sees."""
    leftovers = []
    for pid in find_descendants(os.getpid()):
        for base in SCRATCH_BASES:
            # Folders of others come and go.
            with suppress(FileNotFoundError):
                leftovers += [
                    str(path) for path in Path(f"/proc/{pid}/root{base}").glob("strop-sandbox-*/snap-*")
                ]
    return leftovers


def assert_no_layer_is_left() -> None:
    deadline = time.monotonic() + 60
    while layers_of_daemons() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert layers_of_daemons() == []


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("bubblewrap", marks=needs_bubblewrap),
        pytest.param("podman", marks=[needs_podman, pytest.mark.slow]),
    ],
)
def test_a_workspace_is_the_programs_own_bounded_and_in_snapshots(backend: str) -> None:
    spec = replace(spec_of(Limits(scratch_bytes=4 * MIB)), has_workspace=True)

    async def main() -> None:
        async with await make_backend(backend).create(spec) as first:
            await first.write("/workspace/deep/file", b"one")
            assert await say(first, "cd /workspace && mkdir made && cat deep/file") == "one"
            script = "head -c 8388608 /dev/zero > /workspace/much; rm /workspace/much"
            result = await first.exec(["/bin/sh", "-c", script], wall_limit_s=60)
            assert b"No space left" in result.stderr
            async with (
                await first.snapshot() as snapshot,
                await make_backend(backend).create(replace(spec, snapshot=snapshot)) as second,
            ):
                assert await second.read("/workspace/deep/file") == b"one"
                await second.write("/workspace/other", b"two")

    asyncio.run(main())


PREPARE = (
    "mkdir -p work/deep; echo one > work/deep/file; ln -s deep/file work/link; chmod 700 work/deep;"
    " echo gone > work/gone; printf '#!/bin/sh\\necho ran' > work/run; chmod 755 work/run"
)


@on_every_backend
def test_a_group_begins_where_one_was(backend: str) -> None:
    async def work(first: ServedSandbox, snapshot: Snapshot) -> None:
        assert snapshot.num_bytes > 0
        # What the first does from now on is its own.
        await say(first, "echo changed > work/deep/file; rm work/gone")
        spec = replace(spec_of(), snapshot=snapshot)
        group = await asyncio.gather(*(make_backend(backend).create(spec) for _ in range(3)))
        for number, sandbox in enumerate(group):
            seen = await say(sandbox, "cat work/link work/gone; work/run; stat -c %a:%u work/deep; id -u")
            one, gone, ran, mode, user = seen.split()
            assert (one, gone, ran) == ("one", "gone", "ran")
            assert mode == f"700:{user}"
            await say(sandbox, f"echo {number} >> work/deep/file; rm -r work/run; mkdir work/run")
        for number, sandbox in enumerate(group):
            assert await say(sandbox, "cat work/deep/file; ls -d work/run/") == f"one\n{number}\nwork/run/\n"
            assert sandbox.isolation.level == first.isolation.level
        assert await say(first, "cat work/deep/file; work/run") == "changed\nran\n"
        await snapshot.close()
        with pytest.raises(SandboxRefused, match="was closed") as caught:
            await make_backend(backend).create(spec)
        assert caught.value.kind == "snapshot"
        # They live on without it.
        assert (await say(group[0], "cat work/gone")) == "gone\n"
        await asyncio.gather(*(sandbox.stop() for sandbox in group))

    forking(backend, PREPARE, work)
    assert_no_layer_is_left()


@on_every_backend
def test_what_was_deleted_stays_so_in_a_snapshot_of_a_snapshot(backend: str) -> None:
    async def work(first: ServedSandbox, snapshot: Snapshot) -> None:
        spec = replace(spec_of(), snapshot=snapshot)
        async with await make_backend(backend).create(spec) as second:
            # A file and a directory are deleted, and the directory is made anew, without what was in it.
            await say(second, "rm -r work/gone work/deep; mkdir work/deep; echo two > work/two")
            later = await second.snapshot()
        await snapshot.close()
        async with await make_backend(backend).create(replace(spec, snapshot=later)) as third:
            assert await say(third, "ls -A work work/deep") == "work:\ndeep\nlink\nrun\ntwo\n\nwork/deep:\n"
            await later.close()
            assert await say(third, "cat work/two; work/run") == "two\nran\n"

    forking(backend, PREPARE, work)
    assert_no_layer_is_left()


@on_every_backend
def test_a_snapshot_shows_one_moment_and_nothing_is_lost_meanwhile(backend: str) -> None:
    async def act(sandbox: ServedSandbox) -> None:
        # Two files that are written in turn differ by one line at most, at every moment.
        script = (
            "echo 0 > a; echo 0 > b; echo on; i=0; while :; do i=$((i+1)); echo $i >> a; echo $i >> b; done"
        )
        job = await sandbox.start(["/bin/sh", "-c", script])
        assert await job.read()
        taking = asyncio.create_task(sandbox.snapshot())
        await asyncio.sleep(0)
        # It waits for its turn.
        assert await say(sandbox, "echo meanwhile") == "meanwhile\n"
        snapshot = await taking
        async with await make_backend(backend).create(replace(spec_of(), snapshot=snapshot)) as other:
            num_a, num_b = map(int, (await say(other, "cat a | wc -l; cat b | wc -l")).split())
            assert num_a - num_b in (0, 1)
            assert num_a > 0
        await snapshot.close()

    in_sandbox(backend, act)


@on_every_backend
def test_a_stop_in_the_middle_leaves_no_layer(backend: str) -> None:
    async def run() -> None:
        async with await make_backend(backend).create(spec_of()) as keeper:
            sandbox = await make_backend(backend).create(spec_of())
            await say(sandbox, "for i in 1 2 3; do head -c 15000000 /dev/zero > big$i; done")
            taking = asyncio.create_task(sandbox.snapshot())
            await asyncio.sleep(0)
            await sandbox.stop()
            # It was lost, or taken just before.
            (taken,) = await asyncio.gather(taking, return_exceptions=True)
            if isinstance(taken, LocalSnapshot):
                await taken.close()
            else:
                assert isinstance(taken, SandboxLost)
            await say(keeper, "true")
            assert_no_layer_is_left()

    asyncio.run(run())


@on_every_backend
def test_what_cannot_be_begun_with_is_refused(backend: str) -> None:
    async def work(first: ServedSandbox, snapshot: Snapshot) -> None:
        other = "bubblewrap" if backend == "process" else "process"
        with pytest.raises(SandboxRefused, match=f"a snapshot of backend {backend}") as caught:
            await make_backend(other).create(replace(spec_of(), snapshot=snapshot))
        assert caught.value.kind == "snapshot"
        if backend != "podman":
            tight = replace(spec_of(Limits(scratch_bytes=1 * MIB)), snapshot=snapshot)
            if first.isolation.disk == "enforced":
                with pytest.raises(SandboxRefused) as caught:
                    await make_backend(backend).create(tight)
                assert caught.value.kind == "no_space"

    forking(backend, "head -c 3000000 /dev/zero > big", work)


@needs_podman
@pytest.mark.slow
def test_an_image_goes_with_its_snapshot(tmp_path: Path) -> None:
    async def work(first: ServedSandbox, snapshot: Snapshot) -> None:
        with pytest.raises(SandboxRefused, match="a snapshot of image None") as caught:
            await make_backend("podman").create(replace(spec_of(), snapshot=snapshot, image=str(tmp_path)))
        assert caught.value.kind == "snapshot"

    forking("podman", "echo x > file", work)


@on_every_backend
def test_a_supervisor_that_is_killed_keeps_what_was_taken_before(backend: str) -> None:
    async def run() -> None:
        async with await make_backend(backend).create(spec_of()) as keeper:
            sandbox = await make_backend(backend).create(spec_of())
            await say(sandbox, "echo kept > file")
            snapshot = await sandbox.snapshot()
            await sandbox.start(["/bin/sleep", "7801"])
            (pid,) = await appearance_of("7801")
            line = [pid]
            while (parent := parent_of(line[-1])) not in (os.getpid(), 1, None):
                line.append(parent)
            os.kill(line[-2], signal.SIGKILL)
            await sandbox.wait_lost()
            with pytest.raises(SandboxError):
                await sandbox.snapshot()
            async with await make_backend(backend).create(replace(spec_of(), snapshot=snapshot)) as other:
                assert await say(other, "cat file") == "kept\n"
            await snapshot.close()
            await say(keeper, "true")
            await sandbox.stop()

    asyncio.run(run())
    assert_no_layer_is_left()
