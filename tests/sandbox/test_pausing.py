"""Sandboxes that stand still, and what they have used."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from strop.sandbox import Job, Sandbox, make_backend
from strop.sandbox.family import parent_of
from strop.sandbox.local import LocalSandbox
from tests.fixtures.sandboxes import (
    appearance_of,
    on_every_backend,
    processes_with,
    sandbox_of,
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
async def test_a_paused_sandbox_runs_nothing_and_goes_on(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        assert isinstance(sandbox, LocalSandbox)
        # One that forks all the time, one in a session of its own.
        script = f"setsid sh -c '{SPIN}' 7601 & while :; do sh -c :; done"
        job = await start(sandbox, script, "7601")
        await sandbox.pause()
        before = cpu_ticks("7601"), sorted(processes_with("7601"))
        await asyncio.sleep(0.2)
        assert (cpu_ticks("7601"), sorted(processes_with("7601"))) == before
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
    assert processes_with("7601") == []


@on_every_backend
async def test_what_is_used_is_told(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
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
        assert (after.commands - before.commands, after.oom_kills) == (1, 0)
        assert after.exec_p50_s is not None
        assert after.exec_p99_s is not None
        assert 0 < after.exec_p50_s <= after.exec_p99_s
        await job.stop()
        assert (await sandbox.stats()).commands == after.commands + 1


@on_every_backend
async def test_a_supervisor_that_is_killed_in_a_pause_leaves_nothing(backend: str) -> None:
    sandbox = await make_backend(backend).create(spec_of())
    assert isinstance(sandbox, LocalSandbox)
    await start(sandbox, SPIN, "7605")
    await sandbox.pause()
    (pid,) = processes_with("7605")
    line = [pid]
    while (parent := parent_of(line[-1])) not in (os.getpid(), 1, None):
        line.append(parent)
    os.kill(line[-2], signal.SIGKILL)
    assert await sandbox.wait_lost() == "infra"
    await sandbox.stop()
    wait_until_gone("7605")
