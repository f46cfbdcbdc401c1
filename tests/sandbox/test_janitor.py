"""What stays when a client, its agents and their programs are killed together, and who clears it up."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from strop.hardware.process import identify
from strop.sandbox import ExecKind
from strop.sandbox.agent import find_descendants
from strop.sandbox.cgroup import find_controllers
from strop.sandbox.ground import FOLDER_PREFIX, SCRATCH_BASES
from strop.sandbox.janitor import clear_abandoned
from tests.fixtures.sandboxes import SOURCE_DIR, on_every_backend, parent_of, sandbox_of

CLIENT = """
import asyncio, sys
from strop.sandbox import SandboxSpec, IsolationLevel, make_backend
from strop.sandbox.ground import ground_of
async def main():
    sandbox = await make_backend(sys.argv[1]).create(SandboxSpec(min_level=IsolationLevel.RLIMIT))
    await sandbox.start(["/bin/sleep", "3600"])
    if sys.argv[2:]:
        await sandbox.pause()
    print(sandbox.supervisor_pid, ground_of().folder, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def find_left(client: int, folder: Path) -> list[str]:
    """Return the folder, the control groups and the containers that a client has left."""
    left = [str(folder)] if folder.exists() else []
    for controller in find_controllers():
        left += map(str, controller.own_dir.glob(f"strop-box-{client}-*"))
    words = ["podman", "ps", "--all", "--quiet", "--filter", f"name={folder.name}"]
    with suppress(FileNotFoundError):
        left += subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
    return left


@pytest.mark.slow
@on_every_backend
@pytest.mark.parametrize("state", ["", "paused"])
@pytest.mark.parametrize("is_alone", [False, True], ids=["all", "client"])
def test_nothing_stays_when_all_are_killed(backend: str, state: str, *, is_alone: bool) -> None:
    words = [sys.executable, "-c", CLIENT, backend, *filter(None, [state])]
    client = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE_DIR})
    assert client.stdout is not None
    top, place = client.stdout.readline().decode().split()
    above = parent_of(int(top))
    pids = [client.pid, int(top), *find_descendants(client.pid), *find_descendants(int(top))]
    if backend == "podman" and above is not None:
        # The container's monitor.
        pids.append(above)
    # Stopped first: else one clears up while the others are killed.
    killed = pids[:1] if is_alone else pids
    for number, pid in itertools.product((signal.SIGSTOP, signal.SIGKILL), killed):
        # A process that only made another one has ended meanwhile.
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    client.wait()
    client.stdout.close()
    deadline = time.monotonic() + 100.0
    while find_left(client.pid, Path(place)) and time.monotonic() < deadline:
        clear_abandoned()
        time.sleep(0.2)
    assert find_left(client.pid, Path(place)) == []
    # One that only init has not waited for yet has ended.
    assert [pid for pid in pids if identify(pid) is not None] == []


async def test_what_lives_is_left_alone() -> None:
    async with sandbox_of("process") as sandbox:
        held = asyncio.create_task(sandbox.exec(["/bin/sleep", "2.5"], wall_limit_s=60.0))
        await asyncio.sleep(2.1)
        removed = clear_abandoned()
        assert [line for line in removed if Path(sandbox.scratch).parent.name in line] == []
        assert (await held).kind is ExecKind.EXITED


def test_a_client_sweeps_what_dead_ones_have_left() -> None:
    base = next(base for base in SCRATCH_BASES if os.access(base, os.W_OK))
    folder = Path(base, f"{FOLDER_PREFIX}{os.urandom(8).hex()}")
    (folder / "1/deep").mkdir(parents=True)
    os.utime(folder, (0, 0))
    (folder / "1").chmod(0)
    assert any(str(folder) in line for line in clear_abandoned())
    assert not folder.exists()
