"""What a training job's two status words mean.

Being stopped is never success, and a word that nobody listed says no more than the primary status does.
Status messages are for people: nothing is read from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.launch.contract import Answer, JobState

CANCEL_PENDING = "cancel pending"
REQUEUE_PREFIX = "requeue:"
PREFLIGHT_PREFIX = "preflight:"

_TABLE: Mapping[tuple[str, str], tuple[JobState, str]] = {
    ("InProgress", "Pending"): (JobState.QUEUED, "waiting for instances"),
    ("InProgress", "Starting"): (JobState.STARTING, ""),
    ("InProgress", "Downloading"): (JobState.STARTING, "download"),
    ("InProgress", "Training"): (JobState.RUNNING, ""),
    ("InProgress", "Uploading"): (JobState.RUNNING, "upload"),
    ("InProgress", "Interrupted"): (JobState.PREEMPTED, "spot instance taken back"),
    ("InProgress", "Restarting"): (JobState.PREEMPTED, "restart after an error of the platform"),
    ("InProgress", "Updating"): (JobState.RUNNING, ""),
    ("Completed", "Completed"): (JobState.SUCCEEDED, ""),
    ("Stopped", "Stopped"): (JobState.CANCELLED, ""),
    ("Stopped", "MaxRuntimeExceeded"): (JobState.TIMEOUT, "wall time"),
    ("Stopped", "MaxWaitTimeExceeded"): (JobState.FAILED, "no capacity within the wait limit"),
}
_BY_PRIMARY: Mapping[str, tuple[JobState, str]] = {
    "InProgress": (JobState.RUNNING, ""),
    "Completed": (JobState.SUCCEEDED, ""),
    "Failed": (JobState.FAILED, ""),
    "Stopping": (JobState.RUNNING, CANCEL_PENDING),
    "Stopped": (JobState.CANCELLED, ""),
    "Deleting": (JobState.UNKNOWN, "deleting"),
}


def map_state(primary: str, secondary: str, before: str = "") -> tuple[JobState, str]:
    """Return the state of two words and a few words beside it.

    `before`: the secondary status before a stop was asked for: the state stays what it was.
    """
    if primary == "Stopping" and before:
        return map_state("InProgress", before)[0], CANCEL_PENDING
    found = _TABLE.get((primary, secondary)) or _BY_PRIMARY.get(primary)
    return found or (JobState.UNKNOWN, f"{primary}/{secondary}")


def explain_failure(reason: str) -> str:
    """Say in words what the failure file began with."""
    if reason.startswith(REQUEUE_PREFIX):
        said = reason.removeprefix(REQUEUE_PREFIX).strip()
        return f"stopped in good order, its state saved; submit again ({said})"
    if reason.startswith(PREFLIGHT_PREFIX):
        return f"refused by a check before it began: {reason.removeprefix(PREFLIGHT_PREFIX).strip()}"
    return reason


def read_answer(described: Mapping[str, Any]) -> Answer:
    """Return what `DescribeTrainingJob` says of a job."""
    primary, secondary = str(described["TrainingJobStatus"]), str(described["SecondaryStatus"])
    transitions: Sequence[Mapping[str, Any]] = described.get("SecondaryStatusTransitions", ())
    words = [str(transition["Status"]) for transition in transitions]
    before = next((word for word in reversed(words) if word != "Stopping"), "")
    state, reason = map_state(primary, secondary, before)
    failure = explain_failure(str(described.get("FailureReason", "")))
    changed_at = described.get("LastModifiedTime") or described.get("CreationTime")
    return Answer(
        state=state,
        raw=f"{primary}/{secondary}",
        reason="; ".join(filter(None, [reason, failure])),
        num_restarts=max(0, words.count("Starting") - 1),
        nodes=_nodes(described),
        since=None if changed_at is None else changed_at.timestamp(),
        is_saved=str(described.get("FailureReason", "")).startswith(REQUEUE_PREFIX),
    )


def _nodes(described: Mapping[str, Any]) -> str:
    resources = described.get("ResourceConfig", {})
    groups = resources.get("InstanceGroups") or [resources]
    return ", ".join(
        f"{group['InstanceCount']} x {group['InstanceType']}" for group in groups if "InstanceType" in group
    )
