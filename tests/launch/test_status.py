"""The status of jobs, whatever their directories and schedulers answer, and what cancel makes of it."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.errors import ConfigError, StoreError
from strop.launch.contract import JobRef, JobState, SchedulerStatus, StatusSource
from strop.launch.job_dir import job_path_of, write_ref
from strop.launch.logs import LogFilter
from strop.launch.status import find_orphans, list_statuses, read_known_end, status_to_json
from strop.record.files import LogLine
from tests.fixtures.scripted_jobs import NOW, RUNNING, World, refusal

S = JobState


# Where jobs stand.


def test_a_job_from_submission_to_success(world: World) -> None:
    ref = world.submit()
    assert world.standing_of(ref) == (S.QUEUED, StatusSource.SCHEDULER)
    world.backend.answer(ref, RUNNING)
    assert world.standing_of(ref) == (S.STARTING, StatusSource.SCHEDULER)
    first = world.backend.begin_attempt(ref)
    assert world.standing_of(ref) == (S.RUNNING, StatusSource.SCHEDULER)
    world.backend.end_attempt(first, 75, signal="SIGUSR2")
    for answer, state in ((S.QUEUED, S.PREEMPTED), (S.RUNNING, S.STARTING)):
        world.backend.answer(ref, SchedulerStatus(state=answer, raw="", num_restarts=1))
        assert world.standing_of(ref) == (state, StatusSource.SCHEDULER)
    second = world.backend.begin_attempt(ref, 1)
    world.backend.end_attempt(second, 0)
    world.backend.answer(ref, None)
    assert world.standing_of(ref) == (S.SUCCEEDED, StatusSource.RECORD)
    # The record answers where the scheduler is silent.
    world.backend.is_silent = True
    assert world.standing_of(ref) == (S.SUCCEEDED, StatusSource.RECORD)


def test_lau_6_silence_gives_the_last_known_state_with_its_age(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, RUNNING)
    world.backend.begin_attempt(ref)
    assert world.standing_of(ref)[0] is S.RUNNING
    path = job_path_of(ref.home) / "state.json"
    states = json.loads(path.read_text())
    states["0"]["at"] = time.time() - 300.0
    path.write_text(json.dumps(states))
    world.backend.is_silent = True
    for _ in range(2):
        # Asking again makes an old answer no younger.
        (found,) = world.launcher.status([ref])
        assert (found.state, found.source) == (S.RUNNING, StatusSource.LAST_KNOWN)
        assert 300.0 <= found.age_s < 330.0
        assert "does not answer" in found.reason


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"0": 7}', '{"0": {"state": "dead", "at": 1}}', '{"0": {}}']
)
def test_silence_without_a_last_known_state_is_unknown(world: World, content: str | None) -> None:
    ref = world.submit()
    path = job_path_of(ref.home) / "state.json"
    if content is not None:
        path.write_text(content)
    world.backend.is_silent = True
    assert world.standing_of(ref) == (S.UNKNOWN, StatusSource.NOTHING)
    # Where none can be written there is still a state.
    path.unlink(missing_ok=True)
    path.mkdir()
    world.backend.is_silent = False
    assert world.standing_of(ref)[0] is S.QUEUED


def test_an_end_that_was_seen_outlives_the_schedulers_memory(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, SchedulerStatus(state=S.FAILED, raw="NODE_FAIL", reason="node n3"))
    world.launcher.status([ref])
    world.backend.answer(ref, None)
    (found,) = world.launcher.status([ref])
    assert (found.state, found.source) == (S.FAILED, StatusSource.LAST_KNOWN)
    assert "node n3" in found.reason


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (RUNNING, S.STARTING),
        (SchedulerStatus(state=S.CANCELLED, raw="CANCELLED"), S.CANCELLED),
        (SchedulerStatus(state=S.FAILED, raw="FAILED"), S.FAILED),
        # Without its record no one knows whether it is a success, or has failed.
        (SchedulerStatus(state=S.SUCCEEDED, raw="COMPLETED"), S.UNKNOWN),
        (None, S.UNKNOWN),
    ],
)
def test_a_record_that_does_not_answer_is_no_missing_record(
    world: World, answer: SchedulerStatus | None, state: JobState
) -> None:
    ref = world.submit()
    world.backend.answer(ref, answer)
    world.backend.is_record_silent = True
    assert world.standing_of(ref)[0] is state


def test_a_split_brain_is_said(world: World) -> None:
    ref = world.submit()
    now = time.time()
    for number, began, ended in ((0, now - 1000.0, now), (1, now - 500.0, None)):
        path = world.backend.begin_attempt(ref, number)
        facts = json.loads((path / "agent-0.json").read_text()) | {"started_at": began}
        (path / "agent-0.json").write_text(json.dumps(facts))
        if ended is not None:
            world.backend.end_attempt(path, 1)
    world.backend.answer(ref, SchedulerStatus(state=S.RUNNING, raw="RUNNING", num_restarts=1))
    (found,) = world.launcher.status([ref])
    assert found.state is S.RUNNING
    assert found.reason.startswith("split_brain: ")


# Ending jobs.


@pytest.fixture
def running(world: World) -> JobRef:
    ref = world.submit()
    world.backend.answer(ref, RUNNING)
    world.backend.begin_attempt(ref)
    return ref


def orders(world: World) -> list[str]:
    return [call.detail for call in world.backend.calls if call.verb == "stop"]


@pytest.mark.parametrize(
    ("ends_at", "told", "state"),
    [("TERM", "TERM", S.CANCELLED), ("KILL", "TERM KILL", S.CANCELLED), ("", "TERM KILL", S.RUNNING)],
)
def test_an_end_is_asked_for_then_forced_and_seen(
    world: World, running: JobRef, monkeypatch: pytest.MonkeyPatch, ends_at: str, told: str, state: JobState
) -> None:
    monkeypatch.setattr("strop.launch.launcher.KILL_LIMIT_S", 0.2)
    world.backend.ends_at = ends_at
    outcome = world.launcher.cancel(running, grace_s=0.2)
    assert (outcome.ended_by, " ".join(orders(world))) == (ends_at, told)
    assert [one.state for one in outcome.statuses] == [state]


def test_secrets_go_with_the_last_trial_that_ends_also_before_its_first_attempt(world: World) -> None:
    (world.project / ".env").write_text("MY_TOKEN=canary-value-1\n")
    ref = world.submit(sweep=("train.steps=2,3",))
    path = job_path_of(ref.home) / "secrets.json"
    outcome = world.launcher.cancel(ref, trial=1, grace_s=1.0)
    assert [(one.trial, one.state) for one in outcome.statuses] == [(1, S.CANCELLED)]
    assert [one.state for one in world.launcher.status([ref])] == [S.QUEUED, S.CANCELLED]
    assert path.exists()
    world.launcher.cancel(ref, trial=0, grace_s=1.0)
    assert not path.exists()


def test_secrets_stay_where_only_a_record_says_that_it_has_failed(world: World, running: JobRef) -> None:
    # Its scheduler may let it live again on another node, and is silent now.
    (job_path_of(running.home) / "secrets.json").write_text("{}")
    world.backend.end_attempt(Path(running.home) / "attempts" / "fake-1-0", 76)
    world.backend.is_silent = True
    assert world.launcher.cancel(running, grace_s=1.0).ended_by == "it had ended"
    assert (job_path_of(running.home) / "secrets.json").exists()


@pytest.mark.parametrize("trial", [1, -1])
def test_a_trial_that_a_job_does_not_have_is_refused(world: World, running: JobRef, trial: int) -> None:
    for call in (
        lambda: world.launcher.cancel(running, trial=trial, grace_s=1.0),
        lambda: list(world.launcher.logs(running, trial, LogFilter(), is_followed=False)),
    ):
        assert f"no trial {trial}" in refusal(call, ConfigError)
    assert orders(world) == []


# Logs.


def test_logs_come_from_files_after_the_scheduler_forgot(world: World, running: JobRef) -> None:
    path = Path(running.home) / "attempts" / "fake-1-0" / "0" / "train.log"
    path.parent.mkdir()
    path.write_text("hello\n")
    world.backend.answer(running, None)
    world.backend.is_silent = True
    lines = list(world.launcher.logs(running, 0, LogFilter(), is_followed=False))
    assert lines == [LogLine(text="hello", attempt="fake-1-0", node="0", role="train")]


class Portions:
    """Logs of a service."""

    def __init__(self, *portions: list[LogLine]) -> None:
        self.portions = list(portions)

    def read_new(self) -> list[LogLine]:
        return self.portions.pop(0) if self.portions else []


def test_logs_of_a_service_are_filtered_and_end_with_the_job(world: World, running: JobRef) -> None:
    def line(text: str, node: str) -> LogLine:
        return LogLine(text=text, attempt="fake-1-0", node=node, role="train")

    world.backend.end_attempt(Path(running.home) / "attempts" / "fake-1-0", 0)
    for is_followed in (True, False):
        world.backend.logs = Portions([line("a", "0"), line("b", "1")], [line("c", "1")])
        found = world.launcher.logs(running, 0, LogFilter(node=1), is_followed=is_followed)
        assert [one.text for one in found] == ["b", "c"]
    world.backend.logs = Portions()
    refusal(lambda: list(world.launcher.logs(running, 0, LogFilter(), is_followed=False)), StoreError)


def test_followed_logs_end_when_nobody_has_known_the_job_for_long(
    world: World, running: JobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.launch.launcher.UNKNOWN_LIMIT_S", 0.5)
    world.backend.answer(running, None)
    assert list(world.launcher.logs(running, 0, LogFilter(role="nobody"), is_followed=True)) == []
    assert world.standing_of(running)[0] is JobState.UNKNOWN


@pytest.fixture(autouse=True)
def one_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site has the scripted scheduler."""
    monkeypatch.setattr("strop.launch.backends.open_backend", lambda site: world.backend)
    monkeypatch.setattr("strop.launch.status.open_backend", lambda site: world.backend)


def names(world: World) -> list[tuple[str, str]]:
    return [(one.ref.name, one.state.value) for one in list_statuses([world.runs], world.environ)]


def test_all_jobs_of_a_site_are_one_question(world: World) -> None:
    refs = [world.submit(f"name=run{number}") for number in range(3)]
    world.backend.answer(refs[1], RUNNING)
    before = world.backend.count("poll")
    assert sorted(names(world)) == [("run0", "queued"), ("run1", "starting"), ("run2", "queued")]
    assert world.backend.count("poll") == before + 1


def test_a_directory_that_was_refused_or_has_gone_is_no_job(world: World) -> None:
    ref = world.submit()
    world.backend.refusal = "no"
    with pytest.raises(Exception, match="no"):
        world.submit("name=second")
    assert names(world) == [("run", "queued")]
    shutil.rmtree(ref.home)
    assert names(world) == []


@pytest.mark.parametrize("name", ["plan.json", "ref.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"name": 3}'])
def test_a_damaged_directory_is_unknown_and_hides_no_other_one(world: World, name: str, content: str) -> None:
    good, bad = world.submit(), world.submit("name=second")
    (job_path_of(bad.home) / name).write_text(content)
    found = {one.ref.home: one for one in list_statuses([world.runs], world.environ)}
    assert found[good.home].state is JobState.QUEUED
    assert found[bad.home].state is JobState.UNKNOWN
    assert f"{name} is damaged" in found[bad.home].reason
    assert status_to_json(found[bad.home])["attempt"] is None


def test_what_has_lost_its_other_half_is_an_orphan(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost, forgotten = world.submit(), world.submit("name=second"), world.submit("name=third")
    assert find_orphans([world.runs], world.environ) == []
    shutil.rmtree(lost.home)
    world.backend.answer(forgotten, None)
    monkeypatch.setattr("strop.launch.status.time", SimpleNamespace(time=lambda: NOW + 5400.0))
    found = dict(find_orphans([world.runs], world.environ))
    assert found["job fake-2 on local, submitted 1.5 h ago"] == f"its directory {lost.home} is not there"
    assert forgotten.home in found
    assert kept.home not in found
    # Nobody is one because a scheduler is silent.
    world.backend.is_silent = True
    assert forgotten.home not in dict(find_orphans([world.runs], world.environ))


def test_the_jobs_before_the_present_one_and_all_trials_are_no_orphans(world: World) -> None:
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref), 1)
    world.backend.answer(ref, None)
    again = world.launcher.resume(Path(ref.home), world.request(now=NOW + 60.0)).ref
    # As where every trial of a sweep is a job of its own.
    write_ref(replace(again, details={"jobs": [{"name": again.job_id}, {"name": "fake-3"}]}))
    world.backend.submit(world.plan_of(ref))
    assert find_orphans([world.runs], world.environ) == []


def test_schedulers_are_not_asked_for_jobs_that_were_seen_to_end(world: World) -> None:
    ended, living = world.submit(), world.submit("name=second")
    world.backend.answer(ended, SchedulerStatus(state=JobState.CANCELLED, raw="CANCELLED"))
    world.backend.answer(living, RUNNING)
    assert sorted(names(world)) == [("run", "cancelled"), ("second", "starting")]
    # The scheduler has forgotten it meanwhile, and is asked for the other one alone.
    world.backend.answer(ended, None)
    before = len(world.backend.calls)
    assert sorted(names(world)) == [("run", "cancelled"), ("second", "starting")]
    (asked,) = [call for call in world.backend.calls[before:] if call.verb == "poll"]
    assert asked.detail == living.job_id
    # One that goes on in its home may have the same id: what was seen before it was submitted says nothing.
    again = replace(ended, submitted_at=time.time() + 60.0)
    assert read_known_end(again, [0]) is None
