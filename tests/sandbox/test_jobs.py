"""Commands that are followed while they run, and connections to the servers among them."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from strop.errors import SandboxError, SandboxLost
from strop.sandbox import ExecKind, Job, JobOutput, Limits, Sandbox
from strop.sandbox.agent import Capture, unread
from strop.sandbox.local import LocalSandbox
from tests.fixtures.sandboxes import (
    appearance_of,
    on_every_backend,
    processes_with,
    sandbox_of,
)


async def read_until(job: Job, end: bytes) -> bytes:
    """Return what a job writes to its standard output, up to what ends so."""
    seen = b""
    while not seen.endswith(end):
        output = await job.read()
        assert output is not None, seen
        seen += output.stdout
    return seen


async def read_amount(job: Job, num_bytes: int) -> bytes:
    seen = b""
    while len(seen) < num_bytes:
        output = await job.read()
        assert output is not None, seen
        seen += output.stdout
    return seen


async def read_all(job: Job) -> list[JobOutput]:
    outputs = []
    while (output := await job.read()) is not None:
        outputs.append(output)
    return outputs


@on_every_backend
async def test_a_job_answers_while_it_runs(backend: str) -> None:
    async with sandbox_of(backend, limits=Limits(output_head_bytes=1 << 19)) as sandbox:
        job = await sandbox.start(["/bin/cat"], has_stdin=True, wall_limit_s=600)
        assert await job.write(b"one\n")
        assert await read_until(job, b"one\n") == b"one\n"
        # More than a pipe holds, both ways at once.
        data = bytes(range(256)) * 1024
        writing = asyncio.create_task(job.write(data))
        assert await read_amount(job, len(data)) == data
        assert await writing
        await job.close_stdin()
        result = await job.wait()
        assert (result.kind, result.exit_code, result.stdout_total) == (ExecKind.EXITED, 0, 4 + len(data))
        assert await job.wait() == result
        assert not await job.write(b"late")


@on_every_backend
async def test_who_reads_late_misses_the_middle_and_learns_how_much(backend: str) -> None:
    async with sandbox_of(backend, limits=Limits(output_head_bytes=1000, output_tail_bytes=500)) as sandbox:
        script = "head -c 300000 /dev/zero | tr '\\0' a; echo end; echo err >&2; : > done; sleep 7500"
        job = await sandbox.start(["/bin/sh", "-c", script])
        # The writer is not held up.
        seen = ["/bin/sh", "-c", "until ls done; do sleep 0.02; done"]
        assert (await sandbox.exec(seen, wall_limit_s=60)).exit_code == 0
        await job.stop()
        outputs = await read_all(job)
        assert sum(len(part.stdout) + part.stdout_omitted for part in outputs) == 300_004
        assert sum(len(part.stderr) + part.stderr_omitted for part in outputs) == 4
        # The head, then the tail behind the gap: 1000 and 500 bytes.
        assert [(len(part.stdout), part.stdout_omitted) for part in outputs if part.stdout] == [
            (1000, 0),
            (500, 300_004 - 1500),
        ]
        assert outputs[-1].stdout.endswith(b"aend\n")
        assert (await job.wait()).stdout == b"a" * 1496 + b"end\n"


def test_a_stream_that_is_followed_has_no_gap_but_what_is_counted() -> None:
    capture = Capture(4, 3)
    position, seen = 0, []
    for part in (b"ab", b"cdef", b"ghijklm", b"", b"nop"):
        capture.feed(part)
        gone, data = capture.since(position)
        position += gone + len(data)
        seen.append((gone, data))
    # Of "abcdefghijklm" the reader had six; "ghij" is neither head nor tail when it looks again.
    assert seen == [(0, b"ab"), (0, b"cdef"), (4, b"klm"), (0, b""), (0, b"nop")]
    assert unread(b"abcd", b"nop", 16, 2) == (0, b"cd")
    assert unread(b"abcd", b"nop", 16, 4) == (9, b"nop")
    assert unread(b"abcd", b"ef", 6, 1) == (0, b"bcdef")


@on_every_backend
async def test_a_signal_reaches_the_program_and_its_group(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        script = "trap 'echo caught; exit 7' INT; echo on; while :; do sleep 7501; done"
        job = await sandbox.start(["/bin/sh", "-c", script], wall_limit_s=600)
        await read_until(job, b"on\n")
        await appearance_of("7501")
        await job.signal(signal.SIGINT)
        result = await job.wait()
        assert (result.exit_code, result.stdout) == (7, b"on\ncaught\n")


@on_every_backend
async def test_stop_ends_all_that_a_job_started(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        script = "trap '' TERM; setsid sh -c \"trap '' TERM; sleep 7502; sleep 7502\" & echo on; sleep 7502"
        job = await sandbox.start(["/bin/sh", "-c", script])
        await read_until(job, b"on\n")
        result = await job.stop()
        assert result.kind in (ExecKind.SIGNALED, ExecKind.EXITED)
        assert processes_with("7502") == []
        assert await job.stop() == result
        # A server that nobody waits for holds nobody up, and no longer than its sandbox.
        await sandbox.start(["/bin/sleep", "7502"])
        await appearance_of("7502")
    assert processes_with("7502") == []


@on_every_backend
async def test_a_jobs_end_is_its_programs(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        job = await sandbox.start(["/bin/sh", "-c", "sleep 7503 & echo said; exit 4"])
        assert [output.stdout for output in await read_all(job)] == [b"said\n"]
        result = await job.wait()
        assert (result.kind, result.exit_code) == (ExecKind.EXITED, 4)
        assert processes_with("7503") == []
        assert await job.read() is None

        missing = await sandbox.start(["/no/such/program"])
        assert (await missing.wait()).kind is ExecKind.NOT_STARTED
        cut = await sandbox.start(["/bin/sleep", "7503"], wall_limit_s=0.2)
        assert (await cut.wait()).kind is ExecKind.TIMED_OUT
        lost = await sandbox.start(["/bin/sleep", "7503"])
        reading = asyncio.create_task(lost.read())
        await asyncio.sleep(0)
        await sandbox.stop()
        for awaited in (reading, lost.wait(), lost.read()):
            with pytest.raises(SandboxLost):
                await awaited


SERVER = """
import socket, sys, threading
def serve(listener):
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"I heard " + connection.recv(100))
        connection.close()
tcp = socket.create_server(("127.0.0.1", 0))
local = socket.socket(socket.AF_UNIX)
local.bind("server.sock")
local.listen()
print(tcp.getsockname()[1], flush=True)
threading.Thread(target=serve, args=[local], daemon=True).start()
serve(tcp)
"""


def _talk(connection: socket.socket, word: bytes) -> bytes:
    with connection:
        connection.settimeout(60)
        connection.sendall(word)
        return connection.recv(100)


@on_every_backend
async def test_servers_inside_are_reached_from_outside(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        job = await sandbox.start([*sandbox.python_argv, "-c", SERVER])
        port = int(await read_until(job, b"\n"))
        path = f"{sandbox.scratch}/server.sock"
        for address in (port, path, port):
            connection = await sandbox.connect(address)
            assert not connection.get_inheritable()
            heard = await asyncio.to_thread(_talk, connection, b"a word")
            assert heard == b"I heard a word"
        await sandbox.write("no_socket", b"")
        denied = sandbox.connect(f"{sandbox.scratch}/no_socket")
        for kind, attempt in (("missing", sandbox.connect("/tmp/none.sock")), ("refused", denied)):
            with pytest.raises(SandboxError, match="no connection to") as caught:
                await attempt
            assert caught.value.kind == kind
        await job.stop()
        with pytest.raises(SandboxError) as caught:
            await sandbox.connect(port)
        assert caught.value.kind == "refused"
        with pytest.raises(SandboxError) as caught:
            await sandbox.connect(70_000)
        assert caught.value.kind == "io"


BACKLOG = """
import socket
local = socket.socket(socket.AF_UNIX)
local.bind("full.sock")
local.listen(0)
print(flush=True)
import time; time.sleep(600)
"""


@on_every_backend
async def test_a_server_that_does_not_accept_holds_only_its_own_up(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        job = await sandbox.start([*sandbox.python_argv, "-c", BACKLOG])
        await read_until(job, b"\n")
        waiting = [asyncio.create_task(sandbox.connect(f"{sandbox.scratch}/full.sock")) for _ in range(80)]
        # One or two are in its queue, and the others are told that it is full, or that many wait.
        pending = set(waiting)
        ended: list[asyncio.Task[socket.socket]] = []
        while len(ended) < 10:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            ended += done
        assert (await sandbox.exec(["/bin/echo", "on"], wall_limit_s=60)).stdout == b"on\n"
        for task in pending:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        for result in results:
            if isinstance(result, socket.socket):
                result.close()
        assert {result.kind for result in results if isinstance(result, SandboxError)} == {"busy"}


async def test_a_request_that_nobody_knows_is_refused_and_ends_nothing() -> None:
    async with sandbox_of("process") as sandbox:
        job = await sandbox.start(["/bin/cat"], has_stdin=True)
        for more in ({}, {"job": job._number}, {"job": 99}):
            with pytest.raises(SandboxError, match="it knows no request 'dance'") as refused:
                await sandbox.client.ask({"op": "dance", **more})
            assert refused.value.kind == "unknown"
        sandbox.client.tell({"op": "dance"})
        await job.close_stdin()
        assert (await job.wait()).exit_code == 0


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
