"""Sandboxes that stand still, and what they have used."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from strop.errors import SandboxError
from strop.sandbox import FrozenBy, Job, Sandbox, freezer, make_backend
from strop.sandbox.cgroup import Cgroup, find_freezers
from strop.sandbox.family import find_descendants, parent_of, signal_descendants
from strop.sandbox.freezer import Freezer
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import (
    appearance_of,
    in_sandbox,
    on_every_backend,
    processes_with,
    spec_of,
    wait_until_gone,
)

SPIN = "echo on; while :; do :; done"


def cpu_ticks(word: str) -> int:
    """Return the processor time of the processes with a word in their command line."""
    ticks = 0
    for pid in processes_with(word):
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks


async def start(sandbox: Sandbox, script: str, word: str) -> Job:
    job = await sandbox.start(["/bin/sh", "-c", script, word], wall_limit_s=60.0)
    await appearance_of(word)
    assert await job.read()
    return job


@on_every_backend
def test_a_paused_sandbox_runs_nothing_and_goes_on(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        # One that forks all the time, one in a session of its own.
        script = f"setsid sh -c '{SPIN}' 7601 & while :; do sh -c :; done"
        job = await start(sandbox, script, "7601")
        assert await sandbox.pause() in (FrozenBy.CGROUP, FrozenBy.SIGNALS)
        before = cpu_ticks("7601"), sorted(processes_with("7601"))
        await asyncio.sleep(0.2)
        assert (cpu_ticks("7601"), sorted(processes_with("7601"))) == before
        for attempt in (sandbox.exec(["/bin/true"], wall_limit_s=60), sandbox.read("x"), sandbox.connect(9)):
            with pytest.raises(SandboxError, match="it is paused") as caught:
                await attempt
            assert caught.value.kind == "paused"
        assert (await sandbox.stats()).is_paused
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.resume()
        assert (await sandbox.exec(["/bin/echo", "on"], wall_limit_s=60)).stdout == b"on\n"
        begun = time.monotonic()
        while (is_still := cpu_ticks("7601") == before[0]) and time.monotonic() < begun + 60:
            await sandbox.stats()
        assert not is_still
        # Again, and into its end.
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.pause()
        del job

    in_sandbox(backend, work)
    assert processes_with("7601") == []


@on_every_backend
def test_a_pause_does_not_count_against_a_command(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        job = await start(sandbox, "echo on; sleep 0.3; echo off", "7602")
        began = time.monotonic()
        await sandbox.pause()
        await asyncio.sleep(0.5)
        await sandbox.resume()
        result = await job.wait()
        assert result.stdout == b"on\noff\n"
        assert result.duration_s < time.monotonic() - began - 0.4 + 1.0

    in_sandbox(backend, work)


@on_every_backend
def test_what_is_used_is_told(backend: str) -> None:
    async def work(sandbox: ServedSandbox) -> None:
        before = await sandbox.stats()
        code = "x = bytearray(30 << 20)\nopen('file', 'wb').write(bytes(2 << 20))"
        command = [*sandbox.python_argv, "-c", code]
        result = await sandbox.exec(command, wall_limit_s=60)
        assert result.exit_code == 0, result.stderr
        job = await start(sandbox, "echo on; sleep 7603", "7603")
        after = await sandbox.stats()
        assert after.cpu_s >= before.cpu_s + result.cpu_s - 0.02
        assert 2 << 20 <= after.disk_bytes - before.disk_bytes < 4 << 20
        assert after.disk_files - before.disk_files == 1
        assert after.processes >= 1
        assert after.memory_bytes > 0
        assert after.memory_peak_bytes is None or after.memory_peak_bytes >= 30 << 20
        assert (after.commands - before.commands, after.oom_kills, after.is_paused) == (1, 0, False)
        assert after.exec_p50_s is not None
        assert after.exec_p99_s is not None
        assert 0 < after.exec_p50_s <= after.exec_p99_s
        await job.stop()
        assert (await sandbox.stats()).commands == after.commands + 1

    in_sandbox(backend, work)


@pytest.mark.parametrize("kind", ["version 1", "version 2", "signals"])
def test_a_tree_of_processes_stands_still(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    freezers = find_freezers()
    chosen = {
        "version 1": [group for group in freezers if group[0] == 1],
        "version 2": [group for group in freezers if group[0] == 2],
        "signals": [],
    }[kind]
    monkeypatch.setattr(freezer, "find_freezers", lambda: chosen)
    words = ["/bin/sh", "-c", f"setsid sh -c '{SPIN}' 7604 & kill -STOP $$ & {SPIN}", "7604"]
    tree = subprocess.Popen(words, stdout=subprocess.PIPE)
    made = Freezer(Cgroup(), f"strop-test-{os.getpid()}", lambda: [tree.pid, *find_descendants(tree.pid)])
    try:
        assert tree.stdout is not None
        tree.stdout.read(3)
        frozen_by = made.freeze()
        if kind != "signals" and frozen_by is FrozenBy.SIGNALS:
            pytest.skip(f"no group of {kind} may be made")
        before = cpu_ticks("7604")
        time.sleep(0.1)
        assert cpu_ticks("7604") == before
        made.thaw()
        begun = time.monotonic()
        while (is_still := cpu_ticks("7604") == before) and time.monotonic() < begun + 60:
            time.sleep(0.01)
        assert not is_still
    finally:
        made.thaw()
        signal_descendants(tree.pid, signal.SIGKILL)
        tree.kill()
        tree.communicate()
        made.close()


@on_every_backend
def test_a_supervisor_that_is_killed_in_a_pause_leaves_nothing(backend: str) -> None:
    async def run() -> None:
        sandbox = await make_backend(backend).create(spec_of())
        await start(sandbox, SPIN, "7605")
        await sandbox.pause()
        (pid,) = processes_with("7605")
        line = [pid]
        while (parent := parent_of(line[-1])) not in (os.getpid(), 1, None):
            line.append(parent)
        os.kill(line[-2], signal.SIGKILL)
        assert await sandbox.wait_lost() == "infra"
        await sandbox.stop()

    asyncio.run(run())
    wait_until_gone("7605")
