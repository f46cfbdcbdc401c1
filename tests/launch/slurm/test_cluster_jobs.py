"""Jobs on a real cluster: what their record says, and what the cluster says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.launch.jobs.contract import JobState
from tests.launch.slurm.plans import ALL_ENDS, Desk, a_role, gpus, seen, slurm_log

pytestmark = pytest.mark.slow


def test_a_job_succeeds(desk: Desk) -> None:
    ref = desk.submit(a_role("--steps", "5"))
    status = desk.wait_for(ref, *ALL_ENDS)
    print(slurm_log(ref))
    assert status.state is JobState.SUCCEEDED, status
    verdict = json.loads((Path(ref.home) / f"attempts/{ref.job_id}-0/verdict.json").read_text())
    assert verdict["exit_code"] == 0


def test_two_nodes_with_four_gpus_each_have_two_agents(desk: Desk) -> None:
    role = a_role("--steps", "5", nodes="all", gpus=4)
    ref = desk.submit(role, resources=gpus(4, nodes=2, is_whole_node=True))
    status = desk.wait_for(ref, *ALL_ENDS)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    attempt = f"{ref.job_id}-0"
    devices = [seen(ref, attempt, node)["CUDA_VISIBLE_DEVICES"].split(",") for node in (0, 1)]
    assert [len(names) for names in devices] == [4, 4]
