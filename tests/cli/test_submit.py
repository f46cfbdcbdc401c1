"""`strop submit|status|logs|cancel|fetch`: wrong input, messages, codes, and what is left behind."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from strop.hardware.findings import Finding, Severity
from strop.io.atomic import AtomicDirectory
from strop.launch.contract import JobPlan, JobRef, JobState, SchedulerStatus
from strop.launch.job_dir import job_path_of, read_plan, read_ref
from strop.launch.options import Site
from tests.fixtures.commands import Run
from tests.fixtures.scripted_jobs import World, enter_world

ODD = 'it\'s $HOME `id` "two" $(touch canary); x\\'
"""A folder's name that no shell may ever see unquoted."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A project as the current folder; every site has the scripted scheduler."""
    world = enter_world(tmp_path, monkeypatch)

    def open_fake(site: Site) -> object:
        return world.backend

    monkeypatch.setattr("strop.launch.backends.open_backend", open_fake)
    return world


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def only_ref(world: World) -> JobRef:
    (home,) = (path.parents[1] for path in world.runs.rglob("job/ref.json"))
    return read_ref(job_path_of(home))


# Words, exit code, pieces of the message.
WRONG: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = [
    (("submit",), 2, ("Missing argument",)),
    (("submit", "absent.toml"), 2, ("run file absent.toml does not exist",)),
    (("submit", "run.toml", "--on", "lab"), 2, ("there is no site 'lab'", "strop-sites.toml", "[sites.lab]")),
    (("submit", "run.toml", "--command", "evil"), 2, ("--command 'evil'", "train or eval")),
    (("submit", "run.toml", "--project-dir", "absent"), 2, ("absent is no folder",)),
    (
        ("submit", "run.toml", "job.gpus=9"),
        2,
        ("9 GPUs per node are asked for (9 for train)", "local have 8"),
    ),
    (("submit", "run.toml", "job.gpus=1", "site.devices=0,1"), 2, ("1 would be idle",)),
    (("submit", "run.toml", "--time", "2h"), 2, ("Write job.time_limit=VALUE or site.time_limit=VALUE;",)),
    (("submit", "run.toml", "--job-name", "a", "name=b"), 2, ("--job-name together with name=",)),
    (("submit", "run.toml", "site.qos=high"), 2, ("site.qos is no setting of backend local",)),
    (("submit", "run.toml", "site.qos"), 2, ("'site.qos' is not understood", "site.KEY=VALUE")),
    (("submit", "run.toml", "site.gpus_per_node=many"), 2, ("site.gpus_per_node='many' is not allowed",)),
    (
        ("submit", "run.toml", "--on", "slurm", "site.partition=a", "site.partition=b"),
        2,
        ("site.partition=b, and a is given for it too",),
    ),
    (("plan", "run.toml", "site.qos=high"), 2, ("unknown key site",)),
    (("submit", "run.toml", "--check", "--wait"), 2, ("--check submits nothing: leave --wait out",)),
    (("submit", "run.toml", "--sweep", "train.steps"), 2, ("--sweep 'train.steps' is not understood",)),
    (("submit", "run.toml", "--sweep", "train.steps=1,many"), 2, ("train.steps='many'",)),
    (("submit", "run.toml", "--env", "NOT_SET_ANYWHERE"), 2, ("NOT_SET_ANYWHERE is named for the job",)),
    (("submit", "run.toml", "--env-file", "absent.env"), 2, ("absent.env cannot be read",)),
    (("submit", "run.toml", "--resume", "nope"), 2, ("'nope' names no job",)),
    (
        ("submit", "run.toml", "--on", "sagemaker", "site.volume_gb=0"),
        2,
        ("site.volume_gb=0 is not allowed", "Allowed: Volume size", "correct site.volume_gb"),
    ),
    (("status", "--wait"), 2, ("--wait with 0 jobs", "one job")),
    (("logs", "nope"), 2, ("'nope' names no job",)),
    (("cancel", "nope"), 2, ("'nope' names no job",)),
    (("cancel", "nope", "--grace", "-1"), 2, ("'--grace'",)),
    (("fetch", "nope", "--to", "x"), 2, ("'nope' names no job",)),
    (
        ("fetch", "nope", "--to", "x", "--only", "some"),
        2,
        ("--only 'some'", "all, traces, checkpoints, latest, or a step's number"),
    ),
    (("fetch", "nope", "--to", "x", "--only", "4", "--follow"), 2, ("--only 4 together with",)),
]


@pytest.mark.parametrize(("words", "code", "pieces"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_wrong_input_has_a_code_a_message_and_no_effect(
    here: World, run: Run, words: tuple[str, ...], code: int, pieces: tuple[str, ...]
) -> None:
    before = tree(here.folder)
    ended = run(*words)
    assert (ended.code, ended.out) == (code, "")
    for piece in pieces:
        assert piece in ended.err
    assert "Traceback" not in ended.err
    # A settings mistake creates no path at all, and asks nobody.
    assert tree(here.folder) == before
    assert here.backend.count("submit") == 0


def test_a_job_is_submitted_and_the_next_commands_are_said(here: World, run: Run) -> None:
    ended = run("submit", "run.toml", "job.nodes=2", "job.gpus=4", "job.time_limit=30m")
    assert ended.code == 0, ended.err
    ref = only_ref(here)
    # 2 nodes * 4 GPUs * 0.5 hours.
    assert "at most 4.0 GPU hours" in ended.out
    assert f"run submitted to local as job {ref.job_id}" in ended.out
    assert ref.home in ended.out
    assert "no git: every file is sent" in ended.err
    for command in ("status", "cancel"):
        assert f"strop {command}   {ref.job_id}" in ended.out
        assert run(command, ref.job_id).code == 0
    again = run("submit", "run.toml", "job.nodes=2", "job.gpus=4", "job.time_limit=30m")
    assert f"run was submitted before: to local as job {ref.job_id}" in again.out
    assert "--resume goes on in it" in again.err
    again = run("submit", "run.toml", "job.nodes=2", "job.gpus=4", "job.time_limit=30m", "--json")
    assert json.loads(again.out)["is_new"] is False
    assert json.loads(again.out)["job_id"] == ref.job_id


def test_the_options_of_a_job_are_in_its_plan(here: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SETTING", ODD)
    words = ["job.train_gpus=2", "job.infer_gpus=2", "job.cpus_per_gpu=4", "job.memory=64G", "job.grace_s=60"]
    words += ["job.max_requeue=7", "--job-name", "other", "--env", "MY_SETTING", f"site.hf_home=/m/{ODD}"]
    words += ["site.offline=true", "--no-snapshot"]
    ended = run("submit", "run.toml", *words, "optimizer.lr=-0")
    assert ended.code == 2
    assert "optimizer.lr" in ended.err
    ended = run("submit", "run.toml", *words)
    assert ended.code == 0, ended.err
    ref = only_ref(here)
    plan = read_plan(job_path_of(ref.home))
    assert (plan.name, plan.grace_s, plan.max_requeue, plan.code_sha256) == ("other", 60.0, 7, None)
    assert (plan.resources.cpus_per_gpu, plan.resources.memory) == (4, "64G")
    assert dict(plan.roles[0].gpus) == {"infer": 2, "train": 2}
    variables = json.loads((job_path_of(ref.home) / "env.json").read_text())["variables"]
    assert variables["MY_SETTING"] == ODD
    assert (variables["HF_HOME"], variables["HF_HUB_OFFLINE"]) == (f"/m/{ODD}", "1")


def test_quotes_spaces_and_dollars_arrive_as_they_are(tmp_path: Path, here: World, run: Run) -> None:
    project = tmp_path / ODD
    project.mkdir()
    (project / "run.toml").write_text((here.project / "run.toml").read_text())
    (project / ODD).write_text("code")
    output = tmp_path / "out" / ODD
    ended = run("submit", project / "run.toml", "--project-dir", project, "--output-dir", output)
    assert ended.code == 0, ended.err
    plan = read_plan(job_path_of(output))
    assert plan.home == str(output)
    assert plan.details["project_path"] == str(project)
    script = (job_path_of(output) / "job.sh").read_text()
    assert shlex.split(script.splitlines()[1])[-1] == str(output / "job")
    assert not list(tmp_path.rglob("canary"))
    # The way to it from the command line too.
    ended = run("status", output, "--json")
    assert json.loads(ended.out)[0]["home"] == str(output)


def test_options_may_stand_before_the_run_file_and_overrides_between_them(here: World, run: Run) -> None:
    words = ("optimizer.weight_decay=0.5", "--no-snapshot", "job.nodes=2", "train.steps=4")
    ended = run("submit", "--job-name", "other", "run.toml", *words)
    assert ended.code == 0, ended.err
    text = (job_path_of(only_ref(here).home) / "resolved.json").read_text()
    resolved = {key: entry["value"] for key, entry in json.loads(text).items()}
    assert (resolved["optimizer.weight_decay"], resolved["train.steps"], resolved["job.nodes"]) == (0.5, 4, 2)


@pytest.mark.parametrize("is_json", [False, True])
def test_a_dry_run_shows_everything_and_leaves_nothing(here: World, run: Run, is_json: bool) -> None:
    before = tree(here.folder)
    ended = run("submit", "run.toml", "--dry-run", *(["--json"] if is_json else []))
    assert ended.code == 0, ended.err
    assert tree(here.folder) == before
    assert {call.verb for call in here.backend.calls} == {"render"}
    if is_json:
        assert json.loads(ended.out)["argv"][0] == "fake-submit"
    else:
        assert "--- job.sh\n#!/bin/sh" in ended.out
        assert "--- command: fake-submit strop:" in ended.out
        assert "nothing was submitted" in ended.err


def test_a_dry_run_writes_its_named_output_alone(here: World, run: Run) -> None:
    output = here.folder / "looked at"
    before = tree(here.folder)
    assert run("submit", "run.toml", "--dry-run", "--output-dir", output).code == 0
    made = [str(output / "job" / name) for name in ("job.sh", "resolved.json", "spec.toml")]
    assert sorted({*tree(here.folder)} - {*before}) == sorted([str(output), str(output / "job"), *made])
    # It can be submitted there afterwards.
    assert run("submit", "run.toml", "--output-dir", output).code == 0
    # And what was submitted is not written over by looking once more.
    ended = run("submit", "run.toml", "train.steps=9", "--dry-run", "--output-dir", output)
    assert ended.code == 76
    assert "is the directory of a job" in ended.err


def test_check_tells_what_would_stop_the_job(here: World, run: Run) -> None:
    before = tree(here.folder)
    assert "nothing was found that would stop this job" in run("submit", "run.toml", "--check").out
    missing = Finding(
        code="partition", given="partition x does not exist", allowed="gpu, cpu", next_step="name one"
    )
    here.backend.findings = [replace(missing, severity=Severity.UNKNOWN), missing]
    ended = run("submit", "run.toml", "--check")
    assert ended.code == 76
    assert ended.out.splitlines()[0].startswith("error: partition x does not exist. Allowed: gpu, cpu.")
    assert ended.out.splitlines()[1].startswith("unknown:")
    found = json.loads(run("submit", "run.toml", "--check", "--json").out)
    assert [one["severity"] for one in found] == ["error", "unknown"]
    assert tree(here.folder) == before
    # And it is not submitted.
    assert run("submit", "run.toml").code == 76
    assert not here.runs.exists()


def test_a_refused_job_is_told_by_the_schedulers_words(here: World, run: Run) -> None:
    here.backend.refusal = "sbatch: error: Invalid qos"
    ended = run("submit", "run.toml")
    assert (ended.code, ended.err.splitlines()[-1]) == (76, "strop: sbatch: error: Invalid qos")
    ended = run("status", here.runs / "run")
    assert ended.code == 1
    assert "was not submitted: sbatch: error: Invalid qos" in ended.err
    assert "submit it again" in ended.err


# Jobs that are there.


@pytest.fixture
def job(here: World) -> JobRef:
    """A running job with a log."""
    ref = here.submit()
    here.backend.answer(ref, SchedulerStatus(state=JobState.RUNNING, raw="RUNNING"))
    log = here.backend.begin_attempt(ref) / "0" / "train.log"
    log.parent.mkdir()
    log.write_bytes(b"step 1\nbell \x07 and colour \x1b[31m\n")
    return ref


def test_status_says_state_source_and_reason(here: World, run: Run, job: JobRef) -> None:
    ended = run("status", job.job_id)
    assert ended.code == 0
    assert all(word in ended.out for word in ("run", "running", "scheduler", "fake-1"))
    (told,) = json.loads(run("status", "--json").out)
    assert (told["state"], told["attempt"]) == (
        "running",
        {"name": "fake-1-0", "number": 0, "exit_code": None},
    )
    here.backend.is_silent = True
    (told,) = json.loads(run("status", "run", "--json").out)
    assert (told["state"], told["source"]) == ("running", "last known")


def test_without_jobs_that_is_said(here: World, run: Run) -> None:
    ended = run("status")
    assert (ended.code, ended.out) == (0, "")
    assert "no job is waiting or running" in ended.err


def test_logs_name_attempt_node_and_role_and_move_no_cursor(run: Run, job: JobRef) -> None:
    ended = run("logs", job.job_id, "--role", "train", "--node", "0", "--attempt", "0")
    assert ended.code == 0
    first, second = ended.out.splitlines()
    assert first == "[fake-1-0 0 train] step 1"
    assert "\x1b" not in second
    assert "\x07" not in second


@pytest.mark.parametrize("words", [("--role", "trian"), ("--node", "3"), ("--attempt", "7")])
def test_logs_that_are_not_there_name_the_place(run: Run, job: JobRef, words: tuple[str, str]) -> None:
    ended = run("logs", job.job_id, *words)
    assert (ended.code, ended.out) == (1, "")
    assert f"there is no log below {job.home}/attempts" in ended.err


def test_cancel_says_what_ended_the_job(run: Run, job: JobRef) -> None:
    ended = run("cancel", job.job_id)
    assert (ended.code, ended.out) == (0, "run [0]: cancelled, ended by: TERM\n")
    ended = run("cancel", job.job_id)
    assert (ended.code, ended.out) == (0, "run [0]: cancelled, ended by: it had ended\n")


def test_an_end_that_was_not_seen_is_no_success(
    here: World, run: Run, job: JobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.launch.launcher.KILL_LIMIT_S", 0.1)
    here.backend.ends_at = ""
    ended = run("cancel", job.job_id, "--grace", "0.1")
    assert ended.code == 1
    assert "was asked to end, and no end has been seen" in ended.err
    here.backend.is_silent = True
    ended = run("cancel", job.job_id)
    assert ended.code == 1
    assert "does not answer" in ended.err


def test_fetch_brings_the_run(here: World, run: Run, job: JobRef) -> None:
    with AtomicDirectory(Path(job.home) / "checkpoints" / "step-000004") as partial:
        (partial / "weights").write_text("w")
    ended = run("fetch", job.job_id, "--to", "home it's")
    assert ended.code == 0, ended.err
    assert "checkpoints 4" in ended.out
    assert (here.project / "home it's" / "checkpoints" / "step-000004" / "weights").read_text() == "w"
    assert run("fetch", job.job_id, "--to", "home it's").code == 1
    ended = run("fetch", job.job_id, "--to", "one", "--only", "4")
    assert ended.code == 0, ended.err
    assert [path.name for path in (here.project / "one").iterdir()] == ["checkpoints"]
    ended = run("fetch", job.job_id, "--to", "other", "--only", "5")
    assert ended.code == 1
    assert "no complete checkpoint of step 5. Allowed: one of its steps: 4" in ended.err


def test_a_sweep_is_one_job_of_many_trials(here: World, run: Run) -> None:
    ended = run(
        "submit",
        "run.toml",
        "--on",
        "slurm",
        "--sweep",
        "optimizer.lr=1e-5,2e-5",
        "--sweep",
        "seed=1,2",
        "site.array=2",
    )
    assert ended.code == 0, ended.err
    told = json.loads(run("status", "run", "--json").out)
    assert [one["trial"] for one in told] == [0, 1, 2, 3]
    assert "run[3]" in run("status", "run").out
    (one,) = json.loads(run("status", "run/members/2", "--json").out)
    assert one["trial"] == 2
    assert here.backend.count("submit") == 1


def test_waiting_is_over_at_the_end_and_its_code_says_how_it_ended(here: World, run: Run) -> None:
    words = ("submit", "run.toml")
    assert run(*words).code == 0
    ref = only_ref(here)
    here.backend.end_attempt(here.backend.begin_attempt(ref), 0)
    # Of a job that has ended meanwhile, the same command tells the end.
    ended = run(*words, "--wait")
    assert ended.code == 0, ended.err
    assert f"{ref.job_id}: succeeded" in ended.err
    assert run("status", ref.job_id, "--wait").code == 0
    here.backend.answer(ref, SchedulerStatus(state=JobState.CANCELLED, raw="CANCELLED"))
    for command in ((*words, "--wait"), ("status", ref.job_id, "--wait")):
        ended = run(*command)
        # Stopped is no success.
        assert ended.code == 76
        assert f"job {ref.job_id} ended as cancelled (CANCELLED)" in ended.err
    assert here.backend.count("submit") == 1


def test_a_row_that_could_not_be_written_is_told_and_has_a_code(
    here: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = here.backend.submit

    def accept(plan: JobPlan) -> JobRef:
        return replace(submit(plan), details={"warnings": ["add this row: | fake-1 |"]})

    monkeypatch.setattr(here.backend, "submit", accept)
    ended = run("submit", "run.toml")
    assert ended.code == 1
    assert "notice: add this row: | fake-1 |" in ended.err
    assert "run submitted to local as job fake-1" in ended.out
    # The job runs: the same again is that one, and nothing is left to do.
    assert run("submit", "run.toml").code == 0
    assert here.backend.count("submit") == 1
