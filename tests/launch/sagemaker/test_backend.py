"""The life of submitted jobs: real S3 requests to moto's server, states from `FakeSageMaker`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from strop.errors import CheckRefused, RemoteUnreachable
from strop.launch.attempts import read_attempts
from strop.launch.contract import JobState
from strop.launch.job_dir import job_path_of
from strop.launch.sagemaker.job_log import JobLog
from strop.launch.secrets import write_ray_token
from strop.launch.status import find_statuses
from strop.record.files import find_checkpoints
from tests.fixtures.sagemaker import JobScript, Stage, spot_script
from tests.launch.sagemaker.aws import Site


def answer(site: Site, ref: object, trial: int = 0) -> JobState | None:
    found = site.backend.poll([ref])  # type: ignore[list-item]
    said = found.get((ref.job_id, trial))  # type: ignore[attr-defined]
    return said.state if said else None


def test_a_submission_sends_code_and_config_and_creates_one_job(site: Site) -> None:
    path = site.project / "qwen3-1.7B gsm8k.toml"
    path.write_text("name = 'x'\n")
    plan = site.plan(run_file=str(path))
    ref = site.backend.submit(plan)
    assert ref.job_id == "job-20261121-120000"
    assert ref.details["warnings"] == []
    assert site.list_keys() == [
        "config/job-20261121-120000/original/qwen3-1.7B gsm8k.toml",
        "config/job-20261121-120000/plan.json",
        "config/job-20261121-120000/spec.toml",
        "source/job-20261121-120000/code.tar.zst",
    ]
    uri = ref.details["jobs"][0]["config_uri"]
    assert site.objects.digest(f"{uri}/spec.toml") is not None
    # The run file keeps its name.
    assert site.objects.read(f"{uri}/original/{path.name}") == path.read_bytes()
    assert site.fake.sent("create_training_job") == [plan.details["jobs"][0]["request"]]


def test_sec_4_no_secret_leaves_the_machine(site: Site) -> None:
    """SEC-4: the private files of a home are neither sent nor named in any request."""
    ref = site.backend.submit(site.plan())
    sent = [site.objects.read(f"s3://strop-test/{site.prefix}/{key}") for key in site.list_keys()]
    assert all(b"canary-secret" not in data for data in sent)
    assert "canary-secret" not in json.dumps(site.fake.calls, default=str)
    assert "canary-secret" not in json.dumps(ref.details)


def test_sec_4_several_hosts_get_a_token_of_their_own_which_no_request_holds(site: Site) -> None:
    plan = site.plan(instance_count=2)
    write_ray_token(job_path_of(plan.home))
    ref = site.backend.submit(plan)
    token = site.objects.read(f"{ref.details['jobs'][0]['config_uri']}/ray.token")
    assert len(token) == 64
    assert token.decode() not in json.dumps(site.fake.sent("create_training_job"))
    # Hosts of the job may be reading it: another submission of the same leaves it.
    write_ray_token(job_path_of(plan.home))
    assert (job_path_of(plan.home) / "ray.token").read_bytes() == token


def test_the_job_log_says_what_a_job_was(site: Site) -> None:
    plan = site.plan(description="first | try", run_file="runs/qwen3-1.7B.toml")
    ref = site.backend.submit(plan)
    log = JobLog(site.project / "docs/job_log.md")
    assert "| job-20261121-120000 | runs/qwen3-1.7B.toml | first \\| try | 2026-11-21 12:00 |  |" in (
        log.path.read_text()
    )
    row = log.read()[-1]
    assert row.job_name == ref.job_id
    assert row.facts["plan_hash"] == plan.plan_hash
    assert row.facts["arn"].endswith(ref.job_id)
    site.fake.advance(3000)
    # AWS says that it completed, and it left no record: the log says what `status` says.
    assert answer(site, ref) is JobState.SUCCEEDED
    (status,) = find_statuses(site.backend, [ref])
    assert (status.state, log.read()[-1].state) == (JobState.FAILED, "failed")


def test_one_listing_answers_for_many_and_only_changes_are_described(site: Site) -> None:
    ref = site.backend.submit(site.plan(num_trials=3))
    site.fake.calls.clear()
    assert len(site.backend.poll([ref])) == 3
    assert len(site.fake.sent("list_training_jobs")) == 1
    assert len(site.fake.sent("describe_training_job")) == 3
    assert len(site.backend.poll([ref])) == 3
    assert len(site.fake.sent("describe_training_job")) == 3
    site.fake.stop_training_job(TrainingJobName=ref.details["jobs"][1]["name"])
    found = site.backend.poll([ref])
    assert found[ref.job_id, 1].state is JobState.CANCELLED
    assert len(site.fake.sent("describe_training_job")) == 4
    # A description that lags is asked for again.
    site.fake.advance(3000)
    site.fake.describe_lag_s = 1e6
    assert answer(site, ref) is JobState.QUEUED
    site.fake.describe_lag_s = 0.0
    assert answer(site, ref) is JobState.SUCCEEDED


def test_many_pages_are_followed(site: Site) -> None:
    ref = site.backend.submit(site.plan())
    first = site.fake.sent("create_training_job")[0]
    for index in range(120):
        site.fake.advance(0.001)
        site.fake.create_training_job(**{**first, "TrainingJobName": f"other-{index}"})
    assert answer(site, ref) is JobState.QUEUED
    assert len(site.fake.sent("list_training_jobs")) == 2


def test_throttling_that_lasts_is_silence(site: Site) -> None:
    ref = site.backend.submit(site.plan())
    site.fake.fail_next("list_training_jobs", "ThrottlingException", times=1)
    with pytest.raises(RemoteUnreachable, match="sagemaker:ListTrainingJobs"):
        site.backend.poll([ref])
    assert answer(site, ref) is JobState.QUEUED


def test_a_job_that_is_gone_is_missing_from_the_answers(site: Site) -> None:
    ref = site.backend.submit(site.plan())
    site.fake.advance(3000)
    site.fake.delete_training_job(TrainingJobName=ref.job_id)
    assert site.backend.poll([ref]) == {}
    assert site.backend.poll([]) == {}


def test_being_stopped_is_never_success(site: Site) -> None:
    ref = site.backend.submit(site.plan())
    site.fake.advance(200)
    site.backend.stop(ref, None, grace_s=30)
    assert answer(site, ref) is JobState.RUNNING
    assert site.backend.poll([ref])[ref.job_id, 0].reason == "cancel pending"
    site.fake.advance(120)
    assert answer(site, ref) is JobState.CANCELLED
    site.backend.stop(ref, 0, grace_s=30)  # It has ended: nothing to refuse.


def test_the_wall_time_is_a_timeout_and_a_wait_without_capacity_a_failure(site: Site) -> None:
    endless = JobScript(stages=(Stage(secondary="Training", duration_s=1e9),))
    waiting = JobScript(stages=(Stage(secondary="Pending", duration_s=1e9),))
    site.fake.next_scripts = [endless, waiting]
    first = site.backend.submit(site.plan(max_runtime="1h"))
    second = site.backend.submit(site.plan(max_runtime="1h", spot=True, job_name="other"))
    site.fake.advance(3600 + 120)
    assert answer(site, first) is JobState.TIMEOUT
    site.fake.advance(3600)
    said = site.backend.poll([second])[second.job_id, 0]
    assert (said.state, said.reason) == (JobState.FAILED, "no capacity within the wait limit")


def test_a_spot_interruption_is_a_preemption_and_a_restart(site: Site) -> None:
    site.fake.next_scripts = [spot_script(train_s=100, wait_s=100, rest_s=100)]
    ref = site.backend.submit(site.plan(spot=True))
    site.fake.advance(200)
    assert answer(site, ref) is JobState.PREEMPTED
    site.fake.advance(1000)
    said = site.backend.poll([ref])[ref.job_id, 0]
    assert (said.state, said.num_restarts) == (JobState.SUCCEEDED, 1)


def test_half_a_sweep_is_taken_back(site: Site) -> None:
    site.fake.quota["ml.p4de.24xlarge"] = 2
    with pytest.raises(CheckRefused, match="service limit"):
        site.backend.submit(site.plan(num_trials=3))
    states = {job["TrainingJobStatus"] for job in site.fake.list_training_jobs()["TrainingJobSummaries"]}
    assert states == {"Stopped"}


def test_a_name_that_is_taken_gets_a_suffix_once(site: Site) -> None:
    plan = site.plan()
    strange = {**plan.details["jobs"][0]["request"], "Tags": []}
    site.fake.create_training_job(**strange)
    ref = site.backend.submit(plan)
    assert ref.job_id.startswith("job-20261121-120000-")
    assert len(ref.job_id) == len("job-20261121-120000") + 5
    assert ref.details["jobs"][0]["record_uri"].endswith(f"/checkpoints/{ref.job_id}")
    other = replace(plan, plan_hash="other")
    with pytest.raises(CheckRefused, match="are taken in this account and region"):
        site.backend.submit(other)


def test_nothing_is_submitted_twice(site: Site) -> None:
    """A submission that was killed after AWS accepted: the next one finds it, by tags or by its name."""
    plan = site.plan()
    assert site.backend.recover(plan) is None
    ref = site.backend.submit(plan)
    found = site.backend.recover(plan)
    assert found is not None
    assert found.details["jobs"] == ref.details["jobs"]
    # A second later the plan has another name, and the same tags.
    later = site.plan(job_name="job-20261121-120001")
    again = site.backend.recover(later)
    assert again is not None
    assert again.job_id == ref.job_id
    assert site.backend.submit(plan).job_id == ref.job_id
    assert len(site.fake.list_training_jobs()["TrainingJobSummaries"]) == 1


def test_jobs_are_found_by_our_tag(site: Site) -> None:
    from time import time

    site.fake.now = time()
    ref = site.backend.submit(site.plan())
    request = site.fake.sent("create_training_job")[0]
    site.fake.create_training_job(**{**request, "TrainingJobName": "foreign", "Tags": []})
    assert [found.job_id for found in site.backend.list_tagged()] == [ref.job_id]
    site.fake.advance(3000)
    # What has ended costs nothing any more.
    assert list(site.backend.list_tagged()) == []


def test_the_record_is_read_from_the_mirror(site: Site) -> None:
    ref = site.backend.submit(site.plan())
    record = site.backend.open_record(ref, 0)
    assert record.list("attempts") == []
    assert record.read("run.json") is None
    root = ref.details["jobs"][0]["record_uri"]
    verdict = {"number": 0, "exit_code": 0, "signal": "", "started_at": 1.0, "ended_at": 2.0, "nodes": ["a"]}
    site.objects.write(f"{root}/attempts/x-0/verdict.json", json.dumps(verdict).encode())
    site.objects.write(f"{root}/metrics.jsonl", b"0123456789")
    site.objects.write(f"{root}/checkpoints/step-000020/COMPLETE", b"{}")
    assert record.list("attempts") == ["attempts/x-0/verdict.json"]
    assert [one.exit_code for one in read_attempts(record)] == [0]
    assert record.read_from("metrics.jsonl", 7) == b"789"
    assert record.read("checkpoints/step-000020/COMPLETE") == b"{}"
    assert record.list("checkpoints/step-000020") == ["checkpoints/step-000020/COMPLETE"]
    assert record.describe("run.json") == f"{root}/run.json"
    assert record.read_from("metrics.jsonl", 10) == b""
    assert record.read_from("none.jsonl", 0) == b""


def test_of_several_records_of_a_step_the_complete_newest_is_shown(site: Site) -> None:
    ref = site.backend.submit(site.plan())
    root = ref.details["jobs"][0]["record_uri"]
    for name in ("step-000020/COMPLETE", "step-000020-3/COMPLETE", "step-000020-5/weights"):
        site.objects.write(f"{root}/checkpoints/{name}", name.encode())
    site.objects.write(f"{root}/checkpoints/step-000007/COMPLETE", b"7")
    site.objects.write(f"{root}/run.json", b"{}")
    record = site.backend.open_record(ref, 0)
    assert find_checkpoints(record) == [7, 20]
    assert record.read("checkpoints/step-000020/COMPLETE") == b"step-000020-3/COMPLETE"
    assert record.list("") == [
        "checkpoints/step-000007/COMPLETE",
        "checkpoints/step-000020/COMPLETE",
        "run.json",
    ]
