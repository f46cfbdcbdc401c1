"""Attacks that exhaust the machine's resources: rows 1 to 10.

All are bounded, so the machine survives them even without limits.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial

from strop.sandbox.attack.contract import (
    SMALL,
    Attack,
    Code,
    Observation,
    always,
    attack,
    by_limit,
    by_namespace,
)
from strop.sandbox.attack.leaks import planted_files
from strop.sandbox.attack.stage import Stage, peak_bytes
from strop.sandbox.contract import MIB, ExecKind, ExecResult, Guard
from strop.sandbox.family import memory_bytes, num_threads
from strop.sandbox.frames import pack
from strop.sandbox.linux import read_or_empty

ATTACKS: list[Attack] = []
_SURVIVE_S = 0.2
_CPUS = 0.5
_FLOOD_BYTES = 4 * MIB
_MAX_SUPERVISOR_BYTES = 64 * MIB
_GUARDED = {Guard.ENFORCED: Code.CONTAINED, Guard.WATCHED: Code.DETECTED, Guard.NONE: Code.EXPOSED}

# 256 processes at most.
_BOMB = """
for _ in range(8):
    attempt(os.fork)
hold()
"""
_THREADS = """
import threading
threading.stack_size(1 << 16)
for _ in range(200):
    try:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError:
        break
hold()
"""
_CHILDREN = "i=0; while [ $i -lt 100 ]; do sleep 600 & i=$((i+1)); done"
_BALLOON = """
children = set()
all_there, begin = os.pipe()
for _ in range(4):
    if (child := os.fork()) == 0:
        os.close(begin)
        # A fork may fail where memory is short already.
        os.read(all_there, 1)
        block = bytearray(40 << 20)
        block[::4096] = b"x" * len(block[::4096])
        time.sleep(600)
    children.add(child)
os.close(begin)
# All stay until one of them is killed.
children.remove(os.wait()[0])
for child in children:
    os.kill(child, signal.SIGKILL)
    os.wait()
"""
_FILL = """
block, folders = bytes(1 << 16), sys.argv[2:]
for folder in folders:
    for number in range(16):
        path = f"{folder}/{TOKEN}-{number}"
        file = attempt(open, path, "wb", 0)
        if file is None:
            break
        with file:
            for _ in range(16):
                attempt(file.write, block)
hold()
"""
_INODES = """
for folder in sys.argv[2:]:
    for number in range(2000):
        made = attempt(os.open, f"{folder}/{TOKEN}-{number}", os.O_CREAT | os.O_EXCL, 0o600)
        if made is None:
            break
        os.close(made)
hold()
"""
_DESCRIPTORS = """
kept = []
while len(kept) < 20000 and (one := attempt(os.open, "/dev/null", os.O_RDONLY)) is not None:
    kept.append(one)
# One more for the name.
os.close(kept.pop()) if kept else None
hold()
"""
_SPARSE = """
with open(TOKEN, "wb") as file:
    attempt(file.truncate, 1 << 40)
"""
_SPIN = """
for _ in range(3):
    os.fork()
end = time.monotonic() + 0.8
while time.monotonic() < end:
    {body}
"""


@attack(
    ATTACKS,
    1,
    tries="each process forks, eight times over",
    judged="tasks of the sandbox, counted on the host",
    expects=by_limit("pids"),
)
async def _fork_bomb(stage: Stage) -> Observation:
    return await _count_tasks(stage, _BOMB)


@attack(
    ATTACKS,
    1,
    tries="200 threads",
    judged="tasks of the sandbox, counted on the host",
    expects=by_limit("pids"),
)
async def _thread_bomb(stage: Stage) -> Observation:
    return await _count_tasks(stage, _THREADS)


async def _count_tasks(stage: Stage, code: str) -> Observation:
    async with stage.held(code) as (_, result):
        if result is not None:
            return _by_end(result)
        # Give the watch time to notice.
        await asyncio.sleep(_SURVIVE_S)
        tasks = [pid for pid in stage.strays() if stage.token in read_or_empty(f"/proc/{pid}/cmdline")]
        num = num_threads(tasks)
    limit = SMALL.max_processes
    if num == 0:
        return Observation(Code.DETECTED, "it was killed for its number of processes")
    return Observation(
        Code.CONTAINED if num <= limit else Code.EXPOSED, f"{num} tasks at once, {limit} allowed"
    )


@attack(
    ATTACKS,
    1,
    tries="100 children in the background, and an end",
    judged="processes on the host that are left",
    expects=always(Code.CONTAINED),
)
async def _background_children(stage: Stage) -> Observation:
    result = await stage.shell(_CHILDREN)
    left = await stage.survivors()
    code = Code.EXPOSED if left else Code.CONTAINED
    return Observation(code, f"{left} of its children live on after {result.kind.value}")


@attack(
    ATTACKS,
    2,
    tries="four processes of 40 MiB behind a pipeline that ends with 0",
    judged="the count of kills, and the memory of its processes as the host sees it",
    expects=by_limit("memory"),
)
async def _memory_balloon(stage: Stage) -> Observation:
    await stage.sandbox.write("balloon.py", b"import os, signal, time\n" + _BALLOON.encode())
    script = f"{' '.join(stage.sandbox.python_argv)} balloon.py | cat; exit 0"
    running = asyncio.create_task(stage.shell(script))
    limit = SMALL.memory_bytes
    peak = max(await stage.sample(running, lambda pids: memory_bytes(pids, limit)), default=0)
    result = await running
    what = (
        f"{result.oom_kills} killed behind exit code {result.exit_code}, peak {peak / limit:.1f} of the limit"
    )
    if result.oom_kills == 0 or peak > 2 * limit or await stage.is_alive() != "alive":
        return Observation(Code.EXPOSED, what)
    return Observation(_GUARDED[stage.isolation.memory], what)


@attack(
    ATTACKS,
    3,
    tries="16 MiB into /tmp, /var/tmp and /dev/shm each",
    judged="files in the host's directories of these names, and sizes inside",
    expects=by_namespace("mountns", Code.CONTAINED),
)
async def _fill_shared_directories(stage: Stage) -> Observation:
    folders = [folder for folder in ("/tmp", "/dev/shm", "/var/tmp") if folder != stage.sandbox.scratch]
    return await _fill(stage, [*folders, stage.sandbox.scratch] if stage.isolation.mountns else folders)


@attack(
    ATTACKS,
    4,
    tries="16 MiB into the private directory",
    judged="the size of what is there, or the kill",
    expects=by_limit("disk"),
)
async def _fill_private_directory(stage: Stage) -> Observation:
    return await _fill(stage, [stage.sandbox.scratch])


@attack(
    ATTACKS,
    4,
    tries="16 MiB into every other directory that can be written",
    judged="sizes of what is there",
    expects=always(Code.CONTAINED),
)
async def _fill_root(stage: Stage) -> Observation:
    # The host's root may be large, so it is not searched deeply.
    depth = "" if stage.isolation.mountns else "-maxdepth 1"
    search = f"find / /dev {depth} -xdev -type d 2>/dev/null"
    listing = await stage.measure(f"for d in $({search}); do [ -w $d ] && echo $d; done")
    private = {stage.sandbox.scratch, "/tmp", "/dev/shm"}
    folders = [path for path in listing.split() if path not in private and not path.startswith("/proc")]
    if not folders:
        return Observation(Code.BLOCKED, "no other directory can be written")
    return await _fill(stage, folders[:8])


async def _fill(stage: Stage, folders: list[str]) -> Observation:
    """Write 16 MiB into each directory; judge by the sizes that a command of the suite measures."""
    limit = SMALL.scratch_bytes
    async with stage.held(_FILL, *folders) as (_, result):
        if result is not None:
            return _by_end(result)
        await asyncio.sleep(_SURVIVE_S)
        if not stage.named():
            return Observation(Code.DETECTED, "it was killed for its files")
        sizes = [
            int(
                await stage.measure(f"du -skc {folder}/{stage.token}-* 2>/dev/null | tail -n 1 | cut -f 1")
                or 0
            )
            << 10
            for folder in folders
        ]
        on_host = planted_files(stage.token)
    for path in on_host:
        with suppress(OSError):
            path.unlink()
    if on_host:
        return Observation(
            Code.EXPOSED, f"files of other programs' directories grew: {len(on_host)} in {on_host[0].parent}"
        )
    code = Code.CONTAINED if max(sizes) <= limit else Code.EXPOSED
    return Observation(
        code, f"at most {max(sizes) / MIB:.1f} MiB in one directory, {limit / MIB:.0f} allowed"
    )


@attack(
    ATTACKS,
    5,
    tries="2,000 empty files in each directory that can be written",
    judged="files that are there, or the kill",
    expects=by_limit("disk"),
)
async def _many_files(stage: Stage) -> Observation:
    folders = [stage.sandbox.scratch, "/dev/shm"] if stage.isolation.mountns else [stage.sandbox.scratch]
    limit = SMALL.max_scratch_files
    async with stage.held(_INODES, *folders) as (_, result):
        if result is not None:
            return _by_end(result)
        await asyncio.sleep(_SURVIVE_S)
        if not stage.named():
            return Observation(Code.DETECTED, "it was killed for the number of its files")
        nums = [int(await stage.measure(f"ls -A {folder} | wc -l") or 0) for folder in folders]
    code = Code.CONTAINED if max(nums) <= limit else Code.EXPOSED
    return Observation(code, f"at most {max(nums)} files in one directory, {limit} allowed")


@attack(
    ATTACKS,
    5,
    tries="20,000 open files",
    judged="descriptors of its process, counted on the host",
    expects=always(Code.CONTAINED),
)
async def _many_descriptors(stage: Stage) -> Observation:
    async with stage.held(_DESCRIPTORS) as (pids, result):
        if result is not None:
            return _by_end(result)
        num = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    limit = SMALL.max_open_files
    return Observation(
        Code.CONTAINED if num <= limit else Code.EXPOSED, f"{num} descriptors, {limit} allowed"
    )


@attack(
    ATTACKS,
    5,
    tries="a file of 1 TiB without blocks",
    judged="the size of the file",
    expects=always(Code.BLOCKED),
)
async def _sparse_file(stage: Stage) -> Observation:
    await stage.python(_SPARSE)
    size = int(await stage.measure(f"stat -c %s {stage.token}") or 0)
    code = Code.BLOCKED if size == 0 else Code.CONTAINED if size <= SMALL.file_bytes else Code.EXPOSED
    return Observation(code, f"the file has {size} bytes")


async def _outlive(stage: Stage, script: str) -> Observation:
    result = await stage.shell(script, wall_limit_s=0.3)
    left = await stage.survivors()
    is_kept = result.kind is ExecKind.TIMED_OUT and left == 0
    return Observation(
        Code.CONTAINED if is_kept else Code.EXPOSED, f"{result.kind.value}, {left} processes live on"
    )


ATTACKS += [
    Attack(
        row=6,
        name=f"outlive-{way.replace(' ', '-')}",
        tries=f"live on behind the time limit: {way}",
        judged="processes on the host after the result",
        expects=always(Code.CONTAINED),
        work=partial(_outlive, script=script),
    )
    for way, script in {
        "setsid": "setsid sleep 600 & sleep 600",
        "double fork": "(setsid sh -c 'sleep 600 & exit' &); sleep 600",
        "nohup": "nohup setsid nohup sleep 600 >/dev/null 2>&1 & sleep 600",
        "ignored term": "trap '' TERM; setsid sh -c \"trap '' TERM; sleep 600; sleep 600\" & sleep 600",
        "stopped": "sh -c 'kill -STOP $$; sleep 600' & sleep 600 & kill -STOP $!; kill -STOP $$",
    }.items()
]


@attack(
    ATTACKS,
    7,
    tries="a child in the background holds the output open, and an empty input is read",
    judged="time and kind of the result",
    expects=always(Code.CONTAINED),
)
async def _held_output(stage: Stage) -> Observation:
    result = await stage.shell("(sleep 600; echo late) & cat; exit 5")
    is_kept = (result.kind, result.exit_code, result.stdout) == (ExecKind.EXITED, 5, b"")
    is_kept = is_kept and await stage.survivors() == 0
    return Observation(
        Code.CONTAINED if is_kept else Code.EXPOSED, f"{result.kind.value}, exit code {result.exit_code}"
    )


@attack(
    ATTACKS,
    8,
    tries="endless output on both streams",
    judged="kind and totals of the result, and the memory of who reads it",
    expects=always(Code.CONTAINED),
    limits=replace(SMALL, flood_bytes=_FLOOD_BYTES),
)
async def _output_flood(stage: Stage) -> Observation:
    result = await stage.shell("yes some-words & yes other-words >&2")
    kept, total = len(result.stdout) + len(result.stderr), result.stdout_total + result.stderr_total
    peak = peak_bytes(stage.sandbox.supervisor_pid)
    is_kept = result.kind is ExecKind.OUTPUT_FLOOD and result.truncated and peak < _MAX_SUPERVISOR_BYTES
    code = Code.CONTAINED if is_kept and total >= _FLOOD_BYTES else Code.EXPOSED
    return Observation(code, f"{result.kind.value} at {total >> 20} MiB, {kept >> 10} KiB kept")


_FORGED_REPORT = {"status": 0, "kind": "exited", "exit_code": 0, "id": 0, "stdout_bytes": 0}
_NOISE = b"\x00\xff\xfe\x1b[2J\x1b]0;x\x07\xc3\nexit code: 0\n__EXIT__0\n" + pack(_FORGED_REPORT)
_FORGE = """
noise = bytes.fromhex(sys.argv[2])
for descriptor in range(3, 256):
    attempt(os.write, descriptor, noise)
os.write(1, noise)
os._exit(9)
"""


@attack(
    ATTACKS,
    9,
    tries="results, exit markers, NUL, terminal escapes and half characters on every descriptor",
    judged="bytes, kind and exit code of the result",
    expects=always(Code.BLOCKED),
)
async def _forged_results(stage: Stage) -> Observation:
    result = await stage.python(_FORGE, _NOISE.hex())
    is_kept = (result.kind, result.exit_code, result.stdout) == (ExecKind.EXITED, 9, _NOISE)
    is_kept = is_kept and await stage.is_alive() == "alive"
    return Observation(
        Code.BLOCKED if is_kept else Code.EXPOSED,
        f"{result.kind.value}, exit code {result.exit_code}, {len(result.stdout)} bytes",
    )


@attack(
    ATTACKS,
    10,
    tries="eight processes that compute without end",
    judged="processor time by the kernel's account",
    expects=by_limit("cpu", Code.DETECTED),
    limits=replace(SMALL, cpus=_CPUS),
)
async def _spin(stage: Stage) -> Observation:
    return await _use_processor(stage, "pass")


@attack(
    ATTACKS,
    10,
    tries="eight processes that give the processor away without end",
    judged="processor time by the kernel's account",
    expects=by_limit("cpu", Code.DETECTED),
    limits=replace(SMALL, cpus=_CPUS),
)
async def _yield_storm(stage: Stage) -> Observation:
    return await _use_processor(stage, "os.sched_yield()")


async def _use_processor(stage: Stage, body: str) -> Observation:
    running = asyncio.create_task(stage.python(_SPIN.format(body=body)))
    slowest = 0.0
    while not running.done():
        slowest = max(slowest, await stage.control.answer_s())
    result = await running
    # A tenth more, and one scheduling period of the kernel.
    allowed = _CPUS * (result.duration_s + 0.1) * 1.1
    what = f"{result.cpu_s / result.duration_s:.2f} processors, {_CPUS} allowed"
    what += f"; the other sandbox answered in {slowest * 1000:.0f} ms"
    if result.cpu_s <= allowed:
        return Observation(Code.CONTAINED, what)
    # Detected, since the result has the CPU time.
    return Observation(Code.DETECTED if stage.isolation.cpu is Guard.NONE else Code.EXPOSED, what)


def _by_end(result: ExecResult) -> Observation:
    """Judge an attack that ended although it should hold."""
    code = Code.DETECTED if result.kind in {ExecKind.OVER_LIMIT, ExecKind.OOM} else Code.EXPOSED
    return Observation(code, f"it ended: {result.kind.value} {result.stderr[-200:].decode(errors='replace')}")
