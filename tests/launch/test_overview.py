"""All jobs of a user at once, whatever state their homes and schedulers are in."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.launch.contract import Answer, JobState
from strop.launch.home import job_path_of, write_ref
from strop.launch.last_known import recall_end
from strop.launch.overview import find_orphans, list_statuses, status_to_json
from tests.fixtures.scripted_jobs import NOW, RUNNING, World


@pytest.fixture(autouse=True)
def one_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site has the scripted scheduler."""
    monkeypatch.setattr("strop.launch.backends.open_backend", lambda site: world.backend)
    monkeypatch.setattr("strop.launch.overview.open_backend", lambda site: world.backend)


def names(world: World) -> list[tuple[str, str]]:
    return [(one.ref.name, one.state.value) for one in list_statuses([world.runs], world.environ)]


def test_all_jobs_of_a_site_are_one_question(world: World) -> None:
    refs = [world.submit(f"name=run{number}") for number in range(3)]
    world.backend.answer(refs[1], RUNNING)
    before = world.backend.count("ask")
    assert sorted(names(world)) == [("run0", "queued"), ("run1", "starting"), ("run2", "queued")]
    assert world.backend.count("ask") == before + 1


def test_a_home_that_was_refused_or_has_gone_is_no_job(world: World) -> None:
    ref = world.submit()
    world.backend.refusal = "no"
    with pytest.raises(Exception, match="no"):
        world.submit("name=second")
    assert names(world) == [("run", "queued")]
    shutil.rmtree(ref.home)
    assert names(world) == []


@pytest.mark.parametrize("name", ["plan.json", "ref.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"name": 3}'])
def test_a_damaged_home_is_unknown_and_hides_no_other_one(world: World, name: str, content: str) -> None:
    good, bad = world.submit(), world.submit("name=second")
    (job_path_of(bad.home) / name).write_text(content)
    found = {one.ref.home: one for one in list_statuses([world.runs], world.environ)}
    assert found[good.home].state is JobState.QUEUED
    assert found[bad.home].state is JobState.UNKNOWN
    assert f"{name} is damaged" in found[bad.home].reason
    assert status_to_json(found[bad.home])["attempt"] is None


def test_what_has_lost_its_other_half_is_an_orphan(world: World) -> None:
    kept, lost, forgotten = world.submit(), world.submit("name=second"), world.submit("name=third")
    assert find_orphans([world.runs], world.environ) == []
    shutil.rmtree(lost.home)
    world.backend.answer(forgotten, None)
    found = dict(find_orphans([world.runs], world.environ, now=NOW + 5400.0))
    assert found["job fake-2 on local, submitted 1.5 h ago"] == f"its directory {lost.home} is not there"
    assert "the scheduler does not know it" in found[forgotten.home]
    assert kept.home not in found


def test_the_jobs_before_the_present_one_and_all_members_are_no_orphans(world: World) -> None:
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref), 1)
    world.backend.answer(ref, None)
    again = world.launcher.resume(Path(ref.home), world.request(now=NOW + 60.0)).ref
    # As where every member of a sweep is a job of its own.
    write_ref(replace(again, details={"jobs": [{"name": again.job_id}, {"name": "fake-3"}]}))
    world.backend.hand_over(world.plan_of(ref))
    assert find_orphans([world.runs], world.environ) == []


def test_nobody_is_an_orphan_because_a_scheduler_is_silent(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, RUNNING)
    list_statuses([world.runs], world.environ)
    world.backend.is_silent = True
    assert find_orphans([world.runs], world.environ) == []


def test_a_status_for_programs_has_its_attempt(world: World) -> None:
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref, 2), 75)
    world.backend.answer(ref, Answer(state=JobState.QUEUED, raw="PENDING", num_restarts=3))
    (told,) = (status_to_json(one) for one in list_statuses([world.runs], world.environ))
    assert told["attempt"] == {"name": "fake-1-2", "number": 2, "exit_code": 75}
    assert (told["state"], told["home"], told["job_id"]) == ("preempted", str(Path(ref.home)), "fake-1")


def test_schedulers_are_not_asked_for_jobs_that_were_seen_to_end(world: World) -> None:
    ended, living = world.submit(), world.submit("name=second")
    world.backend.answer(ended, Answer(state=JobState.CANCELLED, raw="CANCELLED"))
    world.backend.answer(living, RUNNING)
    assert sorted(names(world)) == [("run", "cancelled"), ("second", "starting")]
    # The scheduler has forgotten it meanwhile, and is asked for the other one alone.
    world.backend.answer(ended, None)
    before = len(world.backend.calls)
    assert sorted(names(world)) == [("run", "cancelled"), ("second", "starting")]
    (asked,) = [call for call in world.backend.calls[before:] if call.verb == "ask"]
    assert asked.detail == living.job_id
    # One that goes on in its home may have the same id: what was seen before it was submitted says nothing.
    again = replace(ended, submitted_at=time.time() + 60.0)
    assert recall_end(again, [0]) is None
