"""The verbs of jobs over this backend: submit once, status, logs, cancel, resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.launch.contract import JobRef, JobRequest, JobState, StatusSource
from strop.launch.job_dir import job_path_of, read_plan
from strop.launch.launcher import Launcher, watch
from strop.launch.logs import LogFilter
from strop.launch.sagemaker.job_log import JobLog
from strop.launch.snapshot import take_snapshot
from tests.fixtures.sagemaker import write_log_lines
from tests.launch.sagemaker.aws import Site, prepare_account
from tests.launch.sagemaker.building import NOON, make_request


def request_of(site: Site, **changes: Any) -> JobRequest:
    (site.project / "program.py").write_text("print('hello')\n")
    request = make_request(
        project=site.project,
        profile=site.profile.model_dump(exclude_defaults=True),
        **{"image": "elsewhere.example/strop:1", **changes},
    )
    excluded = [site.project / "runs", *request.site.profile.files_written(site.project)]
    return replace(request, snapshot=take_snapshot(site.project, excluded=excluded))


def launcher_of(site: Site, tmp_path: Path) -> Launcher:
    prepare_account(site.clients, tag=None)
    return Launcher(site.backend, environ={"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)})


def write_verdict(site: Site, ref: Any, exit_code: int) -> None:
    root = f"{ref.details['jobs'][0]['record_uri']}/attempts/{ref.job_id}-0"
    start = {"number": 0, "num_nodes": 1, "started_at": NOON, "host": "algo-1"}
    verdict = {"number": 0, "exit_code": exit_code, "started_at": NOON, "ended_at": NOON, "nodes": ["algo-1"]}
    site.objects.write(f"{root}/agent-0.json", json.dumps(start).encode())
    if exit_code >= 0:
        site.objects.write(f"{root}/verdict.json", json.dumps({**verdict, "signal": ""}).encode())


def test_a_job_from_submission_to_success(site: Site, tmp_path: Path) -> None:
    launcher = launcher_of(site, tmp_path)
    submitted = launcher.submit(request_of(site))
    assert submitted.is_new
    again = launcher.submit(replace(request_of(site), submitted_at=NOON + 60))
    assert not again.is_new
    assert again.ref == submitted.ref
    assert len(site.fake.sent("create_training_job")) == 1
    assert launcher.status([submitted.ref])[0].state is JobState.QUEUED
    site.fake.advance(200)
    assert launcher.status([submitted.ref])[0].state is JobState.STARTING
    write_verdict(site, submitted.ref, -1)
    assert launcher.status([submitted.ref])[0].state is JobState.RUNNING
    site.fake.advance(3000)
    write_verdict(site, submitted.ref, 0)
    status = launcher.status([submitted.ref])[0]
    assert (status.state, status.source) == (JobState.SUCCEEDED, StatusSource.RECORD)


def test_lau_6_no_answer_is_the_last_known_state(site: Site, tmp_path: Path) -> None:
    """LAU-6: a question without an answer is no state, and starts and ends nothing."""
    launcher = launcher_of(site, tmp_path)
    ref = launcher.submit(request_of(site)).ref
    assert launcher.status([ref])[0].state is JobState.QUEUED
    site.fake.fail_next("list_training_jobs", "ThrottlingException", times=1)
    status = launcher.status([ref])[0]
    assert (status.state, status.source) == (JobState.QUEUED, StatusSource.LAST_KNOWN)
    assert "sagemaker:ListTrainingJobs" in status.reason
    assert len(site.fake.sent("create_training_job")) == 1
    assert site.fake.sent("stop_training_job") == []


def test_logs_and_cancel(site: Site, tmp_path: Path) -> None:
    launcher = launcher_of(site, tmp_path)
    ref = launcher.submit(request_of(site)).ref
    site.fake.advance(200)
    write_log_lines(site.clients.client("logs"), f"{ref.job_id}/algo-1-1", ("train| hello",), NOON)
    lines = list(launcher.logs(ref, 0, LogFilter(), is_followed=False))
    assert ("algo-1", "train", "hello") in [(line.node, line.role, line.text) for line in lines]
    site.backend.stop(ref, None, grace_s=1.0)
    site.fake.advance(200)
    outcome = launcher.cancel(ref, grace_s=1.0)
    assert outcome.statuses[0].state is JobState.CANCELLED


def test_lau_9_a_refused_check_creates_nothing(site: Site, tmp_path: Path) -> None:
    """LAU-9: what `check` refuses leaves no job, no object and no home behind."""
    launcher = launcher_of(site, tmp_path)
    request = request_of(site, image=None, image_tag="never-pushed")
    with pytest.raises(CheckRefused, match="strop:never-pushed is not there"):
        launcher.submit(request)
    assert site.fake.sent("create_training_job") == []
    assert site.list_keys() == []
    assert not Path(request.home).exists()
    with pytest.raises(ConfigError):
        launcher.submit(request_of(site, instance_type="ml.none.large"))
    assert not Path(request.home).exists()


def test_resuming_is_a_new_job_of_the_same_run(site: Site, tmp_path: Path) -> None:
    launcher = launcher_of(site, tmp_path)
    request = request_of(site)
    first = launcher.submit(request).ref
    site.fake.advance(200)
    site.backend.stop(first, None, grace_s=1.0)
    site.fake.advance(200)
    write_verdict(site, first, 75)
    later = replace(request, submitted_at=NOON + 500)
    second = launcher.resume(Path(request.home), later).ref
    assert second.job_id != first.job_id
    jobs = site.fake.sent("create_training_job")
    assert jobs[0]["CheckpointConfig"] == jobs[1]["CheckpointConfig"]
    assert read_plan(job_path_of(request.home)).details["run_key"] == first.details["run_key"]
    row = JobLog(site.project / "docs/job_log.md").read()[-1]
    assert (row.job_name, row.facts["parent"]) == (second.job_id, first.job_id)


# The life cycle of a run over several training jobs: what its watcher submits, and what it does not.


def save(site: Site, ref: JobRef, step: int, *, is_whole: bool = True) -> None:
    """Leave a state where the platform would have copied it to."""
    root = f"{ref.details['jobs'][0]['state_uri']}/algo-1/step-{step:06d}"
    site.objects.write(f"{root}/weights", b"w")
    if is_whole:
        site.objects.write(f"{root}/COMPLETE", b"{}")


def watch_to_its_end(site: Site, launcher: Launcher, ref: JobRef) -> None:
    """Watch with the fake's clock."""
    pauses = iter(range(30))

    def pause(duration_s: float) -> None:
        # AWS throttles who asks more often than every 15 s, and those who come all at once.
        assert 15.0 <= duration_s <= 20.0
        next(pauses)
        site.fake.advance(400.0)

    watch(launcher, Path(ref.home), lambda line: None, pause=pause, now=lambda: site.fake.now)


@pytest.mark.parametrize(
    ("is_whole", "mirrored", "began"),
    [
        (True, [], "from step 20, and now there is step 20"),
        (True, [40], "from step 40"),
        (False, [], "without one, and now there is none"),
    ],
)
def test_a_wall_time_goes_on_from_a_whole_state_alone(
    site: Site, tmp_path: Path, is_whole: bool, mirrored: list[int], began: str
) -> None:
    launcher = launcher_of(site, tmp_path)
    ref = launcher.submit(request_of(site, max_runtime="5m")).ref
    save(site, ref, 20, is_whole=is_whole)
    for step in mirrored:
        place = f"{ref.details['jobs'][0]['record_uri']}/checkpoints/step-{step:06d}"
        site.objects.write(f"{place}/COMPLETE", b"{}")
    # Either way the end is none: the second job runs out of time too, without having come further.
    with pytest.raises(CheckRefused, match=f"timeout .*it began {began}"):
        watch_to_its_end(site, launcher, ref)
    assert len(site.fake.sent("create_training_job")) == (2 if is_whole else 1)
