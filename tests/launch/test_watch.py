"""Watching a run to its end: what submits a next job, what never does, and kills of the watcher itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.hardware.findings import Finding, Severity
from strop.io.atomic import AtomicDirectory
from strop.launch.contract import JobRef, JobState, SchedulerStatus
from strop.launch.job_dir import job_path_of, read_plan, read_ref
from strop.launch.launcher import LOST_LIMIT_S, watch
from tests.fixtures.scripted_backend import FakeOnceBackend
from tests.fixtures.scripted_jobs import NOW, RUNNING, Killed, World, be_killed, refusal

S = JobState
FAILED = SchedulerStatus(state=S.FAILED, raw="Failed")
SAVED = replace(FAILED, reason="requeue", is_saved=True)
TIMEOUT = SchedulerStatus(state=S.TIMEOUT, raw="Stopped/MaxRuntimeExceeded")


@pytest.fixture
def once(world: World) -> World:
    """A world whose scheduler starts no ended job again."""
    world.backend = FakeOnceBackend(world.folder / "scheduler")
    return world


def save(ref: JobRef, step: int) -> None:
    """Leave a complete checkpoint."""
    path = Path(ref.home) / "checkpoints" / f"step-{step:06d}"
    path.parent.mkdir(exist_ok=True)
    with AtomicDirectory(path) as directory:
        (directory / "weights").write_text(str(step))


def succeed(world: World, ref: JobRef) -> None:
    number = world.plan_of(ref).num_past
    world.backend.end_attempt(world.backend.begin_attempt(ref, number), 0)


def end_saved(world: World, ref: JobRef, step: int) -> None:
    """Let a job save a checkpoint and end with 75, as its record and its scheduler say."""
    save(ref, step)
    number = world.plan_of(ref).num_past
    world.backend.end_attempt(world.backend.begin_attempt(ref, number), 75)
    world.backend.answer(ref, SAVED)


def current(world: World, ref: JobRef) -> JobRef:
    return read_ref(job_path_of(ref.home))


class Follower:
    """Watches a run; at each pause the next scripted thing happens. Without a script left it is an error."""

    def __init__(self, world: World, ref: JobRef, *script: Callable[[], None]) -> None:
        self.world, self.home, self.script = world, Path(ref.home), list(script)
        self.said: list[str] = []
        self.pauses: list[float] = []

    def run(self) -> None:
        watch(self.world.launcher, self.home, self.said.append, pause=self._pause, now=lambda: NOW + 60.0)

    def _pause(self, duration_s: float) -> None:
        self.pauses.append(duration_s)
        assert self.script, "the watcher waits, and nothing more would happen"
        self.script.pop(0)()


def test_75_becomes_the_next_job_until_one_succeeds(once: World) -> None:
    first = once.submit()
    follower = Follower(
        once,
        first,
        lambda: once.backend.answer(first, RUNNING),
        lambda: end_saved(once, first, 20),
        lambda: end_saved(once, current(once, first), 40),
        lambda: succeed(once, current(once, first)),
    )
    follower.run()
    assert current(once, first).job_id == "fake-3"
    plan = once.plan_of(first)
    # Two jobs after the first one; the last began where the second had come to.
    assert (plan.num_resubmitted, plan.follows, plan.start_step, plan.num_past) == (2, "fake-2", 40, 2)
    assert plan.argv[-1] == "next-after-fake-2"
    assert plan.plan_hash == first.plan_hash
    assert [line.partition(" (")[0] for line in follower.said] == [
        *("fake-1: queued", "fake-1: starting", "fake-1: failed"),
        *("fake-2 submitted as the next job of this run, after fake-1", "fake-2: failed"),
        *("fake-3 submitted as the next job of this run, after fake-2", "fake-3: succeeded"),
    ]


def test_the_end_may_be_known_from_the_scheduler_alone(once: World) -> None:
    ref = once.submit()
    save(ref, 5)
    once.backend.answer(ref, SAVED)
    Follower(once, ref, lambda: succeed(once, current(once, ref))).run()
    assert current(once, ref).job_id == "fake-2"


def test_a_time_limit_goes_on_only_from_a_newer_checkpoint(once: World) -> None:
    ref = once.submit()
    save(ref, 20)
    once.backend.answer(ref, TIMEOUT)

    def run_out_again() -> None:
        once.backend.answer(current(once, ref), TIMEOUT)

    told = refusal(Follower(once, ref, run_out_again).run)
    assert "fake-2 ended as timeout" in told
    assert "began from step 20, and now there is step 20" in told
    assert once.backend.count("submit") == 2


def test_a_time_limit_without_a_newer_checkpoint_stops(once: World) -> None:
    ref = once.submit()
    once.backend.answer(ref, TIMEOUT)
    assert "began without one, and now there is none" in refusal(Follower(once, ref).run)
    assert once.backend.count("submit") == 1
    # After a resume by hand its checkpoint is not newer.
    end_saved(once, ref, 20)
    again = once.launcher.resume(Path(ref.home), once.request(now=NOW + 60.0)).ref
    once.backend.answer(again, TIMEOUT)
    assert "it began from step 20" in refusal(Follower(once, again).run)


@pytest.mark.parametrize(
    ("answer", "code"),
    [(SchedulerStatus(state=S.CANCELLED, raw="Stopped"), 75), (FAILED, 1), (FAILED, 76), (FAILED, None)],
)
def test_other_ends_are_no_success_and_have_no_next_job(
    once: World, answer: SchedulerStatus, code: int | None
) -> None:
    ref = once.submit()
    save(ref, 20)
    if code is not None:
        once.backend.end_attempt(once.backend.begin_attempt(ref), code)
    once.backend.answer(ref, answer)
    told = refusal(Follower(once, ref).run)
    assert f"job fake-1 ended as {answer.state}" in told
    assert once.backend.count("submit") == 1


def test_a_cancellation_after_the_end_is_one_too(once: World) -> None:
    ref = once.submit()
    end_saved(once, ref, 20)
    assert once.launcher.cancel(ref, grace_s=1.0).ended_by == "it had ended"
    assert "it was cancelled" in refusal(Follower(once, ref).run)
    assert once.backend.count("submit") == 1
    # A person may go on all the same, and from then on it is watched as ever.
    again = once.launcher.resume(Path(ref.home), once.request(now=NOW + 60.0)).ref
    end_saved(once, again, 40)
    Follower(once, again, lambda: succeed(once, current(once, ref))).run()


def test_a_cancellation_means_the_next_job_where_there_is_one_already(once: World) -> None:
    first = once.submit()
    end_saved(once, first, 20)
    second = once.launcher.resubmit(first, submitted_at=NOW + 60.0).ref
    outcome = once.launcher.cancel(first, grace_s=1.0)
    assert (outcome.ended_by, outcome.statuses[0].ref.job_id) == ("TERM", second.job_id)


@pytest.mark.parametrize("limit", [0, 2])
def test_it_goes_on_so_often_and_no_more(once: World, limit: int) -> None:
    ref = once.submit(f"job.max_requeue={limit}")
    end_saved(once, ref, 1)
    script = [lambda step=step: end_saved(once, current(once, ref), step) for step in range(2, 2 + limit)]
    told = refusal(Follower(once, ref, *script).run)
    assert f"job.max_requeue={limit}, and that often it was" in told
    assert once.backend.count("submit") == 1 + limit


def test_silence_and_the_unknown_start_and_end_nothing(once: World) -> None:
    ref = once.submit()

    def be_silent() -> None:
        end_saved(once, ref, 20)
        once.backend.is_silent = True

    def speak() -> None:
        assert once.backend.count("submit") == 1
        once.backend.is_silent = False
        once.backend.answer(ref, SchedulerStatus(state=S.UNKNOWN, raw="Deleting"))

    def be_known() -> None:
        assert once.backend.count("submit") == 1
        once.backend.answer(ref, SAVED)

    Follower(once, ref, be_silent, speak, be_known, lambda: succeed(once, current(once, ref))).run()
    assert once.backend.count("submit") == 2


def test_a_failure_that_was_seen_ends_nothing_while_nobody_answers(once: World) -> None:
    ref = once.submit()
    once.backend.answer(ref, TIMEOUT)
    assert once.standing_of(ref)[0] is S.TIMEOUT
    save(ref, 20)
    once.backend.is_silent = True

    def speak() -> None:
        once.backend.is_silent = False

    Follower(once, ref, speak, lambda: succeed(once, current(once, ref))).run()
    assert once.backend.count("submit") == 2


def test_a_submission_without_an_answer_is_tried_again(once: World) -> None:
    ref = once.submit()
    end_saved(once, ref, 20)
    once.backend.is_record_silent = True

    def answer() -> None:
        once.backend.is_record_silent = False

    follower = Follower(once, ref, lambda: None, answer, lambda: succeed(once, current(once, ref)))
    follower.run()
    # Said once, however often it is tried.
    assert [line for line in follower.said if "the next job waits:" in line] == [follower.said[1]]
    assert once.backend.count("submit") == 2


def test_a_job_that_nobody_knows_is_not_waited_for_without_end(once: World) -> None:
    ref = once.submit()
    once.backend.answer(ref, None)
    follower = Follower(once, ref, *[lambda: None] * 1000)
    told = refusal(follower.run, StoreError)
    assert "so it has been for 10 minutes" in told
    assert LOST_LIMIT_S < sum(follower.pauses) + 20.0 < LOST_LIMIT_S + 40.0
    assert once.backend.count("submit") == 1


def test_a_kill_between_submitted_and_noted_never_submits_twice(once: World) -> None:
    ref = once.submit()
    end_saved(once, ref, 20)
    once.backend.after_accepting = be_killed
    with pytest.raises(Killed):
        Follower(once, ref).run()
    assert current(once, ref).job_id == "fake-1"
    once.backend.after_accepting = lambda: None
    # More may have been saved by then: what it began from is what it was when it was decided.
    save(ref, 30)
    follower = Follower(once, ref, lambda: succeed(once, current(once, ref)))
    follower.run()
    assert "fake-2 was submitted as the next job of this run, after fake-1" in follower.said
    assert once.backend.count("submit") == 2
    assert (once.plan_of(ref).num_resubmitted, once.plan_of(ref).start_step) == (1, 20)


def test_a_kill_before_the_submission_counts_no_job(once: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = once.submit("job.max_requeue=1")
    end_saved(once, ref, 20)
    with monkeypatch.context() as patch:
        patch.setattr(FakeOnceBackend, "submit", lambda self, plan: be_killed())
        with pytest.raises(Killed):
            Follower(once, ref).run()
    assert read_plan(job_path_of(ref.home)).follows == "fake-1"
    Follower(once, ref, lambda: succeed(once, current(once, ref))).run()
    assert once.plan_of(ref).num_resubmitted == 1


def test_two_watchers_are_one_next_job(once: World) -> None:
    ref = once.submit()
    end_saved(once, ref, 20)
    first = once.launcher.resubmit(ref, submitted_at=NOW + 60.0)
    second = once.launcher.resubmit(ref, submitted_at=NOW + 61.0)
    assert (first.is_new, second.is_new, second.ref) == (True, False, first.ref)


def test_what_check_finds_stops_the_next_job(once: World) -> None:
    ref = once.submit()
    end_saved(once, ref, 20)
    once.backend.findings = [
        Finding(
            code="role", given="the role is gone", allowed="one", next_step="make it", severity=Severity.ERROR
        )
    ]
    assert "the role is gone" in refusal(Follower(once, ref).run)
    assert once.backend.count("submit") == 1


def test_a_scheduler_that_starts_jobs_again_itself_is_left_to_it(world: World) -> None:
    ref = world.submit()
    save(ref, 20)
    world.backend.answer(ref, TIMEOUT)
    assert "job fake-1 ended as timeout" in refusal(Follower(world, ref).run)
    assert "by itself" in refusal(lambda: world.launcher.resubmit(ref, submitted_at=NOW))
    assert world.backend.count("submit") == 1


def test_trials_of_a_sweep_are_waited_for_and_go_on_by_hand(once: World) -> None:
    ref = once.submit(sweep=("train.steps=2,3",))
    once.backend.end_attempt(once.backend.begin_attempt(ref, trial=0), 75)
    once.backend.end_attempt(once.backend.begin_attempt(ref, trial=1), 75)
    for trial in (0, 1):
        once.backend.answer(ref, SAVED, trial=trial)
    assert "trials of a sweep go on by hand" in refusal(Follower(once, ref).run)
    assert once.backend.count("submit") == 1
