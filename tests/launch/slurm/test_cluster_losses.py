"""What happens when nodes, the controller or its memory of a job go away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.hardware.findings import Severity
from strop.launch.contract import JobState, StatusSource
from strop.launch.logs import LogFilter
from tests.launch.slurm.conftest import log_in
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, a_role, slurm_log
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def login(frail: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoginNode]:
    """A login node of the frail cluster."""
    yield log_in(frail, tmp_path / "login", monkeypatch)
    frail.clear()


def test_without_a_controller_nothing_is_lost(login: LoginNode, frail: Cluster) -> None:
    ref = login.submit(a_role("--steps", "3000"))
    login.wait_for(ref, JobState.RUNNING)
    login.wait_for_step(ref)
    frail.stop_controller()
    try:
        status = login.status(ref)
        assert (status.state, status.source) == (JobState.RUNNING, StatusSource.LAST_KNOWN)
        assert "Unable to contact slurm controller" in status.reason
        assert status.age_s > 5.0
        lines = [line.text for line in login.launcher.logs(ref, 0, LogFilter(), is_followed=False)]
        assert f"attempt {ref.job_id}-0 node 0 begins at step 0" in lines
        findings = login.backend.probe(login.launcher.plan(login.request(name="other")))
        assert [(finding.code, finding.severity) for finding in findings] == [("scheduler", Severity.UNKNOWN)]
    finally:
        frail.start_controller()
    login.wait_until(lambda: login.status(ref).source is StatusSource.SCHEDULER)
    assert login.status(ref).state is JobState.RUNNING, slurm_log(ref)


def test_a_forgotten_job_is_known_by_its_record(login: LoginNode) -> None:
    done = login.submit(a_role(), name="done")
    failed = login.submit(a_role("--codes", "3"), name="failed")
    for ref in (done, failed):
        login.wait_for(ref, *ALL_ENDS)
    # Slurm looks for old jobs once a minute.
    login.wait_until(lambda: login.backend.poll([done, failed]) == {}, limit_s=200.0)
    statuses = login.launcher.status([done, failed])
    assert [status.state for status in statuses] == [JobState.SUCCEEDED, JobState.FAILED]
    assert {status.source for status in statuses} == {StatusSource.RECORD}
