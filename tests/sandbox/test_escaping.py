"""Attempts to get out of a sandbox. What counts is what can be seen from outside.

Numbers are those of the list of attacks that a level of isolation stands for. Network attacks meet only
listeners that the test itself opened on the loopback interface.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
from pathlib import Path

import pytest

from strop.errors import SandboxLost
from strop.sandbox import ExecKind, Guard, IsolationLevel, Mount, make_backend
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import (
    IS_ROOT,
    appearance_of,
    in_sandbox,
    needs_bubblewrap,
    on_every_backend,
    processes_with,
    python,
    shell,
    spec_of,
    where_users_differ,
)

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
    argv = ["/bin/sleep", "600"] if backend == "process" else ["/bin/sh", "-c", f": {canary}; sleep 600"]
    with secret_path.open() as held:
        holder = subprocess.Popen(argv, env={"SECRET": canary}, stdin=held)
        try:
            result = in_sandbox(
                backend,
                lambda sandbox: sandbox.exec(
                    [*sandbox.python_argv, "-c", SEARCH, canary.encode().hex(), *names], wall_limit_s=60
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
            result = await sandbox.exec([*sandbox.python_argv, "-c", code], wall_limit_s=60)
            if IS_ROOT:
                # kill(-1) spares the caller and reaches nobody else.
                assert result.kind is ExecKind.EXITED
                assert (await sandbox.exec(["/bin/true"], wall_limit_s=60)).exit_code == 0
                return
            assert result.kind in (ExecKind.FROM_INSIDE, ExecKind.TIMED_OUT)
            with pytest.raises(SandboxLost) as caught:
                await sandbox.exec(["/bin/true"], wall_limit_s=60)
            assert caught.value.kind == "from_inside"

    asyncio.run(run())


# Attach to process 1, set its next instruction to address 0 (16 is the place of rip), let it run into it.
TRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
if libc.ptrace(16, 1, 0, 0) != 0:
    raise SystemExit(ctypes.get_errno())
os.waitpid(1, 0x40000000)
assert libc.ptrace(6, 1, 16 * 8, 0) == 0
libc.ptrace(17, 1, 0, 0)
import time; time.sleep(600)
"""


@needs_bubblewrap
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a register of x86-64")
def test_13_who_would_break_process_1_is_kept_from_it_or_seen() -> None:
    async def run() -> None:
        async with await make_backend("bubblewrap").create(spec_of()) as sandbox:
            result = await sandbox.exec([*sandbox.python_argv, "-c", TRACE], wall_limit_s=60)
            if IS_ROOT:
                # 1 is EPERM: process 1 is a program that nobody inside can read.
                assert (result.kind, result.exit_code) == (ExecKind.EXITED, 1), result
                seen = await sandbox.exec(
                    ["/bin/sh", "-c", "cat /proc/1/maps /proc/1/environ"], wall_limit_s=60
                )
                assert (seen.exit_code, seen.stdout) == (1, b"")
                return
            assert (result.kind, result.exit_code) == (ExecKind.FROM_INSIDE, None), result
            with pytest.raises(SandboxLost) as caught:
                await sandbox.exec(["/bin/true"], wall_limit_s=60)
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

    async def work(sandbox: ServedSandbox) -> None:
        result = await sandbox.exec(
            ["/bin/sh", "-c", "cat /data/file; echo x > /data/file; ls /"], wall_limit_s=60
        )
        prefix_tops = {sandbox.python_argv[0].split("/")[1]}
        seen, *names = result.stdout.decode().split()
        usual = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "proc", "dev", "tmp", "data"}
        assert seen == "seen"
        assert set(names) - usual <= prefix_tops | {"root", "home", "opt"}
        etc = await sandbox.exec(["/bin/ls", "-A", "/etc"], wall_limit_s=60)
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
        lambda sandbox: sandbox.exec(["/bin/sh", "-c", "echo made > /out/file"], wall_limit_s=60),
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
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
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
    attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 30)),
    attempt(abstract),
    attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    [name for _, name in socket.if_nameindex()],
)
"""
        result = python("bubblewrap", code)
        # Whoever had come would be waiting.
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert result.stdout == b"ConnectionRefusedError ConnectionRefusedError PermissionError ['lo']\n", (
        result.stderr
    )


@on_every_backend
def test_16_the_record_says_whose_network_it_is(backend: str) -> None:
    async def work(sandbox: ServedSandbox) -> str:
        return sandbox.isolation.network

    assert in_sandbox(backend, work) == ("host" if backend == "process" else "none")


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
    assert len(lines) == 11
    assert [line for line in lines if line.endswith("done")] == []


@on_every_backend
def test_19_a_set_uid_program_gains_nothing(backend: str) -> None:
    result = shell(backend, "grep -E 'NoNewPrivs|Cap(Prm|Eff|Amb)' /proc/self/status; umask")
    words = result.stdout.decode().split()
    zeros = "0000000000000000"
    assert words == ["CapPrm:", zeros, "CapEff:", zeros, "CapAmb:", zeros, "NoNewPrivs:", "1", "0022"]


@where_users_differ
def test_23_one_sandbox_neither_sees_nor_signals_another(backend: str) -> None:
    async def run() -> None:
        kind = make_backend(backend)
        async with await kind.create(spec_of()) as first, await kind.create(spec_of()) as second:
            await first.write("secret", b"of the first\n")
            running = asyncio.create_task(first.exec(["/bin/sleep", "7305"], wall_limit_s=600))
            (pid,) = await appearance_of("7305")
            script = (
                f"kill -9 {pid} 2>/dev/null && echo killed; cat '{first.scratch}/secret' 2>/dev/null; ls -A"
            )
            seen = await second.exec(["/bin/sh", "-c", script], wall_limit_s=60)
            assert seen.stdout == b""
            assert processes_with("7305") == [pid]
            if backend == "bubblewrap":
                count = await second.exec(["/bin/sh", "-c", "ls -d /proc/[0-9]* | wc -l"], wall_limit_s=60)
                # Process 1, the one above the command, and the command's own.
                assert int(count.stdout) <= 6
            running.cancel()

    asyncio.run(run())


@needs_bubblewrap
def test_24_the_host_is_not_named() -> None:
    assert shell("bubblewrap", "uname -n; id -u").stdout == b"sandbox\n1000\n"


@where_users_differ
def test_what_was_reached_is_recorded(backend: str) -> None:
    async def work(sandbox: ServedSandbox) -> None:
        reached = sandbox.isolation
        assert reached.backend == backend
        assert reached.no_new_privs
        assert reached.caps.startswith("0/")
        assert reached.host_uid != 0
        assert Guard.NONE not in (reached.memory, reached.pids, reached.disk, reached.files)
        if backend == "process":
            assert reached.level is IsolationLevel.RLIMIT
            assert not (reached.pidns)
            assert not (reached.netns)
            assert not (reached.userns)
        else:
            is_container = backend == "podman"
            assert reached.level is (IsolationLevel.CONTAINER if is_container else IsolationLevel.NAMESPACE)
            assert reached.userns is not is_container
            assert reached.pidns
            assert reached.mountns
            assert reached.netns
            assert not reached.nested_userns
            assert reached.host_root_maps_to == ("0" if is_container else "unmapped")
            assert (reached.pids, reached.disk) == (Guard.ENFORCED, Guard.ENFORCED)

    in_sandbox(backend, work)
