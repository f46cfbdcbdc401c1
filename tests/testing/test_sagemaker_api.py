"""The life of jobs in `FakeSageMaker`: it keeps what the service promises."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError, ParamValidationError

from strop.testing.sagemaker import FakeSageMaker, JobScript, Stage, spot_script
from tests.launch.sagemaker.test_limits import GOOD, changed

NAME = GOOD["TrainingJobName"]


@pytest.fixture
def fake() -> FakeSageMaker:
    return FakeSageMaker()


def status(fake: FakeSageMaker, name: str = NAME) -> str:
    described = fake.describe_training_job(TrainingJobName=name)
    return f"{described['TrainingJobStatus']}/{described['SecondaryStatus']}"


def code_of(error: ClientError) -> str:
    return str(error.response["Error"]["Code"])


def words(fake: FakeSageMaker) -> list[str]:
    described = fake.describe_training_job(TrainingJobName=NAME)
    return [transition["Status"] for transition in described["SecondaryStatusTransitions"]]


def test_a_job_goes_through_its_states(fake: FakeSageMaker) -> None:
    fake.create_training_job(**GOOD)
    # 30 s pending, 60 starting, 30 downloading, 600 training, 20 uploading.
    seen = []
    for duration_s in (0, 30, 60, 30, 599, 1, 20):
        fake.advance(duration_s)
        seen.append(status(fake).partition("/")[2])
    assert seen == ["Pending", "Starting", "Downloading", "Training", "Training", "Uploading", "Completed"]
    described = fake.describe_training_job(TrainingJobName=NAME)
    # Download, training and upload: 30 + 600 + 20.
    assert described["BillableTimeInSeconds"] == 650
    assert described["ResourceConfig"] == GOOD["ResourceConfig"]
    assert described["TrainingJobArn"].endswith(f":training-job/{NAME}")


def test_what_the_limits_refuse(fake: FakeSageMaker) -> None:
    with pytest.raises(ClientError) as caught:
        fake.create_training_job(**changed("TrainingJobName", "a.b"))
    assert code_of(caught.value) == "ValidationException"
    assert "1 validation error detected: TrainingJobName='a.b'" in str(caught.value)
    with pytest.raises(ParamValidationError):
        fake.create_training_job(**changed("TrainingJobName", 7))
    assert fake.list_training_jobs()["TrainingJobSummaries"] == []


def test_a_name_is_taken_until_its_job_is_deleted(fake: FakeSageMaker) -> None:
    fake.create_training_job(**GOOD)
    with pytest.raises(ClientError) as caught:
        fake.create_training_job(**GOOD)
    assert code_of(caught.value) == "ResourceInUse"
    with pytest.raises(ClientError) as caught:
        fake.delete_training_job(TrainingJobName=NAME)
    assert code_of(caught.value) == "ResourceInUse"
    fake.advance(10_000)
    fake.delete_training_job(TrainingJobName=NAME)
    fake.create_training_job(**GOOD)
    assert status(fake) == "InProgress/Pending"


def test_a_stop_has_a_window(fake: FakeSageMaker) -> None:
    fake.create_training_job(**GOOD)
    fake.advance(200)
    fake.stop_training_job(TrainingJobName=NAME)
    assert status(fake) == "Stopping/Stopping"
    fake.advance(119)
    assert status(fake) == "Stopping/Stopping"
    fake.advance(1)
    assert status(fake) == "Stopped/Stopped"
    with pytest.raises(ClientError, match="is in status Stopped"):
        fake.stop_training_job(TrainingJobName=NAME)


def test_a_job_that_waits_stops_at_once(fake: FakeSageMaker) -> None:
    fake.create_training_job(**GOOD)
    fake.stop_training_job(TrainingJobName=NAME)
    assert status(fake) == "Stopped/Stopped"


def test_the_wall_time(fake: FakeSageMaker) -> None:
    fake.next_scripts = [JobScript(stages=(Stage(secondary="Training", duration_s=1e9),))]
    fake.create_training_job(**GOOD)
    fake.advance(3600)
    assert status(fake) == "Stopping/Stopping"
    fake.advance(120)
    assert status(fake) == "Stopped/MaxRuntimeExceeded"


def test_waiting_for_spot_has_an_end(fake: FakeSageMaker) -> None:
    fake.next_scripts = [JobScript(stages=(Stage(secondary="Pending", duration_s=1e9),))]
    request = changed("StoppingCondition.MaxWaitTimeInSeconds", 7200) | {"EnableManagedSpotTraining": True}
    fake.create_training_job(**request)
    fake.advance(7199)
    assert status(fake) == "InProgress/Pending"
    fake.advance(1)
    assert status(fake) == "Stopped/MaxWaitTimeExceeded"


def test_an_interruption_starts_it_again(fake: FakeSageMaker) -> None:
    fake.next_scripts = [spot_script(train_s=100, wait_s=50, rest_s=200)]
    fake.create_training_job(**GOOD)
    fake.advance(170)
    assert status(fake) == "InProgress/Interrupted"
    fake.advance(1000)
    assert status(fake) == "Completed/Completed"
    assert words(fake).count("Starting") == 2


@pytest.mark.parametrize(("attempts", "end"), [(0, "Failed/Failed"), (1, "Completed/Completed")])
def test_errors_of_the_platform(fake: FakeSageMaker, attempts: int, end: str) -> None:
    fake.next_scripts = [JobScript(num_internal_errors=1)]
    retry = {"RetryStrategy": {"MaximumRetryAttempts": attempts}} if attempts else {}
    fake.create_training_job(**GOOD, **retry)
    fake.advance(3000)
    assert status(fake) == end
    assert ("Restarting" in words(fake)) == bool(attempts)


def test_a_failure_is_cut_at_1024_characters(fake: FakeSageMaker) -> None:
    fake.next_scripts = [JobScript(failure_reason="x" * 2000)]
    fake.create_training_job(**GOOD)
    fake.advance(3000)
    assert status(fake) == "Failed/Failed"
    assert len(fake.describe_training_job(TrainingJobName=NAME)["FailureReason"]) == 1024


def test_a_quota(fake: FakeSageMaker) -> None:
    fake.quota["ml.p4de.24xlarge"] = 1
    fake.create_training_job(**GOOD)
    with pytest.raises(ClientError, match="current utilization of 1 Instances") as caught:
        fake.create_training_job(**changed("TrainingJobName", "other"))
    assert code_of(caught.value) == "ResourceLimitExceeded"
    fake.advance(3000)
    fake.create_training_job(**changed("TrainingJobName", "other"))


def test_faults_come_as_often_as_they_were_ordered(fake: FakeSageMaker) -> None:
    fake.fail_next("list_training_jobs", "ThrottlingException", times=2)
    for _ in range(2):
        with pytest.raises(ClientError, match="ThrottlingException"):
            fake.list_training_jobs()
    assert fake.list_training_jobs() == {"TrainingJobSummaries": []}
    assert len(fake.sent("list_training_jobs")) == 3


def test_describe_may_lag_behind_list(fake: FakeSageMaker) -> None:
    fake.describe_lag_s = 60
    fake.create_training_job(**GOOD)
    fake.advance(40)
    assert status(fake) == "InProgress/Pending"
    assert fake.list_training_jobs()["TrainingJobSummaries"][0]["SecondaryStatus"] == "Starting"


def test_a_filter_by_status_is_applied_after_the_page_is_cut(fake: FakeSageMaker) -> None:
    for index in range(3):
        fake.create_training_job(**changed("TrainingJobName", f"job-{index}"))
        fake.advance(1)
    fake.stop_training_job(TrainingJobName="job-0")
    first: dict[str, Any] = fake.list_training_jobs(StatusEquals="Stopped", MaxResults=2)
    # The newest two are in progress: an empty page, and not the last one.
    assert first["TrainingJobSummaries"] == []
    second = fake.list_training_jobs(StatusEquals="Stopped", MaxResults=2, NextToken=first["NextToken"])
    assert [job["TrainingJobName"] for job in second["TrainingJobSummaries"]] == ["job-0"]
    assert "NextToken" not in second


def test_tags_are_kept_and_added(fake: FakeSageMaker) -> None:
    arn = fake.create_training_job(**GOOD, Tags=[{"Key": "a", "Value": "1"}])["TrainingJobArn"]
    fake.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "2"}, {"Key": "b", "Value": "3"}])
    assert fake.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "a", "Value": "2"}, {"Key": "b", "Value": "3"}]
    with pytest.raises(ClientError, match="not found"):
        fake.list_tags(ResourceArn="arn:x/none")
