"""The verbs of jobs over a scripted scheduler."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.launch.jobs.contract import Answer, JobRef, JobState, LogLine, Problem, Severity, StatusSource
from strop.launch.jobs.home import has_plan, has_ref, job_path_of, read_plan
from strop.launch.jobs.launcher import REFUSED_NAME
from strop.launch.jobs.logs import LogFilter
from tests.fixtures.scripted_jobs import NOW, World, make_world

S = JobState
RUNNING = Answer(state=S.RUNNING, raw="RUNNING")
NOISE = Problem(code="x", given="g", allowed="a", next_step="n")


def refusal(call: Callable[[], object], kind: type[Exception] = CheckRefused) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of the program runs any more."""


def be_killed() -> None:
    raise Killed


# Submitting once.


def test_the_same_again_is_the_job_of_the_first_time(world: World) -> None:
    first = world.launcher.submit(world.request())
    # A minute later, from another process.
    again = world.launcher.submit(world.request(now=NOW + 60.0))
    assert (first.is_new, again.is_new) == (True, False)
    assert again.ref == first.ref
    assert world.backend.count("hand_over") == 1
    assert len(list(world.runs.glob("run-*"))) == 1


def test_a_named_directory_is_submitted_once_too(world: World) -> None:
    # Its name says nothing of the run, so that it is not found by name.
    output = f"output.dir={world.runs / 'here'}"
    first = world.launcher.submit(world.request(output))
    again = world.launcher.submit(world.request(output, now=NOW + 60.0))
    assert again.ref == first.ref
    assert world.backend.count("hand_over") == 1


def test_the_same_run_for_another_directory_is_still_the_same_job(world: World) -> None:
    first = world.submit()
    assert world.submit(f"output.dir={world.runs / 'here'}") == first


@pytest.mark.parametrize("change", ["train.steps=9", "job.nodes=2", "store.uri=/mirror"])
def test_a_changed_plan_under_the_same_name_is_refused(world: World, change: str) -> None:
    ref = world.submit()
    told = refusal(lambda: world.submit(change))
    assert f"the name run belongs to {Path(ref.home).name}, whose plan is another" in told
    assert ref.plan_hash in told
    assert "submit with --new" in told
    assert world.backend.count("hand_over") == 1


def test_changed_code_under_the_same_name_is_refused(world: World) -> None:
    world.submit()
    (world.project / "train_more.py").write_text("print('less')\n")
    assert "whose plan is another" in refusal(world.submit)


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


def test_a_new_one_never_goes_into_the_directory_of_another(world: World) -> None:
    output = f"output.dir={world.runs / 'here'}"
    world.submit(output)
    told = refusal(lambda: world.submit(output, is_new=True))
    assert "is the home of another job" in told
    assert "--resume" in told
    assert world.backend.count("hand_over") == 1


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
        assert world.backend.count("hand_over") == 1
        world.backend.is_silent = False
    again = world.launcher.submit(world.request(now=NOW + 60.0))
    assert (again.ref.job_id, again.ref.home, again.is_new) == ("fake-1", str(home), False)
    assert world.backend.count("hand_over") == 1
    assert has_ref(home)


def test_a_kill_before_the_acceptance_is_made_good(world: World) -> None:
    world.backend.refusal = "x"
    hand_over, world.backend.hand_over = world.backend.hand_over, lambda plan: be_killed()  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(Killed):
        world.submit()
    world.backend.hand_over, world.backend.refusal = hand_over, ""  # type: ignore[method-assign]
    ref = world.submit()
    assert (ref.job_id, len(list(world.runs.glob("run-*")))) == ("fake-1", 1)


def test_what_a_scheduler_refuses_keeps_its_home_and_words_but_no_secret(world: World) -> None:
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


def test_an_error_that_check_finds_stops_the_job_before_anything_is_made(world: World) -> None:
    world.backend.problems = [
        replace(NOISE, code="a", given="just a warning", severity=Severity.WARNING),
        replace(NOISE, code="partition", given="partition gpus does not exist", severity=Severity.ERROR),
    ]
    told = refusal(world.submit)
    assert "partition gpus does not exist" in told
    assert "just a warning" not in told
    assert not world.runs.exists()
    assert world.backend.count("hand_over") == 0


def test_warnings_and_probes_that_could_not_run_stop_nothing(world: World) -> None:
    world.backend.problems = [replace(NOISE, severity=one) for one in (Severity.WARNING, Severity.UNKNOWN)]
    assert world.submit().job_id == "fake-1"


def test_a_silent_scheduler_keeps_secrets_because_the_job_may_live(world: World) -> None:
    (world.project / ".env").write_text("MY_TOKEN=canary-value-1\n")
    world.backend.is_silent = True
    assert "does not answer" in refusal(world.submit, StoreError)
    (home,) = world.runs.glob("run-*")
    assert (job_path_of(home) / "secrets.json").exists()


def test_a_list_of_jobs_that_cannot_be_written_does_not_hide_a_submission(world: World) -> None:
    Path(world.environ["XDG_STATE_HOME"]).write_text("a file")
    submitted = world.launcher.submit(world.request())
    assert submitted.ref.job_id == "fake-1"
    assert "could not be written" in submitted.notice
    assert has_ref(Path(submitted.ref.home))


def test_a_full_disk_leaves_no_secret(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.project / ".env").write_text("MY_TOKEN=canary-value-1\n")

    def fail(plan: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr("strop.launch.jobs.filling.write_plan", fail)
    refusal(world.submit, StoreError)
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
    found = [answers.get(timeout=60.0) for _ in processes]
    for process in processes:
        process.join(timeout=60.0)
    assert sorted(found) == [("fake-1", False), ("fake-1", True)]
    assert len(list((world.folder / "scheduler").iterdir())) == 1


# Planning and checking.


def test_equal_requests_give_equal_plans_and_time_and_place_no_other_hash(world: World) -> None:
    one, other = (world.launcher.plan(world.request(now=now)) for now in (NOW, NOW + 1.0))
    assert world.launcher.plan(world.request()) == one
    assert one.plan_hash == other.plan_hash
    assert one.home != other.home


@pytest.mark.parametrize(
    "change",
    ["train.steps=9", "job.nodes=2", "job.time_limit=2h", "job.gpus=1", "store.uri=/mirror", "seed=5"],
)
def test_whatever_decides_what_is_run_is_in_the_hash(world: World, change: str) -> None:
    plain = world.launcher.plan(world.request()).plan_hash
    assert world.launcher.plan(world.request(change)).plan_hash != plain


def test_site_variables_code_and_sweep_are_in_the_hash(world: World) -> None:
    hashes = [world.launcher.plan(world.request()).plan_hash]
    hashes.append(world.launcher.plan(world.request(sweep=("train.steps=2,3",))).plan_hash)
    hashes.append(world.launcher.plan(world.request(has_snapshot=False)).plan_hash)
    (world.project / ".env").write_text("PLAIN=1\n")
    hashes.append(world.launcher.plan(world.request()).plan_hash)
    (world.project / ".env").write_text("PLAIN=2\n")
    hashes.append(world.launcher.plan(world.request()).plan_hash)
    world.sites('[sites.local]\nhf_home = "/models"\n')
    hashes.append(world.launcher.plan(world.request(has_snapshot=False)).plan_hash)
    assert len(set(hashes)) == len(hashes)


def test_the_estimate_counts_members_nodes_and_hours(world: World) -> None:
    world.sites("[sites.local]\nusd_per_gpu_hour = 2.5\n")
    plan = world.launcher.plan(
        world.request("job.nodes=2", "job.gpus=4", "job.time_limit=90m", sweep=("train.steps=2,3,4",))
    )
    # 3 members * 2 nodes * 4 GPUs * 1.5 hours, at 2.50 each.
    assert (plan.gpu_hours, plan.cost_usd) == (36.0, 90.0)
    assert world.launcher.plan(world.request("job.gpus=4")).gpu_hours is None


def test_findings_come_with_the_worst_first(world: World) -> None:
    order = [Severity.UNKNOWN, Severity.WARNING, Severity.ERROR]
    world.backend.problems = [replace(NOISE, severity=one) for one in order]
    found = world.launcher.check(world.launcher.plan(world.request()))
    assert [one.severity for one in found] == [Severity.ERROR, Severity.WARNING, Severity.UNKNOWN]


def snapshot_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def test_check_only_reads(world: World) -> None:
    plan = world.launcher.plan(world.request())
    before = snapshot_of(world.folder)
    world.launcher.check(plan)
    assert snapshot_of(world.folder) == before
    assert [call.verb for call in world.backend.calls] == ["complete", "probe"]


# Where jobs stand.


def status_of(world: World, ref: JobRef) -> tuple[JobState, StatusSource]:
    (found,) = world.launcher.status([ref])
    return found.state, found.source


def test_a_job_through_its_life(world: World) -> None:
    ref = world.submit()
    assert status_of(world, ref) == (S.QUEUED, StatusSource.SCHEDULER)
    world.backend.answer(ref, RUNNING)
    assert status_of(world, ref) == (S.STARTING, StatusSource.SCHEDULER)
    first = world.backend.begin_attempt(ref)
    assert status_of(world, ref) == (S.RUNNING, StatusSource.SCHEDULER)
    world.backend.end_attempt(first, 75, signal="SIGUSR2")
    world.backend.answer(ref, Answer(state=S.QUEUED, raw="PENDING", num_restarts=1))
    assert status_of(world, ref) == (S.PREEMPTED, StatusSource.SCHEDULER)
    world.backend.answer(ref, Answer(state=S.RUNNING, raw="RUNNING", num_restarts=1))
    assert status_of(world, ref) == (S.STARTING, StatusSource.SCHEDULER)
    second = world.backend.begin_attempt(ref, 1)
    world.backend.end_attempt(second, 0)
    world.backend.answer(ref, None)
    assert status_of(world, ref) == (S.SUCCEEDED, StatusSource.RECORD)


def test_many_jobs_are_one_question(world: World) -> None:
    refs = [world.submit(f"name=run{number}") for number in range(4)]
    refs.append(world.submit("name=swept", sweep=("train.steps=2,3,4",)))
    found = world.launcher.status(refs)
    assert [one.member for one in found] == [0, 0, 0, 0, 0, 1, 2]
    assert world.backend.count("ask") == 1


def test_each_member_of_a_sweep_stands_for_itself(world: World) -> None:
    ref = world.submit(sweep=("train.steps=2,3",))
    world.backend.answer(ref, RUNNING, member=1)
    world.backend.end_attempt(world.backend.begin_attempt(ref, member=0), 1)
    states = [one.state for one in world.launcher.status([ref])]
    assert states == [S.FAILED, S.STARTING]


def test_silence_gives_the_last_known_state_with_its_age(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, RUNNING)
    world.backend.begin_attempt(ref)
    assert status_of(world, ref)[0] is S.RUNNING
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
    if content is not None:
        (job_path_of(ref.home) / "state.json").write_text(content)
    world.backend.is_silent = True
    assert status_of(world, ref) == (S.UNKNOWN, StatusSource.NOTHING)


def test_the_record_answers_where_the_scheduler_is_silent(world: World) -> None:
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref), 0)
    world.backend.is_silent = True
    assert status_of(world, ref) == (S.SUCCEEDED, StatusSource.RECORD)


def test_a_forgotten_job_without_a_record_is_unknown_and_the_place_is_named(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, RUNNING)
    world.launcher.status([ref])
    world.backend.answer(ref, None)
    (found,) = world.launcher.status([ref])
    # It did run. That it still does, nobody says.
    assert (found.state, found.source) == (S.UNKNOWN, StatusSource.NOTHING)
    assert f"no record in {ref.home}/attempts" in found.reason


def test_an_end_that_was_seen_outlives_the_schedulers_memory(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, Answer(state=S.FAILED, raw="NODE_FAIL", reason="node n3"))
    world.launcher.status([ref])
    world.backend.answer(ref, None)
    (found,) = world.launcher.status([ref])
    assert (found.state, found.source) == (S.FAILED, StatusSource.LAST_KNOWN)
    assert "node n3" in found.reason


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (RUNNING, S.STARTING),
        (Answer(state=S.CANCELLED, raw="CANCELLED"), S.CANCELLED),
        (Answer(state=S.FAILED, raw="FAILED"), S.FAILED),
        # Without its record no one knows whether it is a success, or has failed.
        (Answer(state=S.SUCCEEDED, raw="COMPLETED"), S.UNKNOWN),
        (None, S.UNKNOWN),
    ],
)
def test_a_record_that_does_not_answer_is_no_missing_record(
    world: World, answer: Answer | None, state: JobState
) -> None:
    ref = world.submit()
    world.backend.answer(ref, answer)
    world.backend.is_record_silent = True
    assert status_of(world, ref)[0] is state


def test_unknown_starts_and_ends_nothing(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, Answer(state=S.UNKNOWN, raw="RESIZING"))
    for _ in range(3):
        assert status_of(world, ref)[0] is S.UNKNOWN
    world.backend.is_silent = True
    world.launcher.status([ref])
    assert {call.verb for call in world.backend.calls[world_start(world) :]} == {"ask"}


def world_start(world: World) -> int:
    """Return the number of calls until the submission was over."""
    return next(index for index, call in enumerate(world.backend.calls) if call.verb == "hand_over") + 1


def test_a_split_brain_is_said(world: World) -> None:
    ref = world.submit()
    now = time.time()
    for number, began, ended in ((0, now - 1000.0, now), (1, now - 500.0, None)):
        path = world.backend.begin_attempt(ref, number)
        facts = json.loads((path / "agent-0.json").read_text()) | {"started_at": began}
        (path / "agent-0.json").write_text(json.dumps(facts))
        if ended is not None:
            world.backend.end_attempt(path, 1)
    world.backend.answer(ref, Answer(state=S.RUNNING, raw="RUNNING", num_restarts=1))
    (found,) = world.launcher.status([ref])
    assert found.state is S.RUNNING
    assert found.reason.startswith("split_brain: attempt fake-1-0 on node0 went on for 500 s")


def test_a_home_that_cannot_be_written_to_still_has_a_state(world: World) -> None:
    ref = world.submit()
    (job_path_of(ref.home) / "state.json").mkdir()
    assert status_of(world, ref)[0] is S.QUEUED


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
    ("ends_at", "ended_by", "given_orders", "state"),
    [
        ("TERM", "TERM", ["TERM"], S.CANCELLED),
        ("KILL", "KILL", ["TERM", "KILL"], S.CANCELLED),
        ("", "", ["TERM", "KILL"], S.RUNNING),
    ],
)
def test_an_end_is_asked_for_then_forced_and_seen(
    world: World,
    running: JobRef,
    monkeypatch: pytest.MonkeyPatch,
    ends_at: str,
    ended_by: str,
    given_orders: list[str],
    state: JobState,
) -> None:
    monkeypatch.setattr("strop.launch.jobs.launcher.KILL_LIMIT_S", 0.2)
    world.backend.ends_at = ends_at
    outcome = world.launcher.cancel(running, grace_s=0.2)
    assert (outcome.ended_by, orders(world)) == (ended_by, given_orders)
    assert [one.state for one in outcome.statuses] == [state]


def test_what_had_ended_gets_no_order(world: World, running: JobRef) -> None:
    world.backend.answer(running, Answer(state=S.TIMEOUT, raw="TIMEOUT"))
    outcome = world.launcher.cancel(running, grace_s=1.0)
    assert (outcome.ended_by, orders(world)) == ("it had ended", [])


def test_a_cancelled_job_that_saved_its_state_is_cancelled(world: World, running: JobRef) -> None:
    world.backend.end_attempt(Path(running.home) / "attempts" / "fake-1-0", 75, signal="SIGTERM")
    world.backend.answer(running, RUNNING)
    assert world.launcher.cancel(running, grace_s=1.0).statuses[0].state is S.CANCELLED


def test_a_silent_scheduler_ends_nothing_and_that_is_said(world: World, running: JobRef) -> None:
    world.backend.is_silent = True
    assert "does not answer" in refusal(lambda: world.launcher.cancel(running, grace_s=0.1), StoreError)


def test_one_member_of_a_sweep_ends_alone(world: World) -> None:
    ref = world.submit(sweep=("train.steps=2,3",))
    outcome = world.launcher.cancel(ref, member=1, grace_s=1.0)
    assert [(one.member, one.state) for one in outcome.statuses] == [(1, S.CANCELLED)]
    assert [one.state for one in world.launcher.status([ref])] == [S.QUEUED, S.CANCELLED]


@pytest.mark.parametrize("member", [1, 99, -1])
def test_a_member_that_a_job_does_not_have_is_refused(world: World, running: JobRef, member: int) -> None:
    for call in (
        lambda: world.launcher.cancel(running, member=member, grace_s=1.0),
        lambda: list(world.launcher.logs(running, member, LogFilter(), is_followed=False)),
    ):
        told = refusal(call, ConfigError)
        assert f"job fake-1 has no member {member}" in told
        assert "0 to 0" in told
    assert orders(world) == []


# Going on.


def failed(world: World, *overrides: str) -> JobRef:
    """Return a job whose second attempt has failed."""
    ref = world.submit(*overrides)
    world.backend.end_attempt(world.backend.begin_attempt(ref, 0), 75)
    world.backend.end_attempt(world.backend.begin_attempt(ref, 1), 1)
    world.backend.answer(ref, None)
    return ref


def test_a_failed_job_goes_on_in_its_home_and_its_past_is_past(world: World) -> None:
    old = failed(world)
    again = world.launcher.resume(Path(old.home), world.request(now=NOW + 60.0))
    assert (again.ref.home, again.ref.job_id, again.is_new) == (old.home, "fake-2", True)
    # Numbers go on, so that the fence lets the new attempts write.
    assert world.plan_of(again.ref).num_past == 2
    # The failure of the old job says nothing of the new one.
    assert status_of(world, again.ref) == (S.QUEUED, StatusSource.SCHEDULER)
    world.backend.answer(again.ref, RUNNING)
    world.backend.begin_attempt(again.ref, 2)
    assert status_of(world, again.ref) == (S.RUNNING, StatusSource.SCHEDULER)
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
        (Answer(state=S.QUEUED, raw="PENDING"), None),
        (Answer(state=S.QUEUED, raw="PENDING", num_restarts=1), 75),
        (Answer(state=S.UNKNOWN, raw="RESIZING"), None),
        (None, 0),
        # Its record has ended, and its scheduler still has it: its processes may be writing.
        (RUNNING, 1),
    ],
)
def test_what_may_live_or_has_succeeded_does_not_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch, answer: Answer | None, code: int | None
) -> None:
    monkeypatch.setattr("strop.launch.jobs.launcher.SETTLE_LIMIT_S", 0.1)
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref), code)
    world.backend.answer(ref, answer)
    told = refusal(lambda: world.launcher.resume(Path(ref.home), world.request()))
    assert "a job that has ended without success" in told
    assert world.backend.count("hand_over") == 1


def test_a_running_job_is_refused_at_once(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, RUNNING)
    began = time.monotonic()
    refusal(lambda: world.launcher.resume(Path(ref.home), world.request()))
    assert time.monotonic() - began < 2.0


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
    assert world.backend.count("hand_over") == 2


def test_a_refused_job_can_go_on_too(world: World) -> None:
    world.backend.refusal = "no"
    refusal(world.submit)
    (home,) = world.runs.glob("run-*")
    world.backend.refusal = ""
    assert world.launcher.resume(home, world.request()).ref.job_id == "fake-1"


# Logs.


def test_logs_come_from_files_after_the_scheduler_forgot(world: World, running: JobRef) -> None:
    path = Path(running.home) / "attempts" / "fake-1-0" / "0" / "train.log"
    path.parent.mkdir()
    path.write_text("hello\n")
    world.backend.answer(running, None)
    world.backend.is_silent = True
    lines = list(world.launcher.logs(running, 0, LogFilter(), is_followed=False))
    assert lines == [LogLine(text="hello", attempt="fake-1-0", node="0", role="train")]


def test_no_log_is_an_error_that_names_the_place(world: World) -> None:
    ref = world.submit()
    told = refusal(lambda: list(world.launcher.logs(ref, 0, LogFilter(), is_followed=False)), StoreError)
    assert f"there is no log below {ref.home}/attempts" in told


def test_followed_logs_end_with_the_job(world: World, running: JobRef) -> None:
    path = Path(running.home) / "attempts" / "fake-1-0" / "0" / "train.log"
    path.parent.mkdir()
    path.write_text("hello\nlast")
    world.backend.end_attempt(path.parents[1], 0)
    lines = world.launcher.logs(running, 0, LogFilter(), is_followed=True)
    assert [line.text for line in lines] == ["hello", "last"]


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


def test_a_home_that_was_moved_away_is_named(world: World, running: JobRef) -> None:
    shutil.rmtree(job_path_of(running.home))
    assert "cannot be read" in refusal(lambda: world.launcher.status([running]), StoreError)
    with pytest.raises(StoreError):
        read_plan(job_path_of(running.home))
