"""Attacks on the sandbox from inside. What counts is what can be seen from outside.

Numbers are those of the list of attacks that a level of isolation stands for. Network attacks meet only
listeners that the test itself opened on the loopback interface.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from strop.errors import SandboxLost
from strop.sandbox import ExecKind, Guard, IsolationLevel, Limits, Mount, Sandbox, make_backend
from strop.sandbox.contract import MIB
from strop.sandbox.family import find_descendants
from tests.fixtures.sandboxes import (
    IS_ROOT,
    in_sandbox,
    needs_bubblewrap,
    on_every_backend,
    processes_with,
    python,
    shell,
    spec_of,
    where_users_differ,
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
time.sleep(0.5)
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
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(60 << 20)
        block[::4096] = b"x" * len(block[::4096])
        time.sleep(1)
        os._exit(0)
for _ in range(4):
    os.wait()
"""


@on_every_backend
def test_2_memory_is_bounded_and_the_kill_is_seen_behind_exit_0(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.write("balloon.py", BALLOON.encode())
        python_words = " ".join(sandbox.python_argv)
        # 4 x 60 MiB do not fit into 128 MiB; the pipeline ends with 0 all the same.
        result = await sandbox.exec(
            ["/bin/sh", "-c", f"{python_words} balloon.py | cat; exit 0"], wall_limit_s=20
        )
        assert (result.kind, result.exit_code) == (ExecKind.OOM, 0)
        assert result.oom_kills >= 1
        after = await sandbox.exec(["/bin/echo", "alive"], wall_limit_s=10)
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
import time; time.sleep(1)
"""


@on_every_backend
def test_3_the_private_directory_is_bounded(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        command = [*sandbox.python_argv, "-c", FILL, sandbox.scratch]
        result = await sandbox.exec(command, wall_limit_s=20)
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
    async def work(sandbox: Sandbox) -> None:
        result = await sandbox.exec([*sandbox.python_argv, "-c", FILL, "/dev/shm"], wall_limit_s=20)
        number, total = map(int, result.stdout.split())
        assert (number, total <= 4 * MIB) == (28, True)
        script = "for d in $(find / -xdev -type d; find /dev -type d); do touch $d/x 2>/dev/null && echo $d; done"
        writable = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=20)
        assert set(writable.stdout.decode().split()) <= {"/tmp", "/dev/shm"}

    in_sandbox("bubblewrap", work, limits=Limits(scratch_bytes=4 * MIB))


@on_every_backend
def test_5_the_number_and_size_of_files_are_bounded(backend: str) -> None:
    code = """
import resource
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
for number in range(3000):
    if attempt(lambda: open(f"empty-{number}", "w").close()):
        break
import time; time.sleep(1)
"""
    result = python(backend, code, limits=Limits(max_scratch_files=200))
    # 27 is EFBIG, 24 is EMFILE.
    assert result.stdout == b"27 24\n"
    if not (backend == "process" and IS_ROOT):
        assert result.kind is ExecKind.OVER_LIMIT


SURVIVORS = {
    "setsid": "setsid sleep 7303 & sleep 60",
    "double fork": "(setsid sh -c 'sleep 7303 & exit' &) ; sleep 60",
    "nohup": "nohup setsid nohup sleep 7303 >/dev/null 2>&1 & sleep 60",
    "ignores TERM": "trap '' TERM; setsid sh -c \"trap '' TERM; sleep 7303; sleep 7303\" & sleep 7303; sleep 60",
    "stopped": "sh -c 'kill -STOP $$; sleep 60' & sleep 7303 & kill -STOP $!; kill -STOP $$",
}


@pytest.mark.parametrize("attack", SURVIVORS)
@on_every_backend
def test_6_nothing_survives_a_time_out(backend: str, attack: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        started_at = time.monotonic()
        result = await sandbox.exec(["/bin/sh", "-c", SURVIVORS[attack]], wall_limit_s=0.5)
        assert time.monotonic() - started_at < 2.5
        assert result.kind is ExecKind.TIMED_OUT
        assert processes_with("7303") == []

    in_sandbox(backend, work)


@on_every_backend
def test_7_a_background_child_holds_nobody_up(backend: str) -> None:
    result = shell(backend, "(sleep 7304; echo late) & cat; exit 5", wall_limit_s=30)
    assert (result.kind, result.exit_code, result.stdout) == (ExecKind.EXITED, 5, b"")
    assert result.duration_s < 10
    assert processes_with("7304") == []


@on_every_backend
def test_8_endless_output_ends_at_the_cap_and_costs_no_memory(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        script = "yes a-line-of-some-length & yes another >&2"
        result = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)
        assert result.kind is ExecKind.OUTPUT_FLOOD
        assert result.stdout_total + result.stderr_total > 8 * MIB
        assert len(result.stdout) <= 128 * 1024
        assert result.truncated
        assert result.stdout.startswith(b"a-line-of-some-length\n" * 100)
        peaks = [_peak_bytes(pid) for pid in find_descendants(os.getpid())]
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


SEARCH = r"""
import os, sys
word = bytes.fromhex(sys.argv[1])
found = set()
for top in ("/proc/self/mountinfo", "/proc/self/environ"):
    if word in open(top, "rb").read():
        found.add(top)
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in sys.argv[2:]:
        try:
            if word in open(f"/proc/{pid}/{name}", "rb").read():
                found.add(name)
        except OSError:
            pass
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            if word in os.readlink(f"/proc/{pid}/fd/{descriptor}").encode():
                found.add("fd")
    except OSError:
        pass
print(sorted(found), len(os.listdir("/proc/self/fd")))
"""


@where_users_differ
def test_11_a_planted_secret_is_nowhere(backend: str, tmp_path: Path) -> None:
    canary = "canary-5d0c2f"
    secret_path = tmp_path / canary
    secret_path.touch()
    # Every user of a host may read command lines; only other processes hidden altogether prevent that.
    names = ["environ", "cmdline"] if backend == "bubblewrap" else ["environ"]
    argv = ["/bin/sleep", "30"] if backend == "process" else ["/bin/sh", "-c", f": {canary}; sleep 30"]
    with secret_path.open() as held:
        holder = subprocess.Popen(argv, env={"SECRET": canary}, stdin=held)
        try:
            result = in_sandbox(
                backend,
                lambda sandbox: sandbox.exec(
                    [*sandbox.python_argv, "-c", SEARCH, canary.encode().hex(), *names], wall_limit_s=20
                ),
            )
        finally:
            holder.kill()
            holder.wait()
    # Four descriptors: three streams and the listing itself.
    assert result.stdout == b"[] 4\n", result.stderr


@where_users_differ
def test_13_killing_everybody_ends_nothing_but_oneself(backend: str) -> None:
    async def run() -> None:
        async with await make_backend(backend).create(spec_of()) as sandbox:
            code = "import os; os.kill(-1, 19); os.kill(-1, 9)"
            result = await sandbox.exec([*sandbox.python_argv, "-c", code], wall_limit_s=5)
            if IS_ROOT:
                # kill(-1) spares the caller and reaches nobody else.
                assert result.kind is ExecKind.EXITED
                assert (await sandbox.exec(["/bin/true"], wall_limit_s=10)).exit_code == 0
                return
            assert result.kind in (ExecKind.FROM_INSIDE, ExecKind.TIMED_OUT)
            with pytest.raises(SandboxLost) as caught:
                await sandbox.exec(["/bin/true"], wall_limit_s=10)
            assert caught.value.kind == "from_inside"

    asyncio.run(run())


@where_users_differ
def test_14_secrets_of_the_host_cannot_be_read(backend: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of the host\n")
    (tmp_path / "secret").chmod(0o600)
    paths = [str(tmp_path / "secret"), "/etc/shadow", str(Path.home() / ".profile")]
    result = shell(backend, "; ".join(f"cat '{path}'" for path in paths) + "; ls -A " + str(tmp_path))
    assert result.stdout == b""


@needs_bubblewrap
def test_14_only_declared_paths_are_there(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/file").write_text("seen\n")
    mounts = (Mount(host_path=str(tmp_path / "given"), inside_path="/data"),)

    async def work(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["/bin/sh", "-c", "cat /data/file; echo x > /data/file; ls /"], wall_limit_s=10)
        prefix_tops = {sandbox.python_argv[0].split("/")[1]}
        seen, *names = result.stdout.decode().split()
        usual = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "proc", "dev", "tmp", "data"}
        assert seen == "seen"
        assert set(names) - usual <= prefix_tops | {"root", "home", "opt"}
        etc = await sandbox.exec(["/bin/ls", "-A", "/etc"], wall_limit_s=10)
        assert set(etc.stdout.decode().split()) <= {"ld.so.cache", "alternatives"}

    in_sandbox("bubblewrap", work, mounts=mounts)
    assert (tmp_path / "given/file").read_text() == "seen\n"


@needs_bubblewrap
def test_14_a_mount_that_is_declared_writable_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    mounts = (Mount(host_path=str(tmp_path / "out"), inside_path="/out", read_only=False),)
    in_sandbox(
        "bubblewrap",
        lambda sandbox: sandbox.exec(["/bin/sh", "-c", "echo made > /out/file"], wall_limit_s=10),
        mounts=mounts,
    )
    assert (tmp_path / "out/file").read_text() == "made\n"


@where_users_differ
def test_15_the_host_cannot_be_written(backend: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("as it was")
    here = Path(__file__)
    before = here.read_bytes()
    paths = [str(target), str(here), "/etc/hostname", "/usr/bin/true", "/usr/new", "/etc/new", "/new"]
    result = shell(backend, "; ".join(f"(echo x >> '{path}') 2>/dev/null && echo '{path}'" for path in paths))
    assert result.stdout == b""
    assert target.read_text() == "as it was"
    assert here.read_bytes() == before
    assert not any(Path(path).exists() for path in ("/usr/new", "/etc/new", "/new"))


@needs_bubblewrap
def test_16_no_listener_of_the_host_is_reached() -> None:
    abstract = f"\0strop-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as local,
    ):
        local.bind(abstract)
        local.listen()
        port = listener.getsockname()[1]
        code = f"""
import os, socket
def attempt(work):
    try:
        work()
        return "reached"
    except OSError as error:
        return type(error).__name__
def abstract():
    socket.socket(socket.AF_UNIX).connect({abstract!r})
print(
    attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 2)),
    attempt(abstract),
    attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    [name for _, name in socket.if_nameindex()],
)
"""
        heard: list[str] = []
        thread = threading.Thread(target=_hear, args=(listener, heard), daemon=True)
        thread.start()
        result = python("bubblewrap", code)
        thread.join()
    assert result.stdout == b"ConnectionRefusedError ConnectionRefusedError PermissionError ['lo']\n", result.stderr
    assert heard == []


@on_every_backend
def test_16_the_record_says_whose_network_it_is(backend: str) -> None:
    async def work(sandbox: Sandbox) -> str:
        return sandbox.isolation.network

    assert in_sandbox(backend, work) == ("none" if backend == "bubblewrap" else "host")


ESCAPES = r"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, result):
    print(name, "done" if result == 0 else ctypes.get_errno())
attempt("mount", libc.mount(b"none", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None))
attempt("user namespace", libc.unshare(0x10000000))
attempt("mount namespace", libc.unshare(0x00020000))
attempt("mknod", libc.mknod(b"/tmp/disk", 0o60600, 0xfe00))
attempt("chroot", libc.chroot(b"/tmp"))
attempt("ptrace of 1", libc.ptrace(16, 1, None, None))
attempt("setuid", libc.setuid(0))
attempt("host name", libc.sethostname(b"x", 1))
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/sys/kernel/mm/ksm/run", "/proc/1/mem"):
    try:
        open(path, "r+b", buffering=0).write(b"0")
        print(path, "done")
    except OSError as error:
        print(path, error.errno)
"""


@needs_bubblewrap
def test_18_no_way_to_more_rights_is_open() -> None:
    result = python("bubblewrap", ESCAPES)
    assert result.kind is ExecKind.EXITED
    lines = result.stdout.decode().splitlines()
    assert len(lines) == 12
    assert [line for line in lines if line.endswith("done")] == []


@on_every_backend
def test_19_a_set_uid_program_gains_nothing(backend: str) -> None:
    script = "grep -E 'NoNewPrivs|Cap(Prm|Eff|Amb)' /proc/self/status; umask; id -u > a; (su -c true || true) 2>/dev/null"
    result = shell(backend, script)
    words = result.stdout.decode().split()
    zeros = "0000000000000000"
    assert words == ["CapPrm:", zeros, "CapEff:", zeros, "CapAmb:", zeros, "NoNewPrivs:", "1", "0022"]


@where_users_differ
def test_23_one_sandbox_neither_sees_nor_signals_another(backend: str) -> None:
    async def run() -> None:
        kind = make_backend(backend)
        async with await kind.create(spec_of()) as first, await kind.create(spec_of()) as second:
            await first.write("secret", b"of the first\n")
            running = asyncio.create_task(first.exec(["/bin/sleep", "7305"], wall_limit_s=30))
            while not processes_with("7305"):
                await asyncio.sleep(0.02)
            (pid,) = processes_with("7305")
            other = second.scratch.replace("/tmp", "/tmp", 1)
            script = f"kill -9 {pid} 2>/dev/null && echo killed; cat '{first.scratch}/secret' 2>/dev/null; ls -A {other}"
            seen = await second.exec(["/bin/sh", "-c", script], wall_limit_s=10)
            assert seen.stdout == b""
            assert processes_with("7305") == [pid]
            if backend == "bubblewrap":
                count = await second.exec(["/bin/sh", "-c", "ls -d /proc/[0-9]* | wc -l"], wall_limit_s=10)
                # Process 1, the one above the command, and the command's own.
                assert int(count.stdout) <= 6
            running.cancel()

    asyncio.run(run())


@needs_bubblewrap
def test_24_the_host_is_not_named() -> None:
    assert shell("bubblewrap", "uname -n; id -u").stdout == b"sandbox\n1000\n"


@where_users_differ
def test_what_was_reached_is_recorded(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        reached = sandbox.isolation
        assert reached.backend == backend
        assert reached.no_new_privs
        assert reached.caps.startswith("0/")
        assert reached.host_uid != 0
        assert Guard.NONE not in (reached.memory, reached.pids, reached.disk, reached.files)
        if backend == "process":
            assert reached.level is IsolationLevel.RLIMIT
            assert not (reached.pidns or reached.netns or reached.userns)
        else:
            assert reached.level is IsolationLevel.NAMESPACE
            assert reached.userns
            assert reached.pidns
            assert reached.mountns
            assert reached.netns
            assert not reached.nested_userns
            assert reached.host_root_maps_to == "unmapped"
            assert (reached.pids, reached.disk) == (Guard.ENFORCED, Guard.ENFORCED)

    in_sandbox(backend, work)


def _hear(listener: socket.socket, heard: list[str]) -> None:
    listener.settimeout(2)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return
    with connection:
        heard.append("somebody")


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
