"""Attempts to take more of the machine than a sandbox may. What counts is what can be seen from outside.

Numbers are those of the list of attacks that a level of isolation stands for. Network attacks meet only
listeners that the test itself opened on the loopback interface.
"""

from __future__ import annotations

import json
import os
import time

import pytest

from strop.sandbox import ExecKind, Guard, Limits
from strop.sandbox.attack.stage import peak_bytes
from strop.sandbox.contract import MIB
from strop.sandbox.family import find_descendants
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import (
    in_sandbox,
    needs_bubblewrap,
    on_every_backend,
    processes_with,
    python,
    shell,
)

# Bounded: 100 attempts, each child sleeps.
FORKS = """
import os, time
started = refused = 0
for _ in range(100):
    try:
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "7301"])
        started += 1
    except OSError:
        refused += 1
print(started, refused, flush=True)
# Whoever watches comes by.
time.sleep(600 if refused == 0 else 0)
"""


@on_every_backend
def test_1_forks_are_refused_or_ended_at_the_limit(backend: str) -> None:
    result = python(backend, FORKS, limits=Limits(max_processes=12))
    if result.kind is not ExecKind.OVER_LIMIT:
        started, refused = map(int, result.stdout.split())
        # The program itself is one of the twelve.
        assert started <= 11
        assert started + refused == 100
    assert processes_with("7301") == []


@on_every_backend
def test_1_many_background_children_are_gone_with_the_command(backend: str) -> None:
    result = shell(backend, "for i in $(seq 50); do sleep 7302 & done; echo $(jobs | wc -l)")
    assert result.exit_code == 0
    assert processes_with("7302") == []


BALLOON = """
import os
children = set()
all_there, begin = os.pipe()
ended, alive = os.pipe()
for _ in range(4):
    if (child := os.fork()) == 0:
        os.close(begin)
        os.close(alive)
        # A fork may fail where memory is short already.
        os.read(all_there, 1)
        block = bytearray(60 << 20)
        block[::4096] = b"x" * len(block[::4096])
        # Until the kernel ends it, or the parent has ended.
        os.read(ended, 1)
        os._exit(0)
    children.add(child)
os.close(begin)
# All stay until one of them is killed.
children.remove(os.wait()[0])
for child in children:
    os.kill(child, 9)
    os.wait()
"""


@on_every_backend
def test_2_memory_is_bounded_and_the_kill_is_seen_behind_exit_0(backend: str) -> None:
    async def work(sandbox: ServedSandbox) -> None:
        await sandbox.write("balloon.py", BALLOON.encode())
        python_words = " ".join(sandbox.python_argv)
        # 4 x 60 MiB do not fit into 128 MiB; the pipeline ends with 0 all the same.
        result = await sandbox.exec(
            ["/bin/sh", "-c", f"{python_words} balloon.py | cat; exit 0"], wall_limit_s=60
        )
        assert (result.kind, result.exit_code) == (ExecKind.OOM, 0)
        assert result.oom_kills >= 1
        after = await sandbox.exec(["/bin/echo", "alive"], wall_limit_s=60)
        assert (after.stdout, after.oom_kills, after.kind) == (b"alive\n", 0, ExecKind.EXITED)

    in_sandbox(backend, work, limits=Limits(memory_bytes=128 * MIB))


@on_every_backend
def test_2_one_process_meets_the_end_of_its_address_space(backend: str) -> None:
    result = python(backend, "bytearray(200 << 20)", limits=Limits(memory_bytes=128 * MIB))
    assert (result.kind, result.exit_code) == (ExecKind.EXITED, 1)
    assert b"MemoryError" in result.stderr


FILL = """
import sys
block, total = bytes(1 << 16), 0
try:
    for number in range(64):
        with open(f"{sys.argv[1]}/part-{number}", "wb", buffering=0) as file:
            for _ in range(16):
                total += file.write(block)
except OSError as error:
    print(error.errno, total, flush=True)
else:
    # Whoever watches comes by.
    import time; time.sleep(600)
"""


@on_every_backend
def test_3_the_private_directory_is_bounded(backend: str) -> None:
    async def work(sandbox: ServedSandbox) -> None:
        command = [*sandbox.python_argv, "-c", FILL, sandbox.scratch]
        result = await sandbox.exec(command, wall_limit_s=60)
        if sandbox.isolation.disk is Guard.WATCHED:
            assert result.kind is ExecKind.OVER_LIMIT
            return
        number, total = map(int, result.stdout.split())
        # 28 is ENOSPC.
        assert number == 28
        assert 3 * MIB < total <= 4 * MIB

    in_sandbox(backend, work, limits=Limits(scratch_bytes=4 * MIB))


@needs_bubblewrap
def test_3_shared_memory_is_bounded_and_nothing_else_is_writable() -> None:
    async def work(sandbox: ServedSandbox) -> None:
        result = await sandbox.exec([*sandbox.python_argv, "-c", FILL, "/dev/shm"], wall_limit_s=60)
        number, total = map(int, result.stdout.split())
        assert (number, total <= 4 * MIB) == (28, True)
        script = (
            "for d in $(find / -xdev -type d; find /dev -type d); do touch $d/x 2>/dev/null && echo $d; done"
        )
        writable = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)
        assert set(writable.stdout.decode().split()) <= {"/tmp", "/dev/shm"}

    in_sandbox("bubblewrap", work, limits=Limits(scratch_bytes=4 * MIB))


@on_every_backend
def test_5_the_number_and_size_of_files_are_bounded(backend: str) -> None:
    code = """
import sys
def attempt(work):
    try:
        return work()
    except OSError as error:
        return error.errno
def sparse():
    with open("sparse", "wb") as file:
        file.truncate(1 << 40)
def descriptors():
    kept = [open("/dev/null") for _ in range(100)]
print(attempt(sparse), attempt(descriptors), flush=True)
for folder in sys.argv[1:]:
    for number in range(3000):
        if attempt(lambda: open(f"{folder}/empty-{number}", "w").close()):
            print(number)
            break
    else:
        # Whoever watches comes by.
        import time; time.sleep(600)
"""

    async def work(sandbox: ServedSandbox) -> None:
        folders = [".", "/dev/shm"] if sandbox.isolation.mountns else ["."]
        result = await sandbox.exec([*sandbox.python_argv, "-c", code, *folders], wall_limit_s=60)
        large, many, *numbers = map(int, result.stdout.split())
        # 27 is EFBIG, 24 is EMFILE.
        assert (large, many) == (27, 24)
        if sandbox.isolation.disk is Guard.WATCHED:
            assert result.kind is ExecKind.OVER_LIMIT
        else:
            assert len(numbers) == len(folders)
            assert max(numbers) <= 200

    in_sandbox(backend, work, limits=Limits(max_scratch_files=200))


SURVIVORS = {
    "setsid": "setsid sleep 7303 & sleep 600",
    "double fork": "(setsid sh -c 'sleep 7303 & exit' &) ; sleep 600",
    "nohup": "nohup setsid nohup sleep 7303 >/dev/null 2>&1 & sleep 600",
    "ignores TERM": "trap '' TERM; setsid sh -c \"trap '' TERM; sleep 7303; sleep 7303\" & sleep 7303",
    "stopped": "sh -c 'kill -STOP $$; sleep 600' & sleep 7303 & kill -STOP $!; kill -STOP $$",
}


@pytest.mark.parametrize("attack", SURVIVORS)
@on_every_backend
def test_6_nothing_survives_a_time_out(backend: str, attack: str) -> None:
    async def work(sandbox: ServedSandbox) -> None:
        started_at = time.monotonic()
        result = await sandbox.exec(["/bin/sh", "-c", SURVIVORS[attack]], wall_limit_s=0.5)
        assert time.monotonic() - started_at < 60
        assert result.kind is ExecKind.TIMED_OUT
        assert processes_with("7303") == []

    in_sandbox(backend, work)


@on_every_backend
def test_7_a_background_child_holds_nobody_up(backend: str) -> None:
    result = shell(backend, "(sleep 7304; echo late) & cat; exit 5", wall_limit_s=120)
    assert (result.kind, result.exit_code, result.stdout) == (ExecKind.EXITED, 5, b"")
    assert result.duration_s < 60
    assert processes_with("7304") == []


@on_every_backend
def test_8_endless_output_ends_at_the_cap_and_costs_no_memory(backend: str) -> None:
    # Of other tests, and no business of this one.
    before = set(find_descendants(os.getpid()))

    async def work(sandbox: ServedSandbox) -> None:
        script = "yes a-line-of-some-length & yes another >&2"
        result = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)
        assert result.kind is ExecKind.OUTPUT_FLOOD
        assert result.stdout_total + result.stderr_total > 8 * MIB
        assert len(result.stdout) <= 128 * 1024
        assert result.truncated
        # The other stream may have reached the cap first.
        head = b"a-line-of-some-length\n" * 100
        assert head.startswith(result.stdout[: len(head)])
        peaks = [peak_bytes(pid) for pid in find_descendants(os.getpid()) if pid not in before]
        assert max(peaks) < 64 * MIB

    in_sandbox(backend, work, limits=Limits(flood_bytes=8 * MIB))


@on_every_backend
def test_9_forged_frames_change_nothing(backend: str) -> None:
    code = r"""
import json, os, struct, sys
report = json.dumps({"status": 0, "kind": "exited", "exit_code": 0, "id": 0}).encode()
forged = struct.pack("!IQ", len(report), 0) + report
noise = b"\x00\xff\xfe\x1b[2J\x1b]0;x\x07" + "\u00e9".encode()[:1] + b"\nexit code: 0\n" + forged
for descriptor in range(3, 256):
    try:
        os.write(descriptor, forged)
        print("a descriptor too many:", descriptor)
    except OSError:
        pass
sys.stdout.buffer.write(noise)
sys.stdout.flush()
os._exit(9)
"""
    result = python(backend, code)
    report = json.dumps({"status": 0, "kind": "exited", "exit_code": 0, "id": 0}).encode()
    forged = len(report).to_bytes(4, "big") + bytes(8) + report
    assert result.stdout == b"\x00\xff\xfe\x1b[2J\x1b]0;x\x07\xc3\nexit code: 0\n" + forged
    assert (result.kind, result.exit_code) == (ExecKind.EXITED, 9)
