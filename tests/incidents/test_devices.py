"""Incidents of devices, ports and leftovers on machines that several runs share, with real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.hardware import ChildProcess, Gpu, clear_leftovers, find_leases, spawn, take_lease, terminate
from strop.hardware.allocation import GpuRequest, allocate_gpus, lease_gpus
from strop.hardware.inventory import read_inventory
from strop.hardware.leftovers import find_processes
from strop.hardware.preflight import Level, PreflightRequest, require_ready
from tests.fixtures.devices import GIB, WRONG_PRODUCT, OnCpu, divided, spoil_probe, whole
from tests.fixtures.dying_runs import NUM_PROLIFIC, STORM, find_marked, prolific_run
from tests.fixtures.nvidia_smi import install_fake_nvidia_smi


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path / "bin"


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of this test alone, for its processes too."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("STROP_RUNTIME_DIR", str(tmp_path / "runtime"))
    # Whoever was killed may be slow to go where other work keeps the machine busy.
    monkeypatch.setattr("strop.hardware.leftovers._END_LIMIT_S", 60.0)


@pytest.mark.slow
@pytest.mark.usefixtures("leases")
def test_prc_4_twenty_kills_at_random_leave_nothing_and_touch_no_stranger(tmp_path: Path) -> None:
    """Incident: old engines held the memory of a GPU; clean-up by name ended the jobs of others."""
    chance = random.Random(20)
    # The same program with the same name, of nobody's run.
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)  # stranger"]
    with subprocess.Popen(words, start_new_session=True) as stranger:
        num_ended = 0
        for number in range(20):
            mark = f"kill-{os.getpid()}-{number}"
            (tmp_path / mark).mkdir()
            with prolific_run(mark, tmp_path / mark) as (run, lease_id):
                assert run.stdout is not None
                num_started = chance.randrange(0, NUM_PROLIFIC)
                for _ in range(num_started):
                    assert run.stdout.readline() == "started\n"
                # Somewhere in the next one.
                time.sleep(chance.uniform(0.0, 0.02))
                os.kill(run.pid, signal.SIGKILL)
                run.wait()
                (cleared,) = clear_leftovers()
                assert cleared.lease.lease_id == lease_id
                assert cleared.surviving == ()
                assert len(cleared.ended) >= num_started
                num_ended += len(cleared.ended)
                # What had just been forked would show by now.
                time.sleep(0.3)
                assert find_processes(lease_id) == []
                assert find_marked(mark) == []
                assert list((tmp_path / mark).iterdir()) == []
        assert find_leases() == []
        # Some were killed before they had started anything, most were not.
        assert num_ended > 40
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("leases")
def test_prc_4_a_storm_of_processes_without_environment_is_ended_to_the_last(tmp_path: Path) -> None:
    """Incident: orphans kept a GPU: what was started while its parents were ended was never found.

    Killing one by one left 30 to 90 of about 500 behind.
    """
    for number in range(3):
        mark = f"storm-{os.getpid()}-{number}"
        with prolific_run(mark, tmp_path, STORM) as (run, _):
            assert run.stdout is not None
            # In its midst: each of two shells has started a dozen, and has more to start.
            for _ in range(2):
                assert run.stdout.readline() == "started\n"
            time.sleep(number * 0.03)
            run.kill()
            run.wait()
            (cleared,) = clear_leftovers()
            assert cleared.surviving == ()
            assert len(cleared.ended) > 20
            time.sleep(0.5)
            assert find_marked(mark) == []


@pytest.mark.usefixtures("leases")
def test_prc_4_a_process_of_the_same_name_is_untouched_and_named(tool: Path) -> None:
    """Incident: `pkill -f` and killing every process on a GPU ended other jobs of the same user."""
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)  # vllm serve"]
    with subprocess.Popen(words) as stranger:
        gpu = Gpu(
            index="0",
            uuid="GPU-0",
            name="Test",
            memory_bytes=int(22.07 * GIB),
            free_memory_bytes=int(13.33 * GIB),
        )
        install_fake_nvidia_smi(tool, [gpu], [("GPU-0", stranger.pid, 8 * GIB)])
        request = GpuRequest(wanted={"engine": 1}, need_bytes={"engine": 19 * GIB})
        with pytest.raises(CheckRefused) as caught:
            lease_gpus("run", "1", request)
        assert clear_leftovers() == []
        assert stranger.poll() is None
        stranger.kill()
    said = str(caught.value)
    assert f"process {stranger.pid} (of " in said
    assert "# vllm serve)" in said
    assert "13.33 GiB free of 22.07 GiB" in said
    assert "strop ends no process that it did not start" not in said.partition(" Allowed: ")[0]


@pytest.mark.usefixtures("leases")
def test_prc_4_an_exit_that_is_blocked_is_ended_by_its_deadline(tmp_path: Path) -> None:
    """Incident: runs hung for hours after their last step."""
    hook = "import atexit, sys, time, signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
    words = [
        sys.executable,
        "-c",
        f"{hook} atexit.register(time.sleep, 600); print('up', flush=True); time.sleep(600)",
    ]
    child = spawn(words, tmp_path / "log")
    wait_for_line(child, "up")
    began = time.monotonic()
    assert terminate(child, grace_s=0.5) == -signal.SIGKILL
    assert time.monotonic() - began < 60


def wait_for_line(child: ChildProcess, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in child.tail():
        assert time.monotonic() < deadline, child.tail()
        time.sleep(0.01)


# A run that shares its machine: a private directory, a file in it, a moment's work, a look at the file.
SHARING = """
import os, sys, time
from pathlib import Path
from strop.hardware import clear_leftovers, take_lease
for _ in range(5):
    clear_leftovers()
    with take_lease(sys.argv[1], "1") as held:
        path = held.make_directory(Path(sys.argv[2]))
        (path / "cache").write_text(sys.argv[1])
        time.sleep(0.05)
        assert (path / "cache").read_text() == sys.argv[1]
    assert not path.exists()
print("finished")
"""


@pytest.mark.usefixtures("leases")
def test_prc_6_runs_that_start_and_end_together_remove_their_own_files_only(tmp_path: Path) -> None:
    """Incident: one shared cache folder was deleted by whoever finished first."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "of-somebody-else").touch()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SHARING, name, str(tmp_path / "shared")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert (run.returncode, out) == (0, "finished\n"), err
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["of-somebody-else"]


# Listens on the number that it is told, as a program does that takes nothing else.
# What a role sees, said by a process that was started with its variables.
ECHO = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER'])"


@pytest.mark.parametrize(
    ("gpus", "inherited", "engine", "learner"),
    [
        ([whole(3, 70), whole(5, 70)], "3,5", "3", "5"),
        ([whole("ab-1", 70), whole("cd-2", 70)], "GPU-cd-2,GPU-ab-1", "GPU-cd-2", "GPU-ab-1"),
        ([divided(0, "MIG-c6d4", "MIG-77aa")], "MIG-77aa,MIG-c6d4", "MIG-77aa", "MIG-c6d4"),
    ],
    ids=["indices", "uuids", "slices"],
)
def test_prc_7_roles_get_exactly_the_devices_that_were_given(
    tool: Path, tmp_path: Path, gpus: Sequence[Gpu], inherited: str, engine: str, learner: str
) -> None:
    """Incident: a wrapper overwrote visible devices with 0..n-1; slices became a hard-coded 0."""
    install_fake_nvidia_smi(tool, gpus)
    request = GpuRequest(wanted={"engine": 1, "learner": 1, "environments": 0}, inherited=inherited)
    made = allocate_gpus(request, read_inventory())
    seen = {}
    for name, role in made.roles.items():
        child = spawn([sys.executable, "-c", ECHO], tmp_path / name, {**os.environ, **role.variables})
        assert child.wait(60) == 0
        seen[name] = child.tail()
    assert seen == {
        "engine": f"{engine} PCI_BUS_ID",
        "learner": f"{learner} PCI_BUS_ID",
        "environments": " PCI_BUS_ID",
    }


@pytest.mark.slow
def test_lau_10_a_node_with_a_bad_gpu_is_refused_with_the_cause(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: jobs started on nodes whose GPU, driver or network did not fit, and failed much later."""
    install_fake_nvidia_smi(tool, [whole(0, 70)])
    spoilt = spoil_probe(tmp_path / "spoilt", "gpu_probe", WRONG_PRODUCT)
    monkeypatch.setenv("PYTHONPATH", spoilt["PYTHONPATH"])
    allocation = allocate_gpus(GpuRequest(wanted={"learner": 1}, inherited="0"), read_inventory())
    request = OnCpu(run_path=tmp_path, allocation=allocation, node="n7", levels=(Level.READ, Level.COMPUTE))
    with pytest.raises(CheckRefused, match=r"gpu_checksum: GPU-0: .*Next: exclude this node") as caught:
        require_ready(request)
    assert caught.value.exit_code == 76


# A node whose torch was built for another CUDA than its driver runs; importing that torch would fail.
NODE = """
import sys
from pathlib import Path
from strop.errors import StropError
from strop.hardware.allocation import GpuRequest, allocate_gpus
from strop.hardware.inventory import read_inventory
from strop.hardware.preflight import PreflightRequest, require_ready
allocation = allocate_gpus(GpuRequest(wanted={"learner": 1}, inherited="0"), read_inventory())
try:
    require_ready(PreflightRequest(run_path=Path(sys.argv[1]), allocation=allocation, node="n7"))
except StropError as refusal:
    print(refusal)
    sys.exit(refusal.exit_code)
"""


def test_lau_10_a_library_that_does_not_fit_the_driver_is_refused(tool: Path, tmp_path: Path) -> None:
    """Incident: libraries of the image and of the wheels were of different versions."""
    tool.mkdir()
    (tool / "nvidia-smi").write_text(
        "#!/bin/sh\ncase $1 in --query-gpu=*)"
        " echo '0, GPU-0, Test, 81920, 80000, [N/A], 535.54.03, 8.0';; esac\n"
    )
    (tool / "nvidia-smi").chmod(0o755)
    (tmp_path / "wheels" / "torch").mkdir(parents=True)
    (tmp_path / "wheels" / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13')")
    (tmp_path / "wheels" / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\n")
    path = os.pathsep.join([str(tmp_path / "wheels"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", NODE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 76, done.stderr
    assert done.stdout.startswith(
        "driver_version: driver 535.54.03 is older than 580.0, which CUDA 13.0 of torch needs. Allowed: "
    )


def test_lau_10_a_missing_interface_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    """Incident: a hard-coded network interface that a node did not have."""
    names = [name for _, name in socket.if_nameindex()]
    request = PreflightRequest(run_path=tmp_path, node="n7", interfaces={"NCCL_SOCKET_IFNAME": "efa9"})
    with pytest.raises(CheckRefused, match="interface: n7: NCCL_SOCKET_IFNAME=efa9 names no") as caught:
        require_ready(request)
    assert f"one of {', '.join(names)}" in str(caught.value)


def test_prc_7_what_was_given_is_in_the_record_by_uuid(tool: Path) -> None:
    """Incident: an index in a record meant another GPU on the next machine."""
    install_fake_nvidia_smi(tool, [whole(3, 70), whole(5, 70)])
    made = allocate_gpus(GpuRequest(wanted={"learner": 2}, inherited="5,3"), read_inventory())
    assert json.loads(json.dumps(made.record()))["roles"]["learner"]["uuids"] == ["GPU-5", "GPU-3"]
    with take_lease("run", "1", gpus=made.uuids) as held:
        assert held.lease.gpus == ("GPU-5", "GPU-3")
