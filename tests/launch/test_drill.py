"""A rehearsed preemption: passed only with every proof, and the first missing one is named."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.io.atomic import AtomicDirectory
from strop.launch.contract import JobRef, JobState, SchedulerStatus
from strop.launch.drill import DrillReport, compare_metrics, drill
from strop.record import RunDir
from tests.fixtures.scripted_jobs import World

RUNNING = SchedulerStatus(state=JobState.RUNNING, raw="RUNNING")
PROOFS = ["newer checkpoint", "orderly end", "next attempt", "steps since", "equal curve"]


def train(run: Path, *steps: int, reward: float = 0.5) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            line = {
                "step": step,
                "reward": reward + step,
                "seconds_step": time.time(),
                "tokens_per_s": step * 7.1,
            }
            file.write(json.dumps(line) + "\n")


def save(run: Path, step: int) -> None:
    with AtomicDirectory(run / "checkpoints" / f"step-{step:06d}", replace=True) as partial:
        (partial / "weights").write_text("w")


def resume(run: Path, step: int) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "resume", "step": step, "at": time.time()}) + "\n")


class Rehearsal:
    """A job at step 5 with a checkpoint of step 4, and what happens at the signal."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ref: JobRef = world.submit("job.grace_s=1.0")
        self.run = Path(self.ref.home)
        self.attempt = world.backend.begin_attempt(self.ref)
        world.backend.answer(self.ref, RUNNING)
        train(self.run, 1, 2, 3, 4, 5)
        save(self.run, 4)

    def on_signal(self, happen: Callable[[], None]) -> None:
        self.world.backend.on_preempt = happen

    def end(self, code: int | None = 75) -> None:
        self.world.backend.end_attempt(self.attempt, code, signal="SIGUSR2")

    def begin_again(self, step: int, *steps: int, reward: float = 0.5) -> None:
        self.world.backend.begin_attempt(self.ref, 1)
        resume(self.run, step)
        train(self.run, *steps, reward=reward)

    def drill(self, *, against: Path | None = None) -> DrillReport:
        return drill(self.world.launcher, self.ref, against=against, restart_limit_s=0.3)


@pytest.fixture
def rehearsal(world: World, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    monkeypatch.setattr("strop.launch.drill._POLL_S", 0.02)
    return Rehearsal(world)


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    """A run of the same spec that nobody disturbed."""
    path = tmp_path / "undisturbed"
    path.mkdir()
    train(path, *range(1, 9))
    return path


def given(report: DrillReport) -> list[bool | None]:
    return [proof.is_given for proof in report.proofs]


def test_a_good_job_gives_every_proof_in_order(rehearsal: Rehearsal, undisturbed: Path) -> None:
    def happen() -> None:
        save(rehearsal.run, 6)
        train(rehearsal.run, 6)
        rehearsal.end()
        rehearsal.begin_again(6, 7, 8)

    rehearsal.on_signal(happen)
    report = rehearsal.drill(against=undisturbed)
    assert [proof.name for proof in report.proofs] == PROOFS
    assert given(report) == [True] * 5
    assert (report.has_passed, report.first_missing, report.signal) == (True, None, "SIGUSR2")
    assert report.proofs[-1].detail == "8 steps are equal to those of undisturbed"
    assert rehearsal.world.backend.count("preempt") == 1


def test_a_job_that_had_just_saved_needs_no_newer_checkpoint(rehearsal: Rehearsal) -> None:
    save(rehearsal.run, 5)

    def happen() -> None:
        rehearsal.end()
        rehearsal.begin_again(5, 6, 7)

    rehearsal.on_signal(happen)
    report = rehearsal.drill()
    assert report.has_passed
    assert report.proofs[0].detail == "step 5 had been saved just before"


def late(rehearsal: Rehearsal) -> None:
    """One more step, which no checkpoint has."""
    train(rehearsal.run, 6)
    rehearsal.end()


def nothing(rehearsal: Rehearsal) -> None:
    """An agent that ignores signals."""


def unsealed(rehearsal: Rehearsal) -> None:
    (rehearsal.run / "checkpoints" / "step-000006").mkdir()
    rehearsal.end()


def no_end(rehearsal: Rehearsal) -> None:
    save(rehearsal.run, 6)


def bad_end(rehearsal: Rehearsal) -> None:
    save(rehearsal.run, 6)
    rehearsal.end(1)


def no_restart(rehearsal: Rehearsal) -> None:
    save(rehearsal.run, 6)
    rehearsal.end()


def no_resume(rehearsal: Rehearsal) -> None:
    no_restart(rehearsal)
    rehearsal.world.backend.begin_attempt(rehearsal.ref, 1)


def from_an_older_step(rehearsal: Rehearsal) -> None:
    no_restart(rehearsal)
    rehearsal.begin_again(4, 5, 6, 7)


def from_nothing(rehearsal: Rehearsal) -> None:
    no_restart(rehearsal)
    rehearsal.begin_again(0, 1, 2, 3)


def no_steps(rehearsal: Rehearsal) -> None:
    no_restart(rehearsal)
    rehearsal.begin_again(6, 7)


@pytest.mark.parametrize(
    ("happen", "missing", "words"),
    [
        (nothing, "newer checkpoint", "no checkpoint since the signal"),
        (late, "newer checkpoint", "no checkpoint since the signal"),
        (unsealed, "newer checkpoint", "no checkpoint since the signal"),
        (no_end, "orderly end", "attempt fake-1-0 has no verdict"),
        (bad_end, "orderly end", "attempt fake-1-0 ended with 1"),
        (no_restart, "next attempt", "no attempt has gone on since"),
        (no_resume, "next attempt", "no attempt has gone on since"),
        (from_an_older_step, "next attempt", "went on from step 4, and 6 had been saved"),
        (from_nothing, "next attempt", "went on from step 0, and 6 had been saved"),
        (no_steps, "steps since", "1 trained after step 6"),
    ],
)
def test_the_first_missing_proof_is_named(
    rehearsal: Rehearsal, happen: Callable[[Rehearsal], None], missing: str, words: str
) -> None:
    rehearsal.on_signal(lambda: happen(rehearsal))
    report = rehearsal.drill()
    assert report.first_missing is not None
    assert (report.first_missing.name, report.first_missing.detail) == (missing, words)
    assert not report.has_passed
    # What comes after it is not even asked for.
    assert [proof.name for proof in report.proofs] == PROOFS[: PROOFS.index(missing) + 1]


def good(rehearsal: Rehearsal, *, reward: float = 0.5) -> None:
    save(rehearsal.run, 5)
    train(rehearsal.run, 6)
    save(rehearsal.run, 6)
    rehearsal.end()
    rehearsal.begin_again(6, 7, 8, reward=reward)


def test_another_curve_fails_and_names_step_and_value(rehearsal: Rehearsal, undisturbed: Path) -> None:
    rehearsal.on_signal(lambda: good(rehearsal, reward=0.25))
    report = rehearsal.drill(against=undisturbed)
    assert report.first_missing is not None
    assert report.first_missing.detail == "step 7: reward is 7.25, and undisturbed 7.5"


def test_without_a_run_to_compare_with_that_is_said_and_does_not_fail(rehearsal: Rehearsal) -> None:
    rehearsal.on_signal(lambda: good(rehearsal))
    report = rehearsal.drill()
    assert given(report) == [True, True, True, True, None]
    assert report.has_passed
    assert "--against" in report.proofs[-1].detail


def test_a_finished_run_of_the_same_spec_beside_the_job_is_compared_with(rehearsal: Rehearsal) -> None:
    digest = rehearsal.world.plan_of(rehearsal.ref).spec_digest
    for name, its_digest, is_finished in (
        ("other", "x", True),
        ("same", digest, True),
        ("begun", digest, False),
    ):
        run = RunDir.create(rehearsal.world.runs, name, "", its_digest, {})
        run.begin_attempt()
        if is_finished:
            run.mark_finished()
        run.release()
        train(run.path, *range(1, 9))
    rehearsal.on_signal(lambda: good(rehearsal))
    report = rehearsal.drill()
    assert given(report) == [True] * 5
    assert "8 steps are equal to those of same-" in report.proofs[-1].detail


def test_a_run_without_a_common_step_shows_nothing(rehearsal: Rehearsal, tmp_path: Path) -> None:
    train(tmp_path, 100)
    rehearsal.on_signal(lambda: good(rehearsal))
    assert given(rehearsal.drill(against=tmp_path))[-1] is None


def test_no_signal_is_sent_where_there_is_nothing_to_compare_with(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    with pytest.raises(StoreError) as caught:
        rehearsal.drill(against=tmp_path / "absent")
    assert "absent is no run to compare with" in str(caught.value)
    assert rehearsal.world.backend.count("preempt") == 0


@pytest.mark.parametrize("state", [one for one in JobState if one is not JobState.RUNNING])
def test_only_a_running_job_is_drilled(rehearsal: Rehearsal, state: JobState) -> None:
    rehearsal.world.backend.answer(rehearsal.ref, SchedulerStatus(state=state, raw="RAW"))
    shutil.rmtree(rehearsal.attempt)
    with pytest.raises(CheckRefused) as caught:
        rehearsal.drill()
    assert "a drill of a running job" in str(caught.value)
    assert rehearsal.world.backend.count("preempt") == 0


def test_a_trial_that_is_not_there_is_refused(rehearsal: Rehearsal) -> None:
    with pytest.raises(ConfigError) as caught:
        drill(rehearsal.world.launcher, rehearsal.ref, trial=3)
    assert "has no trial 3" in str(caught.value)


def test_the_person_hears_each_proof_as_it_comes(rehearsal: Rehearsal) -> None:
    rehearsal.on_signal(lambda: good(rehearsal))
    said: list[str] = []
    drill(rehearsal.world.launcher, rehearsal.ref, restart_limit_s=0.3, say=said.append)
    assert said[0] == "sent SIGUSR2 at step 5"
    assert [line.partition(":")[0] for line in said[1:]] == PROOFS


def curves() -> Iterator[tuple[dict[int, dict[str, object]], dict[int, dict[str, object]], str | None]]:
    yield {}, {}, None
    yield {1: {"a": 1}}, {2: {"a": 2}}, None
    yield {1: {"a": 1, "seconds_x": 1.0}}, {1: {"a": 1, "seconds_x": 2.0}}, None
    yield {1: {"tokens_per_s": 1, "peak_bytes": 1}}, {1: {"tokens_per_s": 2, "peak_bytes": 2}}, None
    # A metric that only one of them has shows no difference.
    yield {1: {"a": 1, "b": 2}}, {1: {"a": 1}}, None
    yield {1: {"a": 1}, 2: {"a": 2}}, {1: {"a": 1}, 2: {"a": 3}}, "step 2: a is 2, and undisturbed 3"


@pytest.mark.parametrize(("mine", "theirs", "difference"), list(curves()))
def test_curves_are_compared_step_by_step_without_times(
    mine: dict[int, dict[str, object]], theirs: dict[int, dict[str, object]], difference: str | None
) -> None:
    assert compare_metrics(mine, theirs) == difference
