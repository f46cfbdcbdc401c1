"""The life of jobs in `FakeSageMaker`: it keeps what the service promises."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.fixtures.sagemaker import FakeSageMaker, JobScript
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


def test_a_failure_is_cut_at_1024_characters(fake: FakeSageMaker) -> None:
    fake.next_scripts = [JobScript(failure_reason="x" * 2000)]
    fake.create_training_job(**GOOD)
    fake.advance(3000)
    assert status(fake) == "Failed/Failed"
    assert len(fake.describe_training_job(TrainingJobName=NAME)["FailureReason"]) == 1024


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
