"""The verbs of jobs over a scripted scheduler."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.hardware.findings import Finding, Severity
from strop.launch.job_dir import REFUSED_NAME, has_plan, has_ref, job_path_of
from tests.fixtures.scripted_jobs import NOW, Killed, World, be_killed, make_world, refusal

NOISE = Finding(code="x", given="g", allowed="a", next_step="n")


# Submitting once.


def test_the_same_again_is_the_job_of_the_first_time(world: World) -> None:
    first = world.launcher.submit(world.request())
    # A minute later, from another process.
    again = world.launcher.submit(world.request(now=NOW + 60.0))
    assert (first.is_new, again.is_new) == (True, False)
    assert again.ref == first.ref
    assert world.backend.count("submit") == 1
    assert len(list(world.runs.glob("run-*"))) == 1


def test_a_named_directory_is_submitted_once_too(world: World) -> None:
    # Its name says nothing of the run, so that it is not found by name.
    output = f"output.dir={world.runs / 'here'}"
    first = world.launcher.submit(world.request(output))
    again = world.launcher.submit(world.request(output, now=NOW + 60.0))
    assert again.ref == first.ref
    assert world.backend.count("submit") == 1


def test_the_same_run_for_another_directory_is_still_the_same_job(world: World) -> None:
    first = world.submit()
    assert world.submit(f"output.dir={world.runs / 'here'}") == first


@pytest.mark.parametrize("change", ["train.steps=9", "job.nodes=2", "store.uri=/mirror"])
def test_a_changed_plan_under_the_same_name_is_refused(world: World, change: str) -> None:
    ref = world.submit()
    told = refusal(lambda: world.submit(change))
    key, _, value = change.partition("=")
    assert all(text in told for text in (Path(ref.home).name, key, value, "--new"))
    assert world.backend.count("submit") == 1


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
    assert "is the directory of another job" in told
    assert "--resume" in told
    assert world.backend.count("submit") == 1


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


def test_a_kill_before_the_acceptance_is_made_good(world: World) -> None:
    world.backend.refusal = "x"
    submit, world.backend.submit = world.backend.submit, lambda plan: be_killed()  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(Killed):
        world.submit()
    world.backend.submit, world.backend.refusal = submit, ""  # type: ignore[method-assign]
    ref = world.submit()
    assert (ref.job_id, len(list(world.runs.glob("run-*")))) == ("fake-1", 1)


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


def test_warnings_and_probes_that_could_not_run_stop_nothing(world: World) -> None:
    world.backend.findings = [replace(NOISE, severity=one) for one in (Severity.WARNING, Severity.UNKNOWN)]
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


def test_the_estimate_counts_trials_nodes_and_hours(world: World) -> None:
    world.sites("[sites.local]\nusd_per_gpu_hour = 2.5\n")
    plan = world.launcher.plan(
        world.request("job.nodes=2", "job.gpus=4", "job.time_limit=90m", sweep=("train.steps=2,3,4",))
    )
    # 3 trials * 2 nodes * 4 GPUs * 1.5 hours, at 2.50 each.
    assert (plan.gpu_hours, plan.cost_usd) == (36.0, 90.0)
    assert world.launcher.plan(world.request("job.gpus=4")).gpu_hours is None


def test_findings_come_with_the_worst_first(world: World) -> None:
    order = [Severity.UNKNOWN, Severity.WARNING, Severity.ERROR]
    world.backend.findings = [replace(NOISE, severity=one) for one in order]
    found = world.launcher.check(world.launcher.plan(world.request()))
    assert [one.severity for one in found] == [Severity.ERROR, Severity.WARNING, Severity.UNKNOWN]
