"""Level c: nodes that sum together, each a process of its own, over a real network connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, Interrupted
from strop.hardware.findings import Finding
from strop.hardware.ports import find_host_address
from strop.hardware.preflight import Level, NodeGroup, PreflightRequest, require_ready, run_preflight
from strop.hardware.preflight.collective import judge_collective
from tests.fixtures.devices import spoil_probe, whole
from tests.fixtures.nvidia_smi import install_fake_nvidia_smi

# One node's part; its own PATH shows it its own GPU.
_NODE = """
import json, sys
from pathlib import Path
from strop.hardware.allocation import GpuRequest, allocate_gpus
from strop.hardware.inventory import read_inventory
from strop.hardware.preflight import Level, NodeGroup, PreflightRequest, run_preflight
group = NodeGroup(attempt_path=Path(sys.argv[1]), attempt=1, **json.loads(sys.argv[2]))
allocation = allocate_gpus(GpuRequest(wanted={"learner": 1}, inherited="0"), read_inventory())
request = PreflightRequest(
    run_path=group.attempt_path, node=group.name, allocation=allocation, group=group,
    levels=(Level.COLLECT,), device="cpu",
)
found = run_preflight(request)
print(json.dumps([[one.code, one.where, one.given] for one in found]))
"""

# Each sum and each block takes a second longer.
_SLOW = """
import time
import torch.distributed as dist
def linger(call):
    def called(*words, **named):
        time.sleep(1.0)
        return call(*words, **named)
    return called
dist.all_reduce, dist.send = linger(dist.all_reduce), linger(dist.send)
"""
# It comes to the rendezvous, and no further.
_STUCK = """
import time
from torch.distributed import TCPStore
say = TCPStore.set
def hang(store, key, value):
    if key.startswith("start/"):
        time.sleep(3600)
    return say(store, key, value)
TCPStore.set = hang
"""


def collect(
    folder: Path, names: Sequence[str], faults: Mapping[str, str], *, absent: int = 0, **settings: Any
) -> list[list[list[str]]]:
    """Let nodes check each other; return code, place and words of what each found.

    `faults`: Python that a node's probe runs first.
    """
    running = []
    for index, name in enumerate(names[: len(names) - absent]):
        tool = folder / f"bin-{name}"
        install_fake_nvidia_smi(tool, [whole(name, 70)])
        program = tool / "nvidia-smi"
        # The one GPU of each node has the index 0 there.
        state = json.loads((tool / "fake-gpus.json").read_text())
        state["gpus"][0]["index"] = "0"
        (tool / "fake-gpus.json").write_text(json.dumps(state))
        assert program.exists()
        given = json.dumps({"names": list(names), "index": index, "interface": "lo", **settings})
        env = {**os.environ, "PATH": f"{tool}{os.pathsep}{os.environ['PATH']}"}
        if name in faults:
            env |= spoil_probe(folder / f"spoilt-{name}", "collective_probe", faults[name])
        words = [sys.executable, "-c", _NODE, str(folder), given]
        running.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    answers = []
    for process in running:
        out, _ = process.communicate(timeout=400)
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


@pytest.mark.slow
def test_two_nodes_that_sum_rightly_and_fast_are_ready(tmp_path: Path) -> None:
    # A speed that two busy nodes keep too: 16 MiB may take 16 s.
    assert collect(tmp_path, ("n0", "n1"), {}, wait_limit_s=120.0, min_bytes_per_s=1e6) == [[], []]
    (line,) = (tmp_path / "preflight" / "n0-collective.log").read_text().splitlines()
    answer = json.loads(line)
    assert answer["is_exact"]
    assert answer["pairs"]["n1"] >= 1e6


@pytest.mark.slow
def test_nodes_find_the_network_between_them_by_themselves(tmp_path: Path) -> None:
    if not find_outside():
        pytest.skip("this machine has no address but loopback")
    answers = collect(tmp_path, ("n0", "n1"), {}, wait_limit_s=120.0, min_bytes_per_s=1e6, interface=None)
    assert answers == [[], []]
    address = json.loads((tmp_path / "preflight-ports.json").read_text())["addresses"]["rendezvous"]
    assert not address.startswith("127.")


def find_outside() -> bool:
    try:
        return not find_host_address(2).startswith("127.")
    except CheckRefused:
        return False


@pytest.mark.slow
def test_a_slow_node_is_named_by_all_and_itself(tmp_path: Path) -> None:
    # A node that lingers for a second takes 2 * 8 MiB in more than that: below 16.8 MB/s. The others take
    # a hundredth of that second, or all of it where the machine is busy.
    slow = {"n2": _SLOW}
    answers = collect(tmp_path, ("n0", "n1", "n2"), slow, wait_limit_s=120.0, min_bytes_per_s=16.8e6)
    for answer in answers:
        assert [(code, where) for code, where, _ in answer] == [("bandwidth", "n2")]


@pytest.mark.slow
def test_a_node_that_never_comes_is_named_by_all(tmp_path: Path) -> None:
    answers = collect(tmp_path, ("n0", "n1", "n2"), {}, absent=1, wait_limit_s=60.0)
    for answer in answers:
        assert answer == [["node_missing", "n2", "node n2 has not come to the rendezvous within 60 s"]]


@pytest.mark.slow
def test_a_node_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    answers = collect(tmp_path, ("n0", "n1"), {"n1": _STUCK}, wait_limit_s=60.0)
    assert answers[0] == [["node_stuck", "n1", "node n1 came, and has not started within 60 s"]]
    # The judgement reaches the node itself too, from its own watching thread.
    assert answers[1] == answers[0]


def test_a_first_node_that_never_comes_is_named(tmp_path: Path) -> None:
    group = NodeGroup(names=("n0", "n1"), index=1, attempt_path=tmp_path, attempt=3, wait_limit_s=0.2)
    (finding,) = collect_here(tmp_path, group)
    assert (finding.code, finding.where) == ("rendezvous", "n0")
    assert finding.given.startswith(
        "node n0 has not said within 0.2 s where rendezvous of attempt 3 can be reached"
    )


def test_an_interface_that_is_missing_is_named(tmp_path: Path) -> None:
    group = NodeGroup(names=("n0", "n1"), index=0, attempt_path=tmp_path, attempt=1, interface="eno7")
    (finding,) = collect_here(tmp_path, group)
    assert (finding.code, finding.where) == ("rendezvous", "n0")
    assert "interface 'eno7' has no IPv4 address here" in finding.given
    assert "lo" in finding.allowed


def test_where_all_are_slow_with_the_first_one_it_is_that(tmp_path: Path) -> None:
    group = NodeGroup(names=("n0", "n1", "n2"), index=1, attempt_path=tmp_path, attempt=1)
    findings = list(judge_collective(group, {"is_exact": True, "pairs": {"n1": 4e6, "n2": 5e6}}))
    assert [(problem.code, problem.where) for problem in findings] == [("bandwidth", "n0")] * 2
    # Of two nodes nobody can tell; the other one is named.
    pair = NodeGroup(names=("n0", "n1"), index=0, attempt_path=tmp_path, attempt=1)
    (finding,) = judge_collective(pair, {"is_exact": True, "pairs": {"n1": 4e6}})
    assert finding.where == "n1"


def test_a_node_that_is_not_at_fault_is_not_excluded(tmp_path: Path) -> None:
    """75 lets the job start again; 76 leaves out the node that says it."""
    group = NodeGroup(names=("n0", "n1"), index=1, attempt_path=tmp_path, attempt=1, wait_limit_s=0.1)
    request = PreflightRequest(run_path=tmp_path, node="n1", levels=(Level.COLLECT,), group=group)
    with pytest.raises(Interrupted, match="rendezvous: n0: node n0 has not said within") as caught:
        require_ready(request)
    assert caught.value.exit_code == 75
    own = replace(request, group=replace(group, index=0, interface="eno7"))
    with pytest.raises(CheckRefused, match="rendezvous: n0: interface 'eno7' has no IPv4 address") as refused:
        require_ready(own)
    assert refused.value.exit_code == 76


def test_one_node_has_nobody_to_meet(tmp_path: Path) -> None:
    group = NodeGroup(names=("n0",), index=0, attempt_path=tmp_path, attempt=1)
    assert collect_here(tmp_path, group) == []


def collect_here(run_path: Path, group: NodeGroup) -> list[Finding]:
    request = PreflightRequest(run_path=run_path, node=group.name, levels=(Level.COLLECT,), group=group)
    return run_preflight(request)


@pytest.mark.parametrize(
    ("answer", "code", "where", "said"),
    [
        (None, "node_stuck", "n1", "n1 did not answer at all"),
        ({"stage": "reach", "error": "refused"}, "unreachable", "n1", "n1 does not reach n0: refused"),
        ({"stage": "lost", "error": "closed"}, "node_stuck", "n0", "n0 has gone: closed"),
        ({"error": "no gloo"}, "collective", "n1", "on n1: no gloo"),
        ({"is_exact": False, "pairs": {}}, "collective", "n1", "the sum over 3 nodes is wrong on n1"),
        (
            {"stage": "sum", "missing": ["n2"], "error": "closed by peer"},
            "node_stuck",
            "n2",
            "node n2 has not finished the sum (closed by peer)",
        ),
        (
            {"is_exact": True, "pairs": {"n1": 9e7, "n2": 4e6}},
            "bandwidth",
            "n2",
            "n2 and n0 exchange 4.0 MB/s",
        ),
    ],
)
def test_what_nodes_say_becomes_a_finding_that_names_one(
    tmp_path: Path, answer: dict[str, Any] | None, code: str, where: str, said: str
) -> None:
    group = NodeGroup(names=("n0", "n1", "n2"), index=1, attempt_path=tmp_path, attempt=1)
    (finding,) = judge_collective(group, answer)
    assert (finding.code, finding.where, finding.given) == (code, where, said)


# Three nodes at one rendezvous; two of them give signs of life.
_RENDEZVOUS = """
import json, os, time
from datetime import timedelta
from torch.distributed import TCPStore
from strop.hardware.preflight import collective_probe
from strop.hardware.preflight.collective_probe import Rendezvous
# Who lives gives a sign in that time, however busy the machine is.
collective_probe._SILENT_S = 4.0
limit = timedelta(seconds=120)
keeper = TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
def meet(rank):
    store = TCPStore("127.0.0.1", keeper.port, is_master=False, timeout=limit, wait_for_workers=False)
    return Rendezvous(store, ["n0", "n1", "n2"], rank)
first, second = meet(0), meet(1)
for stage in ("come", "start"):
    first.announce(stage)
    second.announce(stage)
    keeper.set(f"{stage}/2", "1")
keeper.set("beat/2", "17")
time.sleep(0.5)
print(json.dumps([first.find_missing("join"), first.find_late({"limit_s": 8.0})]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_who_waits_for_a_dead_node_is_not_blamed() -> None:
    """Two of three are as late as the dead one; they give signs of life, and it does not."""
    done = subprocess.run([sys.executable, "-c", _RENDEZVOUS], check=True, capture_output=True, text=True)
    late, blamed = json.loads(done.stdout)
    assert late == ["n0", "n1", "n2"]
    assert blamed == {"stage": "join", "missing": ["n2"], "limit_s": 8.0}
