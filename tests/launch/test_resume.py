"""Jobs that go on in their own directory, once and only when nothing of them runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from strop.launch.contract import JobRef, JobState, SchedulerStatus, StatusSource
from tests.fixtures.scripted_jobs import NOW, RUNNING, Killed, World, be_killed, refusal

S = JobState


def failed(world: World, *overrides: str) -> JobRef:
    """Return a job whose second attempt has failed."""
    ref = world.submit(*overrides)
    world.backend.end_attempt(world.backend.begin_attempt(ref, 0), 75)
    world.backend.end_attempt(world.backend.begin_attempt(ref, 1), 1)
    world.backend.answer(ref, None)
    return ref


def test_a_failed_job_goes_on_in_its_directory_and_its_past_is_past(world: World) -> None:
    old = failed(world)
    again = world.launcher.resume(Path(old.home), world.request(now=NOW + 60.0))
    assert (again.ref.home, again.ref.job_id, again.is_new) == (old.home, "fake-2", True)
    # Numbers go on, so that the fence lets the new attempts write.
    assert world.plan_of(again.ref).num_past == 2
    # The failure of the old job says nothing of the new one.
    assert world.standing_of(again.ref) == (S.QUEUED, StatusSource.SCHEDULER)
    world.backend.answer(again.ref, RUNNING)
    world.backend.begin_attempt(again.ref, 2)
    assert world.standing_of(again.ref) == (S.RUNNING, StatusSource.SCHEDULER)
    assert world.launcher.cancel(again.ref, grace_s=1.0).ended_by == "TERM"


def test_resources_and_code_may_change_between_lives(world: World) -> None:
    old = failed(world)
    (world.project / "train_more.py").write_text("print('mended')\n")
    again = world.launcher.resume(Path(old.home), world.request("job.nodes=2"))
    plan = world.plan_of(again.ref)
    assert plan.resources.num_nodes == 2
    assert plan.plan_hash != old.plan_hash


def test_another_run_does_not_go_on_there(world: World) -> None:
    old = failed(world)
    told = refusal(lambda: world.launcher.resume(Path(old.home), world.request("train.steps=9")))
    assert "is a run of another spec" in told
    told = refusal(lambda: world.launcher.resume(Path(old.home), world.request(sweep=("train.steps=2,3",))))
    assert "another sweep is asked for" in told


def test_a_job_goes_on_at_its_own_site_alone(world: World) -> None:
    old = failed(world)
    world.sites('[sites.lab]\nbackend = "local"\n')
    told = refusal(
        lambda: world.launcher.resume(Path(old.home), world.request(site="lab", has_snapshot=False))
    )
    assert "was submitted to local, and this is lab" in told
    assert "--on local" in told


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (RUNNING, None),
        (SchedulerStatus(state=S.QUEUED, raw="PENDING"), None),
        (SchedulerStatus(state=S.QUEUED, raw="PENDING", num_restarts=1), 75),
        (SchedulerStatus(state=S.UNKNOWN, raw="RESIZING"), None),
        (None, 0),
        # Its record has ended, and its scheduler still has it: its processes may be writing.
        (RUNNING, 1),
    ],
)
def test_what_may_run_or_has_succeeded_does_not_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch, answer: SchedulerStatus | None, code: int | None
) -> None:
    monkeypatch.setattr("strop.launch.submit.SETTLE_LIMIT_S", 0.1)
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref), code)
    world.backend.answer(ref, answer)
    told = refusal(lambda: world.launcher.resume(Path(ref.home), world.request()))
    assert "a job that has ended without success" in told
    assert world.backend.count("submit") == 1


def test_a_running_job_is_refused_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.launch.submit.SETTLE_LIMIT_S", 60.0)
    ref = world.submit()
    world.backend.answer(ref, RUNNING)
    began = time.monotonic()
    refusal(lambda: world.launcher.resume(Path(ref.home), world.request()))
    assert time.monotonic() - began < 30.0


def test_a_job_that_its_scheduler_forgot_and_that_left_no_verdict_may_go_on(world: World) -> None:
    # A node was lost: nobody will ever say how it ended, and the scheduler, which answers, has it no more.
    ref = world.submit()
    world.backend.begin_attempt(ref)
    world.backend.answer(ref, None)
    assert world.launcher.resume(Path(ref.home), world.request()).ref.job_id == "fake-2"


def test_a_kill_while_going_on_loses_no_job_either(world: World) -> None:
    old = failed(world)
    world.backend.after_accepting = be_killed
    with pytest.raises(Killed):
        world.launcher.resume(Path(old.home), world.request())
    world.backend.after_accepting = lambda: None
    # Its note still names the first job, which has failed.
    again = world.launcher.resume(Path(old.home), world.request())
    assert (again.ref.job_id, again.is_new) == ("fake-2", False)
    assert world.backend.count("submit") == 2


def test_a_refused_job_can_go_on_too(world: World) -> None:
    world.backend.refusal = "no"
    refusal(world.submit)
    (home,) = world.runs.glob("run-*")
    world.backend.refusal = ""
    assert world.launcher.resume(home, world.request()).ref.job_id == "fake-1"
