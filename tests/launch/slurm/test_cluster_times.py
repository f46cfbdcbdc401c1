"""Jobs that mostly wait: at a time limit, or to live again. They were submitted before all others."""

from __future__ import annotations

import pytest

from strop.launch.contract import JobState
from tests.launch.slurm.conftest import Early, log_in
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, seen, slurm_log

pytestmark = pytest.mark.slow


@pytest.fixture
def login(early: Early, monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    """The login node that they were submitted from."""
    return log_in(early.cluster, early.root, monkeypatch)


def test_lau_3_a_job_that_always_saves_is_requeued_as_often_as_it_may(login: LoginNode, early: Early) -> None:
    ref = early.refs["saving"]
    status = login.wait_for(ref, *ALL_ENDS)
    assert status.state is JobState.FAILED
    assert status.reason.startswith("requeue budget")
    assert len(login.attempts(ref, 0)) == 3


def test_a_job_that_is_told_of_its_limit_goes_on_in_another_life(login: LoginNode, early: Early) -> None:
    ref = early.refs["told"]
    status = login.wait_for(ref, *ALL_ENDS, limit_s=300.0, attempt=1)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    attempts = login.attempts(ref, 0)
    assert [attempt.exit_code for attempt in attempts] == [75] * (len(attempts) - 1) + [0]
    assert attempts[0].signal == "SIGUSR2"
    assert seen(ref, f"{ref.job_id}-1")["begin"] > 0


def test_a_job_that_does_not_listen_ends_at_its_limit_and_is_not_started_again(
    login: LoginNode, early: Early
) -> None:
    ref = early.refs["deaf"]
    login.wait_for(ref, *ALL_ENDS, limit_s=300.0)
    login.wait_until(lambda: login.backend.poll([ref])[ref.job_id, 0].state.is_terminal)
    answer = login.backend.poll([ref])[ref.job_id, 0]
    assert (answer.state, answer.num_restarts) == (JobState.TIMEOUT, 0)
    assert len(login.attempts(ref, 0)) == 1
