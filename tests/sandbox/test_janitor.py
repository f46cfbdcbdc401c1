"""What stays when a client, its daemon and its supervisors are killed together, and who clears it up."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from strop.hardware.process import identify
from strop.sandbox import ExecKind
from strop.sandbox.daemon import FOLDER_PREFIX
from strop.sandbox.family import find_descendants, parent_of
from strop.sandbox.janitor import clear_abandoned
from strop.sandbox.linux import read_file
from strop.sandbox.local import LocalSandbox
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import in_sandbox, needs_bubblewrap, needs_podman, on_every_backend, sandbox_of

CLIENT = """
import asyncio, sys
from strop.sandbox import SandboxSpec, IsolationLevel, make_backend
async def main():
    sandbox = await make_backend(sys.argv[1]).create(SandboxSpec(min_level=IsolationLevel.RLIMIT))
    await sandbox.start(["/bin/sleep", "3600"])
    if sys.argv[2:]:
        await sandbox.pause()
    print("made", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def places_of_containers(pids: list[int]) -> list[Path]:
    """Return the control groups of the containers that processes are in, and what their runtime keeps."""
    groups, states = set(), set()
    for pid in pids:
        for line in read_file(f"/proc/{pid}/cgroup").splitlines():
            names, _, inside = line.partition(":")[2].partition(":")
            if (name := Path(inside).name).startswith("libpod-") and "conmon" not in name:
                groups |= {Path("/sys/fs/cgroup", names.removeprefix("name="), inside.lstrip("/"))}
                states |= {
                    Path("/run", runtime, name.removeprefix("libpod-")) for runtime in ("runc", "crun")
                }
    return [path for path in (*groups, *states) if path.exists()]


def places_held_by(pids: list[int]) -> set[str]:
    places = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                places.add(os.readlink(link))
            except OSError:
                continue
    return {path for path in places if Path(path).name.startswith(FOLDER_PREFIX) and path.count("/") == 2}


@pytest.mark.slow
@on_every_backend
@pytest.mark.parametrize("state", ["", "paused"])
def test_nothing_stays_when_all_are_killed(backend: str, state: str) -> None:
    words = [sys.executable, "-c", CLIENT, backend, *filter(None, [state])]
    client = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"made\n"
    # Stopped first: else one clears up while the others are killed.
    pids = [client.pid, *find_descendants(client.pid)]
    places = places_held_by(pids)
    assert places
    of_containers = places_of_containers(pids)
    assert bool(of_containers) is (backend == "podman")
    for number, pid in itertools.product((signal.SIGSTOP, signal.SIGKILL), pids):
        # A process that only made another one has ended meanwhile.
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    client.wait()
    client.stdout.close()
    deadline = time.monotonic() + 300.0
    while any(Path(place).exists() for place in places):
        clear_abandoned()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for place in places:
        words = ["podman", "ps", "--all", "--quiet", "--filter", f"name={Path(place).name}"]
        if backend == "podman":
            assert subprocess.run(words, capture_output=True, check=True).stdout == b""
    assert [path for path in of_containers if path.exists()] == []
    # One that only init has not waited for yet has ended.
    assert [pid for pid in pids if identify(pid) is not None] == []


@needs_podman
@pytest.mark.slow
def test_a_container_whose_monitor_was_killed_leaves_nothing() -> None:
    async def work(sandbox: ServedSandbox) -> list[Path]:
        assert isinstance(sandbox, LocalSandbox)
        await sandbox.start(["/bin/sleep", "3600"])
        pids = find_descendants(sandbox.supervisor_pid)
        places = places_of_containers(pids)
        (monitor,) = (pid for pid in pids if read_file(f"/proc/{pid}/comm").strip() == "conmon")
        os.kill(monitor, signal.SIGKILL)
        return places

    of_container = in_sandbox("podman", work)
    assert of_container
    assert [path for path in of_container if path.exists()] == []


# Waits before there is a bwrap, or between what that does first, cloning, and letting the clone go on. bwrap
# has a word for that, which does not go with one of its others.
HELD_BWRAP = {
    "before": "while [ ! -e {folder}/go ]; do sleep 0.01; done",
    "between": """for word do shift; [ "$word" = --disable-userns ] || set -- "$@" "$word"; done
set -- --userns-block-fd 9 "$@"
exec 9<>{folder}/go""",
}


def find_naming(word: str) -> list[int]:
    """Return the processes that have a word in their command line or environment."""
    pids = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            if word in read_file(f"/proc/{pid}/cmdline") + read_file(f"/proc/{pid}/environ"):
                pids.append(pid)
    return pids


@needs_bubblewrap
@pytest.mark.parametrize(("moment", "has_daemon"), [("before", True), ("before", False), ("between", False)])
def test_nothing_stays_of_a_bwrap_that_began_when_all_were_killed(moment: str, *, has_daemon: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    # Another user starts it.
    folder.chmod(0o777)
    lines = [
        "#!/bin/sh",
        f'test "$1" != --version || exec {shutil.which("bwrap")} --version',
        f"echo $$ > {folder}/pid; mv {folder}/pid {folder}/begun",
        HELD_BWRAP[moment].format(folder=folder),
        f'exec {shutil.which("bwrap")} --setenv FOLDER {folder} "$@"',
    ]
    (folder / "bwrap").write_text("\n".join(lines))
    (folder / "bwrap").chmod(0o755)
    if moment == "between":
        os.mkfifo(folder / "go", 0o666)
        (folder / "go").chmod(0o666)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, "bubblewrap"],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (folder / "begun").exists():
            assert client.poll() is None
            time.sleep(0.01)
        bwrap = int((folder / "begun").read_text())
        while moment == "between" and not set(find_naming("--userns-block-fd")) & set(
            find_descendants(bwrap)
        ):
            assert client.poll() is None
            time.sleep(0.01)
        supervisor = parent_of(bwrap)
        assert supervisor is not None
        daemon = parent_of(supervisor)
        assert daemon is not None
        (place,) = places_held_by([supervisor])
        pids = [supervisor] if has_daemon else [supervisor, daemon, client.pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        client.wait(30.0)
        if moment == "before":
            (folder / "go").touch()
        deadline = time.monotonic() + 300.0
        while moment == "before" and find_naming(str(folder)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if not has_daemon:
            # One that was just made is left alone.
            os.utime(place, (0.0, 0.0))
        while Path(place).exists() or find_naming(str(folder)):
            assert time.monotonic() < deadline
            if not has_daemon:
                clear_abandoned()
            time.sleep(0.02)
    finally:
        client.kill()
        client.wait()
        shutil.rmtree(folder)


async def test_what_lives_is_left_alone() -> None:
    async with sandbox_of("process") as sandbox:
        held = asyncio.create_task(sandbox.exec(["/bin/sleep", "2.5"], wall_limit_s=60.0))
        await asyncio.sleep(2.1)
        removed = clear_abandoned()
        assert [line for line in removed if Path(sandbox.scratch).parent.name in line] == []
        assert (await held).kind is ExecKind.EXITED
