"""What happens when nodes, the controller or its memory of a job go away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.hardware.findings import Severity
from strop.launch.contract import JobState, StatusSource
from strop.launch.logs import LogFilter
from tests.launch.slurm.conftest import open_desk
from tests.launch.slurm.plans import ALL_ENDS, Desk, a_role, slurm_log
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def desk(frail: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A login node of the frail cluster."""
    yield open_desk(frail, tmp_path / "desk", monkeypatch)
    frail.clear()


def test_lau_3_a_job_of_a_lost_node_lives_again_and_the_old_life_is_cut_off(
    desk: Desk, frail: Cluster
) -> None:
    """Slurm starts it elsewhere while the old processes go on: they must neither write nor requeue it."""
    ref = desk.submit(a_role("--steps", "3000,10"))
    lost = desk.wait_for(ref, JobState.RUNNING).nodes
    # Slurm calls it running before its node has heard of it.
    desk.wait_for_step(ref)
    frail.kill_node(lost)
    status = desk.wait_for(ref, JobState.SUCCEEDED, attempt=1)
    assert status.nodes != lost
    old = Path(ref.home) / f"attempts/{ref.job_id}-0"
    desk.wait_until((old / "verdict.json").exists)
    end = json.loads((old / "end-0.json").read_text())
    assert (end["exit_code"], "this one is cut off" in end["cause"]) == (1, True), end
    assert desk.status(ref).state is JobState.SUCCEEDED
    assert len(desk.launcher.read_attempts(ref, 0)) == 2
    frail.start_node(lost)
    frail.await_nodes()


def test_without_a_controller_nothing_is_lost(desk: Desk, frail: Cluster) -> None:
    ref = desk.submit(a_role("--steps", "3000"))
    desk.wait_for(ref, JobState.RUNNING)
    desk.wait_for_step(ref)
    frail.stop_controller()
    try:
        status = desk.status(ref)
        assert (status.state, status.source) == (JobState.RUNNING, StatusSource.LAST_KNOWN)
        assert "Unable to contact slurm controller" in status.reason
        assert status.age_s > 5.0
        lines = [line.text for line in desk.launcher.logs(ref, 0, LogFilter(), is_followed=False)]
        assert f"attempt {ref.job_id}-0 node 0 begins at step 0" in lines
        findings = desk.backend.probe(desk.launcher.plan(desk.request(name="other")))
        assert [(finding.code, finding.severity) for finding in findings] == [("scheduler", Severity.UNKNOWN)]
    finally:
        frail.start_controller()
    desk.wait_until(lambda: desk.status(ref).source is StatusSource.SCHEDULER)
    assert desk.status(ref).state is JobState.RUNNING, slurm_log(ref)


def test_a_forgotten_job_is_known_by_its_record(desk: Desk) -> None:
    done = desk.submit(a_role(), name="done")
    failed = desk.submit(a_role("--codes", "3"), name="failed")
    for ref in (done, failed):
        desk.wait_for(ref, *ALL_ENDS)
    # Slurm looks for old jobs once a minute.
    desk.wait_until(lambda: desk.backend.ask([done, failed]) == {}, limit_s=200.0)
    statuses = desk.launcher.status([done, failed])
    assert [status.state for status in statuses] == [JobState.SUCCEEDED, JobState.FAILED]
    assert {status.source for status in statuses} == {StatusSource.RECORD}
