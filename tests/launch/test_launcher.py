"""The verbs of jobs over a scripted scheduler."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.errors import StoreError
from strop.hardware.findings import Finding, Severity
from strop.launch.contract import JobRef, JobState, SchedulerStatus, StatusSource
from strop.launch.job_dir import REFUSED_NAME, has_plan, has_ref, job_path_of
from tests.fixtures.scripted_jobs import NOW, RUNNING, Killed, World, be_killed, make_world, refusal

NOISE = Finding(code="x", given="g", allowed="a", next_step="n")


# Submitting once.


def test_the_same_again_is_the_job_of_the_first_time(world: World) -> None:
    first = world.launcher.submit(world.request())
    # A minute later, from another process.
    again = world.launcher.submit(world.request(now=NOW + 60.0))
    assert (first.is_new, again.is_new) == (True, False)
    # And for another directory it is still the same job.
    assert again.ref == first.ref == world.submit(f"output.dir={world.runs / 'here'}")
    assert world.backend.count("submit") == 1
    assert len(list(world.runs.glob("run-*"))) == 1


def test_a_named_directory_is_submitted_once_too(world: World) -> None:
    # Its name says nothing of the run, so that it is not found by name.
    output = f"output.dir={world.runs / 'here'}"
    first = world.launcher.submit(world.request(output))
    again = world.launcher.submit(world.request(output, now=NOW + 60.0))
    assert again.ref == first.ref
    # A new one never goes into the directory of another.
    assert "--resume" in refusal(lambda: world.submit(output, is_new=True))
    assert world.backend.count("submit") == 1


@pytest.mark.parametrize("change", ["train.steps=9", "job.nodes=2", "store.uri=/mirror"])
def test_a_changed_plan_under_the_same_name_is_refused(world: World, change: str) -> None:
    ref = world.submit()
    told = refusal(lambda: world.submit(change))
    key, _, value = change.partition("=")
    assert all(text in told for text in (Path(ref.home).name, key, value, "--new"))
    (world.project / "train_more.py").write_text("print('less')\n")
    assert "whose plan is another" in refusal(world.submit)
    assert world.backend.count("submit") == 1


def test_a_new_one_is_another_job_even_in_the_same_second(world: World) -> None:
    first = world.submit()
    # Both requests were made before either was submitted.
    request = world.request()
    second = world.launcher.submit(request, is_new=True).ref
    third = world.launcher.submit(request, is_new=True).ref
    assert len({first.home, second.home, third.home}) == 3
    assert len({first.job_id, second.job_id, third.job_id}) == 3
    # The newest of the same plan is the one that a repeated submission means.
    assert world.submit() in (first, second, third)


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_kill_between_acceptance_and_note_loses_no_job(world: World, is_answered: bool) -> None:
    world.backend.after_accepting = be_killed
    with pytest.raises(Killed):
        world.submit()
    (home,) = world.runs.glob("run-*")
    assert has_plan(home)
    assert not has_ref(home)
    world.backend.after_accepting = lambda: None
    world.backend.is_silent = not is_answered
    if not is_answered:
        # Whether it was accepted is not known: nothing may be handed over.
        refusal(world.submit, StoreError)
        assert world.backend.count("submit") == 1
        world.backend.is_silent = False
    again = world.launcher.submit(world.request(now=NOW + 60.0))
    assert (again.ref.job_id, again.ref.home, again.is_new) == ("fake-1", str(home), False)
    assert world.backend.count("submit") == 1
    assert has_ref(home)


def submit_and_be_killed(folder: str) -> None:
    world = make_world_again(Path(folder))
    world.backend.after_accepting = lambda: os.kill(os.getpid(), signal.SIGKILL)
    world.launcher.submit(world.request())


def test_a_real_kill_frees_the_name_and_loses_no_job(world: World) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=submit_and_be_killed, args=(str(world.folder),)
    )
    process.start()
    process.join(timeout=300.0)
    assert process.exitcode == -signal.SIGKILL
    world.environ = {"HOME": str(world.folder)}
    again = world.launcher.submit(world.request(now=NOW + 60.0))
    assert (again.ref.job_id, again.is_new) == ("fake-1", False)
    assert world.backend.count("submit") == 0
    assert len(list(world.runs.glob("run-*"))) == 1


def test_what_a_scheduler_refuses_keeps_its_directory_and_words_but_no_secret(world: World) -> None:
    (world.project / ".env").write_text("MY_TOKEN=canary-value-1\n")
    words = "sbatch: error: Batch job submission failed: Invalid qos specification\n  second line"
    world.backend.refusal = words
    assert refusal(world.submit) == words
    (home,) = world.runs.glob("run-*")
    job_path = job_path_of(home)
    assert (job_path / REFUSED_NAME).read_text() == words
    assert not (job_path / "secrets.json").exists()
    # Mended, the same command goes on in the same home.
    world.backend.refusal = ""
    ref = world.submit()
    assert ref.home == str(home)
    assert (job_path / "secrets.json").exists()
    assert not (job_path / REFUSED_NAME).exists()
    # A silent scheduler keeps secrets: the job may live.
    world.backend.is_silent = True
    refusal(lambda: world.submit("name=other"), StoreError)
    (home,) = world.runs.glob("other-*")
    assert (job_path_of(home) / "secrets.json").exists()


def test_an_error_that_check_finds_stops_the_job_before_anything_is_made(world: World) -> None:
    world.backend.findings = [
        replace(NOISE, code="a", given="just a warning", severity=Severity.WARNING),
        replace(NOISE, code="partition", given="partition gpus does not exist", severity=Severity.ERROR),
    ]
    told = refusal(world.submit)
    assert "partition gpus does not exist" in told
    assert "just a warning" not in told
    assert not world.runs.exists()
    assert world.backend.count("submit") == 0
    # Warnings and probes that could not run stop nothing.
    world.backend.findings = [replace(NOISE, severity=one) for one in (Severity.WARNING, Severity.UNKNOWN)]
    assert world.submit().job_id == "fake-1"


def test_a_list_of_jobs_that_cannot_be_written_does_not_hide_a_submission(world: World) -> None:
    Path(world.environ["XDG_STATE_HOME"]).write_text("a file")
    submitted = world.launcher.submit(world.request())
    assert submitted.ref.job_id == "fake-1"
    assert "could not be written" in submitted.notice
    assert has_ref(Path(submitted.ref.home))


@pytest.mark.parametrize("error", [StoreError("the disk is full"), KeyboardInterrupt()])
def test_a_filling_that_ends_early_leaves_no_secret(
    world: World, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Incident: Ctrl-C during a submission left the values of secrets in a home that no job has."""
    (world.project / ".env").write_text("MY_TOKEN=canary-value-1\n")

    def fail(plan: object) -> None:
        raise error

    monkeypatch.setattr("strop.launch.job_dir.write_plan", fail)
    with pytest.raises(type(error)):
        world.submit()
    assert not list(world.runs.rglob("secrets.json"))


def submit_in_process(folder: str, gate: str, answers: object) -> None:
    world = make_world_again(Path(folder))
    while not Path(gate).exists():
        time.sleep(0.001)
    submitted = world.launcher.submit(world.request())
    answers.put((submitted.ref.job_id, submitted.is_new))  # type: ignore[attr-defined]


def make_world_again(folder: Path) -> World:
    """Return the world that another process has made."""
    made = make_world(folder / "scratch" / str(os.getpid()))
    return World(
        folder=folder, backend=type(made.backend)(folder / "scheduler"), environ={"HOME": str(folder)}
    )


def test_two_submitters_at_the_same_time_submit_once(world: World) -> None:
    context = multiprocessing.get_context("spawn")
    answers, gate = context.Queue(), world.folder / "gate"
    arguments = (str(world.folder), str(gate), answers)
    processes = [context.Process(target=submit_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    time.sleep(1.0)
    gate.touch()
    found = [answers.get(timeout=300.0) for _ in processes]
    for process in processes:
        process.join(timeout=300.0)
    assert sorted(found) == [("fake-1", False), ("fake-1", True)]
    assert len(list((world.folder / "scheduler").iterdir())) == 1


# Planning and checking.


def test_equal_requests_give_equal_plans_and_time_and_place_no_other_hash(world: World) -> None:
    one, other = (world.launcher.plan(world.request(now=now)) for now in (NOW, NOW + 1.0))
    assert world.launcher.plan(world.request()) == one
    assert one.plan_hash == other.plan_hash
    assert one.home != other.home


def test_whatever_decides_what_is_run_is_in_the_hash(world: World) -> None:
    def hash_of(*words: str, **given: Any) -> str:
        return world.launcher.plan(world.request(*words, **given)).plan_hash

    hashes = [hash_of(), hash_of(sweep=("train.steps=2,3",)), hash_of(has_snapshot=False)]
    words = ("train.steps=9", "job.nodes=2", "job.time_limit=2h", "job.gpus=1", "store.uri=/m", "seed=5")
    hashes += map(hash_of, words)
    for number in (1, 2):
        (world.project / ".env").write_text(f"PLAIN={number}\n")
        hashes.append(hash_of())
    world.sites('[sites.local]\nhf_home = "/models"\n')
    hashes.append(hash_of(has_snapshot=False))
    assert len(set(hashes)) == len(hashes)


def test_the_estimate_counts_trials_nodes_and_hours(world: World) -> None:
    world.sites("[sites.local]\nusd_per_gpu_hour = 2.5\n")
    plan = world.launcher.plan(
        world.request("job.nodes=2", "job.gpus=4", "job.time_limit=90m", sweep=("train.steps=2,3,4",))
    )
    # 3 trials * 2 nodes * 4 GPUs * 1.5 hours, at 2.50 each.
    assert (plan.gpu_hours, plan.cost_usd) == (36.0, 90.0)
    assert world.launcher.plan(world.request("job.gpus=4")).gpu_hours is None


def test_a_disk_without_room_is_a_finding(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.launch.submit.free_disk_bytes", lambda path: 500_000_000)
    world.backend.findings = [replace(NOISE, severity=one) for one in (Severity.UNKNOWN, Severity.WARNING)]
    found, *others = world.launcher.check(world.launcher.plan(world.request()))
    assert (found.code, found.severity) == ("disk", Severity.ERROR)
    assert "0.50 GB" in str(found)
    # The worst come first.
    assert [one.severity for one in others] == [Severity.WARNING, Severity.UNKNOWN]


# Jobs that go on in their own directory, once and only when nothing of them runs.


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
    world.sites('[sites.lab]\nbackend = "local"\n')
    for request, told in (
        (world.request("train.steps=9"), "spec"),
        (world.request(sweep=("train.steps=2,3",)), "sweep"),
        (world.request(site="lab", has_snapshot=False), "--on local"),
    ):
        assert told in refusal(partial(world.launcher.resume, Path(old.home), request))


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
    if answer is RUNNING and code is None:
        # What runs is refused at once.
        monkeypatch.setattr("strop.launch.submit.SETTLE_LIMIT_S", 1e6)
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref), code)
    world.backend.answer(ref, answer)
    refusal(lambda: world.launcher.resume(Path(ref.home), world.request()))
    assert world.backend.count("submit") == 1


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
