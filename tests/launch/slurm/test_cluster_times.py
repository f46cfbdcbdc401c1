"""Jobs at their time limit. They were submitted before all others, because a limit is a minute at least."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.launch.jobs.contract import JobState
from tests.launch.slurm.conftest import Limited, open_desk
from tests.launch.slurm.plans import ALL_ENDS, seen, slurm_log

pytestmark = pytest.mark.slow


def test_a_job_that_is_told_of_its_limit_goes_on_in_another_life(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk(limited.cluster, limited.root, monkeypatch)
    ref = limited.refs["told"]
    status = desk.wait_for(ref, *ALL_ENDS, limit_s=150.0, attempt=1)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    attempts = desk.launcher.read_attempts(ref, 0)
    assert [attempt.exit_code for attempt in attempts] == [75] * (len(attempts) - 1) + [0]
    assert attempts[0].signal == "SIGUSR2"
    assert seen(ref, f"{ref.job_id}-1")["begin"] > 0


def test_a_job_that_does_not_listen_ends_at_its_limit_and_is_not_started_again(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk(limited.cluster, limited.root, monkeypatch)
    ref = limited.refs["deaf"]
    desk.wait_for(ref, *ALL_ENDS, limit_s=150.0)
    answer = desk.backend.ask([ref])[ref.job_id, 0]
    assert (answer.state, answer.num_restarts) == (JobState.TIMEOUT, 0)
    assert len(list((Path(ref.home) / "attempts").glob("*/verdict.json"))) == 1
