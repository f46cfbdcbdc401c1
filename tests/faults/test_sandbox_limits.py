"""Limits on memory miss what programs hold outside their processes, and full files end in kills."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.sandboxes import IS_ROOT, needs_bubblewrap, needs_podman

MIB = 1 << 20

HOLD = """
import time
SIZE = 160 << 20
{body}
print("made", flush=True)
time.sleep(1.0)
print("held")
"""
HOLDERS = {
    "memfds": """
import os
made = [os.memfd_create("x") for _ in range(20)]
for one in made:
    os.ftruncate(one, SIZE // 20)
    for _ in range(SIZE // 20 >> 20):
        os.write(one, bytes(1 << 20))
""",
    "shared-anonymous": """
import mmap
made = [mmap.mmap(-1, SIZE // 20) for _ in range(20)]
for one in made:
    one.write(bytes(SIZE // 20))
    one.madvise(mmap.MADV_DONTNEED)
""",
    "system-v": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(20):
    segment = libc.shmget(0, SIZE // 20, 0o600)
    place = libc.shmat(segment, None, 0)
    ctypes.memset(place, 1, SIZE // 20)
    libc.shmdt(ctypes.c_void_p(place))
""",
}
FILL = """
import errno
seen = []
for folder in FOLDERS:
    for number in range(200):
        try:
            with open(f"{folder}/{number}", "wb", 0) as file:
                file.write(bytes(1 << 20))
        except OSError as error:
            seen.append(error.errno)
            break
print(seen)
"""
TRY = """
import asyncio, json, sys
from strop.sandbox import IsolationLevel, Limits, SandboxSpec, make_backend
backend, sizes, codes = json.loads(sys.argv[1])
async def main():
    spec = SandboxSpec(limits=Limits(**sizes), min_level=IsolationLevel.NONE)
    async with await make_backend(backend).create(spec) as sandbox:
        ends = []
        for code in codes:
            result = await sandbox.exec([*sandbox.python_argv, "-c", code], wall_limit_s=60)
            ends.append([result.kind, result.oom_kills, result.exit_code, result.stdout.decode()])
        print(json.dumps({"memory": sandbox.isolation.memory, "ends": ends}))
asyncio.run(main())
"""
WITHOUT_GROUPS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh")

on_both = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("bubblewrap", marks=needs_bubblewrap),
        pytest.param("podman", marks=[needs_podman, pytest.mark.slow]),
    ],
)


def attempt(
    backend: str, sizes: dict[str, int], *codes: str, ahead: tuple[str, ...] = ()
) -> tuple[str, list[tuple[str, int, int | None, str]]]:
    """Run Python programs one after the other in a new sandbox; return the limit's kind, and the ends."""
    done = subprocess.run(
        [*ahead, sys.executable, "-c", TRY, json.dumps([backend, sizes, codes])],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return found["memory"], [(kind, kills, code, out) for kind, kills, code, out in found["ends"]]


@pytest.mark.skipif(not IS_ROOT or shutil.which("unshare") is None, reason="needs a mount namespace, as root")
@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("backend", ["process", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_without_control_groups_memory_outside_processes_counts(backend: str, name: str) -> None:
    sizes = {"memory_bytes": 96 * MIB, "scratch_bytes": 16 * MIB, "has_address_limit": False}
    codes = (HOLD.format(body=HOLDERS[name]), "import time; time.sleep(0.3)", "print('as usual')")
    memory, (first, _, third) = attempt(backend, sizes, *codes, ahead=WITHOUT_GROUPS)
    assert memory == "watched"
    kind, kills, _, out = first
    # A segment stays when its maker has ended; the kill of the next program frees it.
    assert (kind, kills) == ("oom", 1), out
    assert "held" not in out
    assert third[0] == "exited"


@on_both
@pytest.mark.parametrize(("memory_mib", "disk_mib"), [(64, 96), (96, 32)])
def test_full_files_end_with_an_error_and_not_with_a_kill(
    backend: str, memory_mib: int, disk_mib: int
) -> None:
    sizes = {
        "memory_bytes": memory_mib * MIB,
        "scratch_bytes": disk_mib * MIB,
        "file_bytes": 200 * MIB,
        "has_address_limit": False,
    }
    fill = FILL.replace("FOLDERS", '("/tmp", "/dev/shm")')
    memory, (full, use) = attempt(backend, sizes, fill, f"print(len(bytearray({memory_mib * MIB // 4})))")
    if memory != "enforced":
        pytest.skip("control groups (none may be made here)")
    assert full == ("exited", 0, 0, f"[{errno.ENOSPC}, {errno.ENOSPC}]\n")
    assert use[:3] == ("exited", 0, 0)


@on_both
def test_memory_that_no_kill_frees_is_freed_or_the_sandbox_is_lost(backend: str) -> None:
    sizes = {"memory_bytes": 64 * MIB, "scratch_bytes": 16 * MIB, "has_address_limit": False}
    codes = [HOLD.format(body=HOLDERS["system-v"])] * 2 + ["print(len(bytearray(40 << 20)))"]
    memory, (first, second, last) = attempt(backend, sizes, *codes)
    if memory != "enforced":
        pytest.skip("control groups (none may be made here)")
    assert [first[0], second[0]] == ["oom", "oom"]
    assert last == ("exited", 0, 0, f"{40 << 20}\n")


def _own_group() -> Path | None:
    """Return this process's group of version 2, if it has a controller of memory that groups may get."""
    inside = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/"
    )
    path = Path("/sys/fs/cgroup", inside.strip("/"))
    controllers = path / "cgroup.controllers"
    return path if controllers.exists() and "memory" in controllers.read_text().split() else None


@needs_bubblewrap
@pytest.mark.skipif(not IS_ROOT or _own_group() is None, reason="needs control groups of version 2, as root")
def test_version_2_limits_memory_though_strop_itself_is_in_the_group() -> None:
    own = _own_group()
    assert own is not None
    parent = Path("/sys/fs/cgroup")
    group = parent / f"strop-test-{os.getpid()}"
    (parent / "cgroup.subtree_control").write_text("+memory +pids")
    group.mkdir()
    try:
        join = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        sizes = {"memory_bytes": 64 * MIB, "scratch_bytes": 16 * MIB, "has_address_limit": False}
        memory, (first, last) = attempt(
            "bubblewrap", sizes, HOLD.format(body=HOLDERS["memfds"]), "print(1)", ahead=join
        )
    finally:
        for path in (*group.glob("*/"), group):
            path.rmdir()
    assert memory == "enforced"
    assert first[0] == "oom"
    assert last == ("exited", 0, 0, "1\n")
