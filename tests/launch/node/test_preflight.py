"""The checks on a node before any role."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import Interrupted
from strop.hardware.allocation import Allocation
from strop.launch.build_request import make_plan
from strop.launch.local.backend import LocalBackend
from strop.launch.node.agent import check_node
from strop.launch.node.environment import NodeTask
from tests.fixtures.jobs import make_request, project, saver

__all__ = ["project"]


def test_a_node_that_is_to_end_waits_for_no_other_node(project: Path) -> None:
    """Incident: a node waited two minutes for the others, was told to end meanwhile, and was killed."""
    plan = make_plan(make_request(project, [saver()], "job.preflight=collect"), LocalBackend())
    plan = replace(plan, resources=replace(plan.resources, num_nodes=2))
    task = NodeTask(
        job_path=project, trial_path=project, attempt="7-0", number=0, node=0, num_nodes=2, part="main"
    )
    began = time.monotonic()
    with pytest.raises(Interrupted, match="stopped while it waited for node 0, 1"):
        check_node(plan, task, Allocation(roles={}), "lease", lambda text: None, is_stopped=lambda: True)
    assert time.monotonic() - began < 60.0
