"""Attacks that read or change data outside of the sandbox: rows 11, 14, 15, 23 and 24.

A secret in a sandbox's output proves that it was read, because nothing else contains it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from pathlib import Path

import strop
from strop.sandbox.attack.bait import COMMAND_LINE, DESCRIPTOR, ENVIRONMENT, PRIVATE_FILE, PUBLIC_FILE
from strop.sandbox.attack.contract import Attack, Code, Observation, always, attack, by_namespace, by_user
from strop.sandbox.attack.stage import Stage
from strop.sandbox.contract import ExecKind
from strop.sandbox.family import process_states
from strop.sandbox.linux import read_or_empty

ATTACKS: list[Attack] = []
_SECRET = "the suite's secrets in what it prints"

_EVERY_PROCESS = """
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in sys.argv[2:]:
        path = f"/proc/{pid}/{name}"
        if name == "fd":
            for descriptor in attempt(os.listdir, path) or ():
                print(attempt(os.readlink, f"{path}/{descriptor}"))
        elif (file := attempt(open, path, "rb")) is not None:
            sys.stdout.buffer.write(attempt(file.read) or b"")
sys.stdout.flush()
"""
_FILES = """
for path in sys.argv[2:]:
    if (file := attempt(open, path, "rb", 0)) is not None:
        sys.stdout.buffer.write(attempt(file.read, 65536) or b"")
sys.stdout.flush()
"""
_WRITE_FILES = """
for path in sys.argv[2:]:
    for work in (
        lambda: os.write(os.open(path, os.O_WRONLY | os.O_APPEND), TOKEN.encode()),
        lambda: os.chmod(path, 0o777),
        lambda: os.rename(path, path + TOKEN),
        lambda: os.symlink("/", f"{os.path.dirname(path)}/{TOKEN}"),
        lambda: os.link(path, f"{os.path.dirname(path)}/{TOKEN}-link"),
    ):
        attempt(work)
"""
_FOLDERS = ("/", "/etc", "/usr/bin", "/usr/lib/python3/dist-packages", "/usr/local/lib", "/var/cache")
_PLANT = """
import site
folders = {*sys.path, *sys.argv[2:], sys.prefix, os.path.dirname(os.__file__), *site.getsitepackages()}
for folder in sorted(filter(os.path.isabs, folders)):
    for name in (f"{TOKEN}.pth", f"{TOKEN}.py", f"__pycache__/{TOKEN}.pyc"):
        file = attempt(open, f"{folder}/{name}", "w")
        if file is not None:
            file.close()
print(json.dumps([folder for folder in folders if os.path.isabs(folder)]))
"""
_SHARED_MEMORY = """
libc.shmat.restype = ctypes.c_void_p
for line in open("/proc/sysvipc/shm").readlines()[1:]:
    address = libc.shmat(int(line.split()[1]), None, 0o10000)
    if address not in (None, ctypes.c_void_p(-1).value):
        sys.stdout.buffer.write(ctypes.string_at(address, 64))
sys.stdout.flush()
"""
_SIGNAL = """
for pid in {*map(int, filter(str.isdigit, os.listdir("/proc"))), *map(int, sys.argv[2:])} - {os.getpid()}:
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        attempt(os.kill, pid, number)
"""
_GROUPS = """
for top, _, names in os.walk("/sys/fs/cgroup"):
    for name in {"cgroup.procs", "tasks", "memory.limit_in_bytes", "memory.max", "pids.max"} & set(names):
        if (file := attempt(open, f"{top}/{name}", "w")) is not None:
            attempt(file.write, "0")
            print(top, name)
"""
_KERNEL_MEMORY = """
for path in ("/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/kmsg", "/proc/kmsg", "/proc/1/mem", "/dev/port"):
    descriptor = attempt(os.open, path, os.O_RDONLY | os.O_NONBLOCK)
    if descriptor is not None and attempt(os.read, descriptor, 64):
        print(path)
buffer = ctypes.create_string_buffer(4096)
if libc.klogctl(3, buffer, 4096) > 0:
    print("the kernel's log")
for line in attempt(open, "/proc/kallsyms") or ():
    print(line.split()[0])
    break
"""
_HOST_FACTS = "uname -n; cat /proc/sys/kernel/hostname; cat /proc/self/cgroup"


@attack(ATTACKS, 11, tries="read every process's environment", judged=_SECRET, expects=by_user("pidns"))
async def _read_environments(stage: Stage) -> Observation:
    return await _look_for(stage, ENVIRONMENT, _EVERY_PROCESS, "environ")


@attack(ATTACKS, 11, tries="read every command line", judged=_SECRET, expects=by_namespace("pidns"))
async def _read_command_lines(stage: Stage) -> Observation:
    return await _look_for(stage, COMMAND_LINE, _EVERY_PROCESS, "cmdline")


@attack(
    ATTACKS,
    11,
    tries="find files in the descriptors and mounts of every process",
    judged=_SECRET,
    expects=by_user("pidns"),
)
async def _read_descriptors(stage: Stage) -> Observation:
    return await _look_for(stage, DESCRIPTOR, _EVERY_PROCESS, "fd", "mountinfo")


@attack(ATTACKS, 14, tries="read files of this user alone", judged=_SECRET, expects=by_user("mountns"))
async def _read_private_files(stage: Stage) -> Observation:
    pid = stage.bait.process.pid
    path = stage.bait.private_file
    ways = [str(path), f"/proc/{pid}/root{path}", f"/proc/1/root{path}", f"/proc/{pid}/cwd/../..{path}"]
    return await _look_for(stage, PRIVATE_FILE, _FILES, *ways)


@attack(
    ATTACKS,
    14,
    tries="read files of this host that everybody may read",
    judged=_SECRET,
    expects=by_namespace("mountns"),
)
async def _read_public_files(stage: Stage) -> Observation:
    return await _look_for(stage, PUBLIC_FILE, _FILES, str(stage.bait.public_file))


@attack(
    ATTACKS,
    15,
    tries="write, rename, link and open up files of this user",
    judged="the files on the host",
    expects=by_user("mountns"),
    spares_user=False,
)
async def _write_host_files(stage: Stage) -> Observation:
    paths = [str(stage.bait.public_file), str(stage.bait.private_file)]
    ways = [f"/proc/{pid}/root{path}" for pid in (1, stage.bait.process.pid) for path in paths]
    await stage.python(_WRITE_FILES, *paths, *ways)
    return _report(stage.bait.changed_files(), "no file changed", "changed")


@attack(
    ATTACKS,
    15,
    tries="plant files where the next Python or program of this host, or of another sandbox, is found",
    judged="the directories on the host",
    expects=by_user("mountns"),
)
async def _poison_interpreter(stage: Stage) -> Observation:
    folder = str(Path(strop.__file__).parent)
    result = await stage.python(_PLANT, *_FOLDERS, folder)
    if result.kind is not ExecKind.EXITED or result.exit_code != 0:
        return Observation(Code.EXPOSED, f"it did not say where it wrote: {result.stderr[-200:]!r}")
    # The sandbox's /tmp is private, so it is no target.
    paths = [path for path in json.loads(result.stdout) if not path.startswith(stage.sandbox.scratch)]
    places = [place for path in paths for place in (Path(path), Path(path, "__pycache__"))]
    planted = [str(path) for place in places for path in place.glob(f"{stage.token}*")]
    for path in planted:
        os.unlink(path)
    return _report(planted, "nothing was planted", "planted")


@attack(
    ATTACKS,
    23,
    tries="see processes of another sandbox",
    judged="the other's secret in what it prints",
    expects=by_namespace("pidns"),
)
async def _see_other(stage: Stage) -> Observation:
    return await _look_for_other(stage, _EVERY_PROCESS, "cmdline")


@attack(
    ATTACKS,
    23,
    tries="read files of another sandbox",
    judged="the other's secret in what it prints",
    expects=by_user("mountns"),
)
async def _read_other(stage: Stage) -> Observation:
    other = stage.control.sandbox
    paths = [f"{other.scratch}/secret"]
    paths += [f"/proc/{pid}/root{other.scratch}/secret" for pid in stage.control.processes()]
    return await _look_for_other(stage, _FILES, *paths)


@attack(
    ATTACKS,
    23,
    tries="attach shared memory of another sandbox that everybody may read",
    judged="the other's secret in what it prints",
    expects=by_namespace("ipcns"),
)
async def _attach_other(stage: Stage) -> Observation:
    return await _look_for_other(stage, _SHARED_MEMORY)


@attack(
    ATTACKS,
    23,
    tries="stop and kill every process but itself, by number",
    judged="processes of the other sandbox and of this user",
    expects=by_user("pidns"),
    spares_user=False,
)
async def _signal_others(stage: Stage) -> Observation:
    own = [
        pid for pid in stage.control.processes() if stage.control.word in read_or_empty(f"/proc/{pid}/comm")
    ]
    pids = [stage.bait.process.pid, stage.control.sandbox.supervisor_pid, *own]
    await stage.python(_SIGNAL, *map(str, pids), wall_limit_s=5.0)
    states = process_states(pids)
    return _report([f"{pid}" for pid in pids if states.get(pid, "Z") in "TZ"], "all live", "hit")


@attack(
    ATTACKS,
    23,
    tries="move itself into other control groups, and change limits",
    judged="control groups of its processes, seen on the host",
    expects=always(Code.BLOCKED),
)
async def _change_groups(stage: Stage) -> Observation:
    async with stage.held(f"{_GROUPS}hold()") as (pids, result):
        if result is not None:
            return Observation(Code.EXPOSED, f"it ended: {result.kind.value} {result.stderr[-200:]!r}")
        own = {read_or_empty(f"/proc/{pid}/cgroup") for pid in pids}
    async with stage.held("hold()") as (pids, _):
        usual = {read_or_empty(f"/proc/{pid}/cgroup") for pid in pids}
    return _report(["a group"] if own != usual else [], "it stayed where it was", "changed")


@attack(
    ATTACKS,
    24,
    tries="read the kernel's memory, log and addresses",
    judged="what it could open, and addresses in what it prints",
    expects=always(Code.BLOCKED),
)
async def _read_kernel(stage: Stage) -> Observation:
    result = await stage.python(_KERNEL_MEMORY)
    words = result.stdout.decode(errors="replace").splitlines()
    return _report([word for word in words if word.strip("0")], "nothing was read", "read")


@attack(
    ATTACKS,
    24,
    tries="learn this host's name, and its control groups",
    judged="the host's words in what it prints",
    expects=by_namespace("utsns"),
)
async def _read_host_name(stage: Stage) -> Observation:
    result = await stage.shell(_HOST_FACTS)
    output = result.stdout.decode(errors="replace")
    lines = read_or_empty(f"/proc/{stage.sandbox.supervisor_pid}/cgroup").split("\n")
    groups = {line.split(":", 2)[2] for line in lines if line} - {"/"}
    names = {socket.gethostname(), platform.node()} & set(output.splitlines())
    return _report(
        [*names, *(group for group in groups if group in output)], "neither name nor groups", "learned"
    )


async def _look_for(stage: Stage, place: str, code: str, *words: str) -> Observation:
    """Run an attack, and look in its output for the secret of a place."""
    output = await _output(stage, code, *words)
    if isinstance(output, Observation):
        return output
    leaked = [place] if place in stage.bait.leaked(output) else []
    return _report(leaked, "the secret is not among what it read", "read")


async def _look_for_other(stage: Stage, code: str, *words: str) -> Observation:
    """Run an attack, and look in its output for the secret of the control sandbox."""
    output = await _output(stage, code, *words)
    if isinstance(output, Observation):
        return output
    leaked = ["the secret of the other sandbox"] if stage.control.word.encode() in output else []
    return _report(leaked, "the other's secret is not among what it read", "read")


async def _output(stage: Stage, code: str, *words: str) -> bytes | Observation:
    """Return the output of an attack; or the observation, if it did not end normally."""
    result = await stage.python(code, *words)
    if result.kind is ExecKind.EXITED and result.exit_code == 0:
        return result.stdout + result.stderr
    return Observation(
        Code.EXPOSED, f"it did not end as it should: {result.kind.value} {result.stderr[-200:]!r}"
    )


def _report(hits: list[str], nothing: str, verb: str) -> Observation:
    if hits:
        return Observation(Code.EXPOSED, f"{verb}: {', '.join(hits)}")
    return Observation(Code.BLOCKED, nothing)
