"""Every pair of status words, and the ones that nobody has listed."""

from __future__ import annotations

import pytest

from strop.launch.contract import JobState
from strop.launch.sagemaker.limits import load_shapes
from strop.launch.sagemaker.status import map_state, read_answer
from tests.launch.sagemaker.building import NOON

TABLE = [
    ("InProgress", "Pending", JobState.QUEUED),
    ("InProgress", "Starting", JobState.STARTING),
    ("InProgress", "Downloading", JobState.STARTING),
    ("InProgress", "Training", JobState.RUNNING),
    ("InProgress", "Uploading", JobState.RUNNING),
    ("InProgress", "Interrupted", JobState.PREEMPTED),
    ("InProgress", "Restarting", JobState.PREEMPTED),
    ("InProgress", "Updating", JobState.RUNNING),
    ("Completed", "Completed", JobState.SUCCEEDED),
    ("Failed", "Failed", JobState.FAILED),
    ("Stopping", "Stopping", JobState.RUNNING),
    ("Stopped", "Stopped", JobState.CANCELLED),
    ("Stopped", "MaxRuntimeExceeded", JobState.TIMEOUT),
    ("Stopped", "MaxWaitTimeExceeded", JobState.FAILED),
    ("Deleting", "Completed", JobState.UNKNOWN),
    # Retired words, and one of the future: the primary status alone decides.
    ("InProgress", "LaunchingMLInstances", JobState.RUNNING),
    ("InProgress", "Meditating", JobState.RUNNING),
    ("Stopped", "Meditating", JobState.CANCELLED),
    ("Paused", "Paused", JobState.UNKNOWN),
]


@pytest.mark.parametrize(("primary", "secondary", "state"), TABLE)
def test_the_state_of_a_pair(primary: str, secondary: str, state: JobState) -> None:
    assert map_state(primary, secondary)[0] is state


def test_no_pair_of_the_model_is_success_but_completed() -> None:
    shapes = load_shapes()
    for primary in shapes["TrainingJobStatus"]["enum"]:
        for secondary in shapes["SecondaryStatus"]["enum"]:
            state, _ = map_state(primary, secondary)
            assert (state is JobState.SUCCEEDED) == (primary == "Completed")
            assert state is not JobState.UNKNOWN or primary == "Deleting"


def test_a_stop_leaves_the_state_and_is_shown() -> None:
    assert map_state("Stopping", "Stopping", "Pending") == (JobState.QUEUED, "cancel pending")
    assert map_state("Stopping", "Stopping", "Training") == (JobState.RUNNING, "cancel pending")


def test_an_answer_has_the_reason_and_the_restarts() -> None:
    import datetime as dt

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
