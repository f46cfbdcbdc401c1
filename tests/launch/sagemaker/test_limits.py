"""What the service's own model says: limits of a request field by field, names of jobs, words of a status."""

from __future__ import annotations

import copy
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError, StoreError
from strop.launch.contract import JobState
from strop.launch.sagemaker.job_log import JobLog, JobRow, submitted_text
from strop.launch.sagemaker.limits import check_request, load_model
from strop.launch.sagemaker.places import (
    base_name,
    require_name,
    run_key,
    suffixed_name,
    trial_name,
)
from strop.launch.sagemaker.status import map_state, read_answer
from tests.launch.sagemaker.building import NOON

GOOD: dict[str, Any] = {
    "TrainingJobName": "job-20261121-120000",
    "RoleArn": "arn:aws:iam::123456789012:role/strop-execution",
    "AlgorithmSpecification": {"TrainingImage": "registry/strop@sha256:0", "TrainingInputMode": "File"},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/strop/output"},
    "ResourceConfig": {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 1, "VolumeSizeInGB": 100},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    request = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = request
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return request


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        # The pattern alone accepts this one: each hyphen run counts once.
        ("TrainingJobName", "a" + "-" * 100 + "b", "max"),
        ("RoleArn", "arn:aws:iam::1:role", "model"),
        ("RoleArn", "arn:aws:iam::12345678901:role/a-long-name", "pattern"),
        ("ResourceConfig.InstanceType", "ml.invented.24xlarge", "enumeration"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", 21_601, "max"),
        ("ResourceConfig.Color", "red", "model"),
        ("HyperParameters", {f"k{i}": "v" for i in range(101)}, "max"),
        ("HyperParameters", {"k": 3}, "model"),
        ("Environment", {"1NAME": "v"}, "pattern"),
        ("Tags", [{"Key": f"k{i}", "Value": ""} for i in range(51)], "max"),
        ("Tags", [{"Key": "aws:mine", "Value": ""}], "tags"),
        ("StoppingCondition.MaxRuntimeInSeconds", 29 * 86_400, "max"),
        ("StoppingCondition.MaxWaitTimeInSeconds", 3599, "wait"),
        ("AlgorithmSpecification.TrainingImage", "i" * 256, "max"),
    ],
)
def test_lau_7_what_the_service_would_refuse(path: str, value: Any, code: str) -> None:
    found = check_request(changed(path, value))
    assert found[0].code == code
    # What is too short or too long may have the wrong form besides.
    assert {finding.code for finding in found} <= {code, "pattern"}
    assert path.partition(".")[0] in found[0].given or code == "tags"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("TrainingJobName", "a" * 63),
        ("TrainingJobName", "7"),
        ("HyperParameters", {"a.b": "quote ' \" and größe", **{f"k{i}": "v" for i in range(99)}}),
        ("HyperParameters", {"k": "v" * 256}),
        ("Environment", {"NAME": "v" * 512}),
        ("Tags", [{"Key": "größe 1", "Value": "a/b:c=d+e-f@g_h"}]),
        ("StoppingCondition.MaxWaitTimeInSeconds", 3600),
        ("StoppingCondition.MaxRuntimeInSeconds", 28 * 86_400),
    ],
)
def test_what_is_just_allowed(path: str, value: Any) -> None:
    assert check_request(changed(path, value)) == []


def test_the_nearest_choices_are_named() -> None:
    finding = check_request(changed("ResourceConfig.InstanceType", "ml.p4de.24xlarg"))[0]
    assert "one of ml.p4de.24xlarge, " in finding.allowed


# Names of training jobs: legal, neutral, unique.


@pytest.mark.parametrize("prefix", ["", "-a", "a-", "a.b", "a_b", "a/b", "a b", "ä", "a" * 48, "a\n"])
def test_a_prefix_that_begins_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a training job"):
        base_name(prefix, NOON)


@pytest.mark.parametrize("name", ["qwen3-1.7B-gsm8k", "a" * 64, "a" + "-" * 100 + "b", "a_b", ""])
def test_a_name_that_the_service_refuses_is_refused_here(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\({len(name)} characters\)"):
        require_name(name)


@given(
    prefix=st.from_regex(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,46}", fullmatch=True).filter(lambda p: len(p) <= 47),
    index=st.integers(0, 999),
    home=st.text(),
)
def test_every_name_that_is_made_is_legal(prefix: str, index: int, home: str) -> None:
    base = base_name(prefix, NOON)
    trial = trial_name(base, index, 1000)
    names = [base, trial, suffixed_name(base, home), suffixed_name(trial, home)]
    assert [check_request(changed("TrainingJobName", name)) for name in names] == [[], [], [], []]
    assert len(set(names)) == 4


def test_trials_of_the_longest_prefix_differ() -> None:
    base = base_name("p" * 47, NOON)
    # 63 characters: the prefix is cut to make room for '-007', not the time.
    assert len(base) == 63
    assert trial_name(base, 7, 8) == "p" * 43 + "-20261121-120000-007"
    assert trial_name(base, 0, 1) == base


def test_the_key_of_a_run_says_nothing_and_stays() -> None:
    key = run_key("qwen3-1.7B", "/runs/qwen3-1.7B-20261121-120000")
    assert key == run_key("qwen3-1.7B", "/elsewhere/qwen3-1.7B-20261121-120000/")
    assert len(key) == 13
    assert "qwen" not in key


# Pairs of status words that the life of a job does not show, and ones that nobody has listed.


TABLE = [
    ("InProgress", "Starting", JobState.STARTING),
    ("InProgress", "Downloading", JobState.STARTING),
    ("InProgress", "Training", JobState.RUNNING),
    ("InProgress", "Uploading", JobState.RUNNING),
    ("InProgress", "Restarting", JobState.PREEMPTED),
    ("InProgress", "Updating", JobState.RUNNING),
    ("Failed", "Failed", JobState.FAILED),
    ("Stopping", "Stopping", JobState.RUNNING),
    # Retired words, and one of the future: the primary status alone decides.
    ("InProgress", "Meditating", JobState.RUNNING),
    ("Stopped", "Meditating", JobState.CANCELLED),
    ("Paused", "Paused", JobState.UNKNOWN),
]


@pytest.mark.parametrize(("primary", "secondary", "state"), TABLE)
def test_the_state_of_a_pair(primary: str, secondary: str, state: JobState) -> None:
    assert map_state(primary, secondary)[0] is state


def test_no_pair_of_the_model_is_success_but_completed() -> None:
    model = load_model()
    for primary in model.shape_for("TrainingJobStatus").enum:
        for secondary in model.shape_for("SecondaryStatus").enum:
            state, _ = map_state(primary, secondary)
            assert (state is JobState.SUCCEEDED) == (primary == "Completed")
            assert state is not JobState.UNKNOWN or primary == "Deleting"


def test_a_stop_leaves_the_state_and_is_shown() -> None:
    assert map_state("Stopping", "Stopping", "Pending") == (JobState.QUEUED, "cancel pending")
    assert map_state("Stopping", "Stopping", "Training") == (JobState.RUNNING, "cancel pending")


def test_an_answer_has_the_reason_and_the_restarts() -> None:
    import datetime as dt

    for reason, is_saved in (("requeue: host algo-1 saved step 20", True), ("exit code 1", False)):
        described = {"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed", "FailureReason": reason}
        assert read_answer(described).is_saved is is_saved
    answer = read_answer(
        {
            "TrainingJobStatus": "Failed",
            "SecondaryStatus": "Failed",
            "FailureReason": "preflight: node algo-2: 7 of 8 GPUs",
            "LastModifiedTime": dt.datetime.fromtimestamp(NOON, tz=dt.UTC),
            "ResourceConfig": {"InstanceCount": 2, "InstanceType": "ml.p4d.24xlarge"},
            "SecondaryStatusTransitions": [
                {"Status": word} for word in ("Pending", "Starting", "Training", "Interrupted", "Starting")
            ],
        }
    )
    assert answer.state is JobState.FAILED
    assert answer.raw == "Failed/Failed"
    assert answer.reason == "refused by a check before it began: node algo-2: 7 of 8 GPUs"
    assert (answer.num_restarts, answer.since, answer.nodes) == (1, NOON, "2 x ml.p4d.24xlarge")


def row(job_name: str = "job-1", **changes: object) -> JobRow:
    values = {
        "job_name": job_name,
        "config": "runs/qwen3-1.7B.toml",
        "description": "first try",
        "submitted": "2026-11-21 12:00",
        "run": "qwen3-1.7B",
        "facts": {"run_key": "r1", "job_arn": "arn:1"},
    }
    return JobRow(**{**values, **changes})  # type: ignore[arg-type]


def test_a_row_in_the_table_and_more_in_the_twin(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "docs/job_log.md")
    log.append(row())
    lines = log.path.read_text().splitlines()
    assert lines[-3:] == [
        "| Job Name | Config | Description | Submitted | State |",
        "| --- | --- | --- | --- | --- |",
        "| job-1 | runs/qwen3-1.7B.toml | first try | 2026-11-21 12:00 |  |",
    ]
    assert '"job_arn": "arn:1"' in log.twin_path.read_text()
    assert log.read() == [row()]
    assert submitted_text(1_795_262_400.0) == "2026-11-21 12:00"


def test_a_description_cannot_break_the_table(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row(description="a|b\n| c \\| <b>\x1b[31m"))
    assert log.path.read_text().splitlines()[-1] == (
        "| job-1 | runs/qwen3-1.7B.toml | a\\|b<br>\\| c \\\\\\| &lt;b> [31m | 2026-11-21 12:00 |  |"
    )


def test_the_table_is_made_anew_from_the_twin(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row("job-1"))
    log.path.unlink()
    log.append(row("job-2"))
    assert "| job-1 |" in log.path.read_text()


def test_a_torn_line_takes_nothing_with_it(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row("job-1"))
    with log.twin_path.open("a") as file:
        file.write('{"job_name": "jo')
    log.append(row("job-2"))
    assert [found.job_name for found in log.read()] == ["job-1", "job-2"]


def test_states_are_written_once_they_change(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row())
    log.note_states({"job-1": "running", "unknown-job": "failed"})
    log.note_states({"job-1": "running"})
    log.note_states({"job-1": "succeeded"})
    assert log.read()[0].state == "succeeded"
    assert len(log.twin_path.read_text().splitlines()) == 3
    assert "| succeeded |" in log.path.read_text()


def _append_many(path: str, first: int) -> None:
    for index in range(first, first + 10):
        JobLog(Path(path)).append(row(f"job-{index:03d}"))


def test_several_processes_lose_no_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_append_many, args=(str(tmp_path / "log.md"), first)) for first in (0, 10, 20)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    log = JobLog(tmp_path / "log.md")
    assert sorted(found.job_name for found in log.read()) == [f"job-{index:03d}" for index in range(30)]
    assert log.path.read_text().count("| job-") == 30


def test_a_twin_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.twin_path.mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        log.read()
