"""The agent as a process of its own, with roles that are small programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from strop.hardware.gpus import Gpu
from strop.launch.build_request import make_plan
from strop.launch.contract import JobPlan, Need, RolePlan
from strop.launch.job_dir import write_job_dir
from strop.launch.local.backend import LocalBackend
from tests.fixtures.jobs import is_running, make_request, project, role, saver, wait_for
from tests.fixtures.nvml import install_fake_nvml

__all__ = ["project"]
pytestmark = pytest.mark.slow


LIMIT_S = 120
"""For an agent to end: ample, as other work may keep the machine busy."""


@dataclass(frozen=True)
class Node:
    """A filled home, and agents on it."""

    plan: JobPlan
    home: Path

    def start(
        self,
        *words: object,
        attempt: str = "a-0",
        number: int = 0,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "strop.launch.node", "--trial", str(self.home)]
        command += ["--job", str(self.home / "job"), "--attempt", attempt, "--number", str(number)]
        return subprocess.Popen(
            [*command, *map(str, words)],
            env={**os.environ, **(variables or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(
        self, *, attempt: str = "a-0", number: int = 0, variables: Mapping[str, str] | None = None
    ) -> int:
        return self.start(attempt=attempt, number=number, variables=variables).wait(LIMIT_S)

    def end(self, node: int = 0, attempt: str = "a-0") -> dict[str, Any]:
        path = self.home / "attempts" / attempt / f"end-{node}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def log(self, name: str, node: int = 0, attempt: str = "a-0") -> str:
        path = self.home / "attempts" / attempt / str(node) / f"{name}.log"
        return path.read_text() if path.exists() else ""


def a_node(project: Path, roles: Sequence[RolePlan], *overrides: str, **settings: Any) -> Node:
    request = make_request(project, roles, *overrides)
    plan = replace(make_plan(request, LocalBackend()), **settings)
    write_job_dir(plan, request, os.environ)
    return Node(plan=plan, home=Path(plan.home))


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Agents that a test has started; none outlives it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_exit_code_and_logs_are_on_disk_and_the_code_is_the_last_word(project: Path) -> None:
    node = a_node(project, [role("train", "import sys; print('out'); print('err', file=sys.stderr)")])
    assert node.run() == 0
    assert (node.home / "attempts" / "a-0" / "exit" / "0").read_text() == "0"
    assert node.log("train").splitlines() == ["out", "err"]
    start = json.loads((node.home / "attempts" / "a-0" / "agent-0.json").read_text())
    assert {"host", "pid", "lease", "code_sha256", "devices"} <= start.keys()
    assert (node.home / "latest").resolve() == node.home / "attempts" / "a-0"


def test_an_altered_bundle_is_refused(project: Path) -> None:
    node = a_node(project, [role("train", "print('ran')")])
    path = node.home / "job" / "code.tar.zst"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    assert node.run() == 76
    assert "the very code that was submitted" in node.end()["cause"]
    assert node.log("train") == ""


@pytest.mark.parametrize("code", [0, 3])
def test_the_early_end_of_a_sidecar_ends_the_run_and_names_it(project: Path, code: int) -> None:
    """Incident PRC-5: an engine that ends with 0 unnoticed."""
    sidecar = role("engine", f"print('bye'); raise SystemExit({code})", need=Need.PRESENCE)
    node = a_node(project, [saver(10_000), sidecar])
    assert node.run() == (code or 1)
    cause = node.end()["cause"]
    assert f"role engine ended while the run went on with exit code {code}" in cause
    assert cause.endswith("its last lines:\nbye")


def test_a_sidecar_ends_with_the_run(project: Path) -> None:
    marker = f"sidecar-{os.getpid()}"
    sidecar = role("engine", "import time; time.sleep(600)", marker, need=Need.PRESENCE)
    node = a_node(project, [saver(3), sidecar])
    assert node.run() == 0
    assert not is_running(marker)


def test_a_program_that_is_missing_is_refused_and_no_other_role_stays(project: Path) -> None:
    marker = f"left-{os.getpid()}"
    waiting = role("train", "import time; time.sleep(600)", marker)
    missing = RolePlan(name="engine", argv=("no-such-program",), need=Need.PRESENCE)
    node = a_node(project, [waiting, missing])
    assert node.run() == 76
    assert "program 'no-such-program' was not found" in node.end()["cause"]
    assert not is_running(marker)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_the_end_is_announced_to_a_role_once_and_it_saves(
    project: Path, running: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    node = a_node(project, [saver(10_000)])
    agent = node.start("--grace", 30, "--term-grace", 30)
    running.append(agent)
    wait_for(lambda: "step 2" in node.log("train"))
    agent.send_signal(number)
    # Two at once may be handled in either order: the later one's handler can begin inside the earlier one's.
    time.sleep(0.1)
    # Schedulers send both, and TERM more than once: a second one to the role would end it unsaved.
    agent.send_signal(signal.SIGTERM)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(LIMIT_S) == 75
    assert node.end()["signal"] == number.name
    assert (node.home / "state").read_text() == node.log("train").split()[-1]


def test_an_end_before_the_first_step_is_no_failure(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    # As a trainer that is still importing: SIGTERM kills it, and nothing is lost.
    node = a_node(project, [role("train", "import time; print('importing', flush=True); time.sleep(600)")])
    agent = node.start("--grace", 30)
    running.append(agent)
    wait_for(lambda: "importing" in node.log("train"))
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(LIMIT_S) == 75


def test_silence_ends_the_run_with_the_stacks_of_all_roles(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    """Incident PRC-1: a silent hang; also of a process that is stopped."""
    hanging = role(
        "train",
        "import time\ndef waits_for_weights():\n    time.sleep(600)\n"
        "print('stage: waits', flush=True)\nwaits_for_weights()",
    )
    stopped = role(
        "engine",
        "import os, signal, time\n"
        "def serves():\n    os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(600)\n"
        "print('stage: loop', flush=True)\nserves()",
        need=Need.PRESENCE,
    )
    node = a_node(project, [hanging, stopped], max_silence_s=8.0)
    agent = node.start()
    running.append(agent)
    # Until they hang something moves: a busy machine may take longer to start them than silence may last.
    metrics = node.home / "metrics.jsonl"

    def hang() -> bool:
        with metrics.open("a") as file:
            file.write("{}\n")
        return "stage" in node.log("train") and "stage" in node.log("engine")

    wait_for(hang)
    assert agent.wait(LIMIT_S) == 1
    cause = node.end()["cause"]
    assert "nothing moved for" in cause
    assert "the last line of train is 'stage: waits'" in cause
    assert "waits_for_weights" in node.log("train")
    assert "serves" in node.log("engine")


def test_a_failing_node_ends_the_others_and_the_first_cause_is_kept(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    waiting = replace(saver(10_000), nodes="first")
    failing = role("shard", "import time; time.sleep(1); raise SystemExit(9)", nodes="all")
    node = a_node(project, [waiting, failing])
    agents = [node.start("--node", index, "--num-nodes", 2) for index in (0, 1)]
    running += agents
    assert {agent.wait(LIMIT_S) for agent in agents} <= {9, 1}
    assert any("role shard ended with exit code 9" in node.end(index)["cause"] for index in (0, 1))


def test_a_sidecar_node_ends_when_the_main_part_has(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    """Incident PRC-5: a partner idle for twelve hours."""
    sidecar = role("sidecar", "import time; time.sleep(600)", nodes="cpu", need=Need.PRESENCE)
    node = a_node(project, [saver(20), sidecar])
    content = json.loads((node.home / "job" / "plan.json").read_text())
    # This machine has one node: its plan gives the sidecar to the first. Two parts, as on a cluster.
    content["roles"][1]["nodes"] = "cpu"
    (node.home / "job" / "plan.json").write_text(json.dumps(content))
    main = node.start("--node", 0, "--num-nodes", 2)
    beside = node.start("--node", 1, "--num-nodes", 2, "--part", "cpu")
    running += [main, beside]
    assert main.wait(LIMIT_S) == 0
    assert beside.wait(LIMIT_S) == 0
    assert "sidecar" in json.loads((node.home / "attempts/a-0/agent-1.json").read_text())["roles"]


def test_a_later_attempt_cuts_the_earlier_one_off(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    """A lost node goes on computing while its job lives again elsewhere."""
    node = a_node(project, [saver(10_000)])
    earlier = node.start(attempt="a-0", number=0)
    running.append(earlier)
    wait_for(lambda: "step 2" in node.log("train"))
    later = node.start(attempt="a-1", number=1)
    running.append(later)
    assert earlier.wait(LIMIT_S) == 1
    assert "attempt a-1 has begun: this one is cut off" in node.end()["cause"]
    # Whatever step the earlier one had saved at its end.
    wait_for(lambda: node.log("train", attempt="a-1").count("\nstep ") >= 2)
    # And an earlier one that comes back is refused.
    assert node.run(attempt="a-2", number=0) == 76
    assert "was overtaken by attempt 1 (a-1)" in node.end(attempt="a-2")["cause"]


@pytest.mark.parametrize(
    ("visible", "infer", "train"),
    [
        ("3,5", "3", "5"),
        ("GPU-aaaa,GPU-bbbb", "GPU-aaaa", "GPU-bbbb"),
        ("MIG-11111111-1,MIG-22222222-2", "MIG-11111111-1", "MIG-22222222-2"),
    ],
)
def test_roles_get_their_slices_of_the_inherited_devices(
    project: Path, visible: str, infer: str, train: str
) -> None:
    """Incident PRC-7: devices overwritten with 0..n-1, and ids read as numbers."""
    shower = role(
        "train",
        "import os; print(os.environ['STROP_INFER_DEVICES'], os.environ['CUDA_VISIBLE_DEVICES'],"
        " os.environ['CUDA_DEVICE_ORDER'])",
        gpus={"infer": 1, "train": 1},
    )
    node = a_node(project, [shower], preflight="none")
    assert node.run(variables={"CUDA_VISIBLE_DEVICES": visible}) == 0
    assert node.log("train").split() == [infer, train, "PCI_BUS_ID"]


def test_a_gpu_with_a_strangers_process_is_refused_by_name(project: Path, tmp_path: Path) -> None:
    """Incident PRC-4: a same-named foreign process is named, and untouched."""
    gpu = Gpu(index="0", uuid="GPU-aaaa", name="fake", memory_bytes=80 << 30, free_memory_bytes=10 << 30)
    folder = tmp_path / "nvml"
    install_fake_nvml(folder, [gpu], [("GPU-aaaa", os.getpid(), 70 << 30)])
    node = a_node(project, [role("train", "print('ran')", gpus={"train": 1})])
    assert (
        node.run(
            variables={
                "CUDA_VISIBLE_DEVICES": "0",
                "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            }
        )
        == 76
    )
    assert str(os.getpid()) in node.end()["cause"]
    assert node.log("train") == ""


def test_caches_are_of_one_role_and_go_with_it_while_models_stay(project: Path, tmp_path: Path) -> None:
    """Incident PRC-6, and a launcher that moved the model cache into a folder that it deleted."""
    shower = (
        "import os, json; print(json.dumps({n: os.environ.get(n) for n in ('XDG_CACHE_HOME', 'TMPDIR',"
        " 'TRITON_CACHE_DIR', 'HF_HOME', 'MASTER_ADDR', 'RANK')}))"
    )
    node = a_node(project, [role("train", shower), role("other", shower)])
    variables = {"HF_HOME": str(tmp_path / "hub"), "MASTER_ADDR": "somewhere", "RANK": "3"}
    assert node.run(variables=variables) == 0
    train, other = (json.loads(node.log(name)) for name in ("train", "other"))
    assert train["XDG_CACHE_HOME"] != other["XDG_CACHE_HOME"]
    assert train["HF_HOME"] == str(tmp_path / "hub")
    assert (train["MASTER_ADDR"], train["RANK"]) == (None, None)
    assert not Path(train["TMPDIR"]).exists()


def test_two_runs_on_one_node_do_not_meet(project: Path, running: list[subprocess.Popen[str]]) -> None:
    """Incident PRC-6: the first to finish deletes what the others use."""
    keeper = (
        "import os, pathlib, sys, time\np = pathlib.Path(os.environ['TMPDIR']) / 'mine'\np.write_text('x')\n"
        "print(p, flush=True)\nawaited = pathlib.Path(sys.argv[1])\n"
        "while not awaited.exists() or not awaited.stat().st_size: time.sleep(0.02)\n"
        "assert p.read_text() == 'x'"
    )
    # The long one begins first, and ends when the short one has cleared up.
    homes = {name: project.parent / f"awaited-{name}" for name in ("short", "long")}
    short = a_node(project, [role("train", keeper, homes["short"])], "name=short")
    long = a_node(project, [role("train", keeper, homes["long"])], "name=long")
    homes["short"].symlink_to(long.home / "attempts/a-0/0/train.log")
    homes["long"].symlink_to(short.home / "attempts/a-0/exit/0")
    agents = [long.start(), short.start()]
    running += agents
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    assert long.log("train") != short.log("train")
