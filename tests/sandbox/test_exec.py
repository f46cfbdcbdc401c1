"""What a command's result says, on every backend: it must be the same."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from strop.errors import SandboxError, SandboxLost
from strop.sandbox import ExecKind, Limits, make_backend
from strop.sandbox.ground import SCRATCH_BASES
from strop.sandbox.local import LocalBackend
from tests.fixtures.sandboxes import (
    SOURCE_DIR,
    appearance_of,
    cut_off,
    make_foreign_program,
    num_below,
    on_every_backend,
    processes_with,
    sandbox_of,
    say,
    shell,
    spec_of,
    wait_until_gone,
    where_users_differ,
)


@on_every_backend
async def test_an_end_is_a_value(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:

        async def end(*argv: str, **options: Any) -> tuple[ExecKind, int | None, int | None, bytes]:
            found = await sandbox.exec(argv, **{"wall_limit_s": 60, **options})
            assert (found.truncated, found.timed_out, found.oom_kills) == (False, False, 0)
            assert 0 < found.duration_s < 60
            assert 0 <= found.cpu_s < 60
            return found.kind, found.exit_code, found.signal, found.stdout + found.stderr

        sh = ("/bin/sh", "-c")
        assert await end(*sh, "echo out; echo err >&2; exit 3") == (ExecKind.EXITED, 3, None, b"out\nerr\n")
        assert await end(*sh, "kill -SEGV $$") == (ExecKind.SIGNALED, None, signal.SIGSEGV, b"")
        # An empty standard input ends at once, and one that nobody reads does no harm.
        assert await end(*sh, "cat; echo read") == (ExecKind.EXITED, 0, None, b"read\n")
        assert (await end(*sh, "exit 0", stdin=bytes(1 << 20)))[:2] == (ExecKind.EXITED, 0)
        missing = await end("/no/such/program")
        assert missing[:2] == (ExecKind.NOT_STARTED, 127)
        assert b"No such file" in missing[3]
        assert (await end("/bin/true", cwd="/no/such/place"))[0] is ExecKind.NOT_STARTED
        # The same number, but from a program.
        assert (await end(*sh, "exit 127"))[:2] == (ExecKind.EXITED, 127)


@on_every_backend
async def test_bytes_are_exact_both_ways_and_the_middle_of_long_output_is_counted(backend: str) -> None:
    async with sandbox_of(backend, limits=Limits(output_head_bytes=1 << 20, output_tail_bytes=50)) as sandbox:
        # 4096 copies of all 256 values are 1 MiB; that many are kept here.
        data = bytes(range(256)) * 4096
        result = await sandbox.exec(["/bin/cat"], stdin=data, wall_limit_s=60)
        assert (result.stdout, result.stdout_total, result.truncated) == (data, 1 << 20, False)
        script = "cat; echo 'left out'; head -c 50 /dev/zero; cat /dev/null >&2"
        result = await sandbox.exec(["/bin/sh", "-c", script], stdin=data, wall_limit_s=60)
        assert (result.stdout, result.truncated) == (data + bytes(50), True)
        assert (result.stdout_total, result.stdout_omitted) == ((1 << 20) + 59, 9)
        assert (result.stderr_total, result.stderr_omitted) == (0, 0)


@on_every_backend
@pytest.mark.parametrize(
    ("script", "out"),
    [
        ("echo before; : > begun; sleep 7206; echo after", b"before\n"),
        # Who ignores the order to end is killed.
        ("trap '' TERM; echo on; : > begun; while :; do sleep 1; done", b"on\n"),
    ],
)
async def test_a_time_out_keeps_what_was_written(backend: str, script: str, out: bytes) -> None:
    async with sandbox_of(backend) as sandbox:
        result = await cut_off(sandbox, script)
    assert (result.kind, result.timed_out, result.stdout) == (ExecKind.TIMED_OUT, True, out)
    assert 0.25 < result.duration_s < 600  # The program wanted two hours.


@on_every_backend
async def test_a_program_for_another_machine_is_not_started(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        await sandbox.write("program", make_foreign_program(), mode=0o755)
        result = await sandbox.exec(["./program"], wall_limit_s=0.5)
        # Where the kernel knows an emulator it waits for ever, as it would there.
        if result.kind is not ExecKind.TIMED_OUT:
            assert (result.kind, result.exit_code) == (ExecKind.NOT_STARTED, 127)
            assert b"Exec format error" in result.stderr


@on_every_backend
async def test_eight_commands_run_at_once(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        # Each waits for all others: one after the other, none would end.
        script = ": > {0}; until [ $(ls | wc -l) = 8 ]; do sleep 0.1; done; echo {0}"
        results = await asyncio.gather(*(say(sandbox, script.format(number)) for number in range(8)))
        assert results == [f"{number}\n" for number in range(8)]


@on_every_backend
async def test_the_environment_is_clean_and_python_isolated(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        result = await sandbox.exec(["/usr/bin/env"], env={"WORD": "b=c"}, wall_limit_s=60)
        names = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
        assert names.pop("WORD") == "b=c"
        assert sorted(names) == ["HOME", "LANG", "PATH", "PYTHONHASHSEED", "TMPDIR"]
        assert names["HOME"] == sandbox.scratch
        code = "import sys; print(sys.flags.isolated, sys.flags.no_site, sys.version_info[:2] >= (3, 11))"
        result = await sandbox.exec([*sandbox.python_argv, "-c", code], wall_limit_s=60)
        assert result.stdout == b"1 1 True\n"


@on_every_backend
async def test_files_go_in_and_out_byte_for_byte(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        data = bytes(range(256)) * 300
        await sandbox.write("deep/er/\n name", data, mode=0o700)
        assert await sandbox.read("deep/er/\n name") == data
        assert await sandbox.read("deep/er/\n name", offset=76_790) == data[76_790:]
        assert await sandbox.read(f"{sandbox.scratch}/deep/er/\n name", offset=10**6) == b""
        # One name of two lines: no partial file is left.
        assert await say(sandbox, "stat -c %a:%s deep/er/*; ls -A deep/er | wc -l") == "700:76800\n2\n"
        await say(sandbox, "rm -r deep; mkdir d; mkfifo f; ln -s /etc/passwd l; echo 12345 > n")
        # What one command made, another finds.
        assert await say(sandbox, "ls -A") == "d\nf\nl\nn\n"
        for path, kind in (("none", "missing"), ("d", "directory"), ("n", "too_large")):
            with pytest.raises(SandboxError) as caught:
                await sandbox.read(path, max_bytes=5)
            assert caught.value.kind == kind
        for path in ("f", "l", "/dev/zero"):
            with pytest.raises(SandboxError) as caught:
                await sandbox.read(path)
            assert caught.value.kind == "not_regular"
        for path, kind in (("/proc/new", "missing"), ("d", "directory"), ("/usr/new", "denied")):
            with pytest.raises(SandboxError) as caught:
                await sandbox.write(path, b"x")
            assert caught.value.kind == kind
    # Not one sandbox what another one made.
    async with sandbox_of(backend) as sandbox:
        assert await say(sandbox, "ls -A") == ""


@on_every_backend
async def test_a_file_beyond_the_limit_is_refused_whole(backend: str) -> None:
    async with sandbox_of(backend, limits=Limits(file_bytes=2000)) as sandbox:
        with pytest.raises(SandboxError) as caught:
            await sandbox.write("big", bytes(3000))
        assert caught.value.kind == "too_large"
        assert (await sandbox.exec(["/bin/ls", "-A"], wall_limit_s=60)).stdout == b""


@on_every_backend
async def test_a_stopped_sandbox_says_so(backend: str) -> None:
    sandbox = await make_backend(backend).create(spec_of())
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxLost, match="does not answer") as caught:
        await sandbox.exec(["/bin/true"], wall_limit_s=60)
    assert caught.value.kind == "stopped"


async def test_a_stop_that_was_cancelled_is_waited_for_by_the_next() -> None:
    """Incident: the next one waited 30 s for an end that could not be seen any more."""
    sandbox = await make_backend("process").create(spec_of())
    await sandbox.start(["/bin/sleep", "7206"])
    await appearance_of("7206")
    first = asyncio.create_task(sandbox.stop())
    # It waits for the end.
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    async with asyncio.timeout(20):
        await sandbox.stop()
    assert processes_with("7206") == []


@on_every_backend
async def test_a_cancelled_command_is_killed_and_the_sandbox_lives(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        command = asyncio.create_task(sandbox.exec(["/bin/sleep", "7201"], wall_limit_s=600))
        await appearance_of("7201")
        command.cancel()
        await asyncio.gather(command, return_exceptions=True)
        assert (await sandbox.exec(["/bin/echo", "here"], wall_limit_s=60)).stdout == b"here\n"
        wait_until_gone("7201")


@on_every_backend
def test_nothing_is_left_of_twenty_sandboxes(backend: str) -> None:
    shell(backend, "true")
    before = num_below()

    async def run() -> None:
        async def one(number: int) -> None:
            async with await make_backend(backend).create(spec_of()) as sandbox:
                script = f"echo {number} > file; sleep 7202 & setsid sleep 7202 & echo {number}"
                result = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)
                assert result.stdout == f"{number}\n".encode()

        for first in (0, 10):
            await asyncio.gather(*(one(first + number) for number in range(10)))

    asyncio.run(run())
    assert processes_with("7202") == []
    deadline = time.monotonic() + 60
    while num_below() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # The dead are buried a moment after they have said goodbye.
    assert num_below() <= before
    assert list(Path("/sys/fs/cgroup").glob(f"*/strop-{os.getpid()}*")) == []


@on_every_backend
def test_signals_do_what_a_program_expects(backend: str) -> None:
    """Also where strop runs in the background of a shell, which lets it ignore interrupts."""
    numbers = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        for number in (*numbers, signal.SIGUSR1, signal.SIGPIPE):
            result = shell(backend, f"kill -{number.name[3:]} $$; echo lives")
            assert (result.signal, result.stdout) == (number, b"")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


IPC = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
shared = [libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)]
assert min(shared) >= 0, shared
print("shared", flush=True)
if len(sys.argv) > 1:
    time.sleep(600)
"""


@where_users_differ
@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_shared_memory_of_the_kernels_ends_with_a_sandbox(backend: str, is_killed: bool) -> None:
    def owned() -> list[str]:
        return [
            f"{path.name}: {line}"
            for path in Path("/proc/sysvipc").iterdir()
            for line in path.read_text().splitlines()[1:]
            if str(uid) in line.split()
        ]

    async def run() -> int:
        sandbox = await LocalBackend(backend).create(spec_of())
        command = [*sandbox.python_argv, "-c", IPC]
        assert (await sandbox.exec(command, wall_limit_s=60)).stdout == b"shared\n"
        if is_killed:
            job = await sandbox.start([*command, "stay"])
            assert await job.read() is not None
            os.kill(sandbox.supervisor_pid, signal.SIGKILL)
            with pytest.raises(SandboxLost):
                await job.wait()
        await sandbox.stop()
        return sandbox.isolation.host_uid

    uid = asyncio.run(run())
    deadline = time.monotonic() + 60
    while owned() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert owned() == []


_ONE = """
import asyncio
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
async def main():
    async with await make_backend("process").create(SandboxSpec(min_level=IsolationLevel.RLIMIT)):
        pass
asyncio.run(main())
"""


def test_directories_of_killed_daemons_are_removed_and_others_stay() -> None:
    base = next(base for base in SCRATCH_BASES if os.access(base, os.W_OK))
    abandoned, held, young = (Path(tempfile.mkdtemp(prefix="strop-sandbox-", dir=base)) for _ in range(3))
    (abandoned / "1/deep").mkdir(parents=True)
    (abandoned / "1").chmod(0)
    for path in (abandoned, held):
        os.utime(path, (0, 0))
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        subprocess.run([sys.executable, "-c", _ONE], env={"PYTHONPATH": SOURCE_DIR}, check=True)
        assert [path.exists() for path in (abandoned, held, young)] == [False, True, True]
    finally:
        os.close(descriptor)
        held.rmdir()
        young.rmdir()
