"""State and logs of a training job: the meaning of its two status words, and its streams in CloudWatch.

A stopped job is never a success, and with an unknown secondary status only the primary one counts. Status
messages are for people and are not parsed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from strop.errors import RemoteMissing
from strop.launch.contract import JobState, SchedulerStatus
from strop.launch.sagemaker.client import AwsClients, all_pages
from strop.launch.sagemaker.places import LOG_GROUP
from strop.record.files import LogLine

CANCEL_PENDING = "cancel pending"
REQUEUE_PREFIX = "requeue:"
PREFLIGHT_PREFIX = "preflight:"
OVERLAP_MS = 60_000
"""The minute before the newest line is read again, because lines arrive out of order."""
_STREAM = re.compile(r"(?P<job>[^/]+)/(?P<host>.+?)(?:-(?P<start>\d+))?$")
_ROLE = re.compile(r"(?P<role>[a-z][a-z0-9_-]*)\| (?P<text>.*)", re.DOTALL)

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
    """Return the state of two status words, and an explanation.

    `before`: the secondary status before a stop was requested, which determines the state until the end.
    """
    if primary == "Stopping" and before:
        return map_state("InProgress", before)[0], CANCEL_PENDING
    entry = _TABLE.get((primary, secondary)) or _BY_PRIMARY.get(primary)
    return entry or (JobState.UNKNOWN, f"{primary}/{secondary}")


def explain_failure(reason: str) -> str:
    """Replace the prefix of a failure file by an explanation."""
    if reason.startswith(REQUEUE_PREFIX):
        detail = reason.removeprefix(REQUEUE_PREFIX).strip()
        return f"stopped in good order, its state saved; submit again ({detail})"
    if reason.startswith(PREFLIGHT_PREFIX):
        return f"refused by a check before it began: {reason.removeprefix(PREFLIGHT_PREFIX).strip()}"
    return reason


def read_answer(described: Mapping[str, Any]) -> SchedulerStatus:
    """Read the reply of `DescribeTrainingJob`."""
    primary, secondary = str(described["TrainingJobStatus"]), str(described["SecondaryStatus"])
    transitions: Sequence[Mapping[str, Any]] = described.get("SecondaryStatusTransitions", ())
    words = [str(transition["Status"]) for transition in transitions]
    before = next((word for word in reversed(words) if word != "Stopping"), "")
    state, reason = map_state(primary, secondary, before)
    failure = explain_failure(str(described.get("FailureReason", "")))
    changed_at = described.get("LastModifiedTime") or described.get("CreationTime")
    resources = described.get("ResourceConfig", {})
    groups = resources.get("InstanceGroups") or [resources]
    return SchedulerStatus(
        state=state,
        raw=f"{primary}/{secondary}",
        reason="; ".join(filter(None, [reason, failure])),
        num_restarts=max(0, words.count("Starting") - 1),
        nodes=", ".join(
            f"{group['InstanceCount']} x {group['InstanceType']}"
            for group in groups
            if "InstanceType" in group
        ),
        since=None if changed_at is None else changed_at.timestamp(),
        is_saved=str(described.get("FailureReason", "")).startswith(REQUEUE_PREFIX),
    )


class CloudWatchLogs:
    """`LogSource` of one training job, which merges the streams of all hosts and starts by time."""

    def __init__(self, clients: AwsClients, job: str) -> None:
        self._clients, self._job = clients, job
        self._newest_ms = 0
        self._seen: dict[str, int] = {}
        """Id to time of the lines that may be read again."""
        self._starts: dict[str, list[str]] = defaultdict(list)

    def read_new(self) -> list[LogLine]:
        """Return the lines since the last call, oldest first; none before the log group exists.

        Raises: StoreError if the service does not answer.
        """
        try:
            events = all_pages(
                self._clients,
                "logs",
                "filter_log_events",
                "events",
                resource=f"{LOG_GROUP}/{self._job}",
                logGroupName=LOG_GROUP,
                logStreamNamePrefix=f"{self._job}/",
                startTime=max(0, self._newest_ms - OVERLAP_MS),
            )
        except RemoteMissing:
            return []
        fresh = [
            event
            for event in events
            # The prefix is checked again, because moto 5.2.5 ignores it.
            if event["logStreamName"].startswith(f"{self._job}/") and event["eventId"] not in self._seen
        ]
        fresh.sort(key=lambda event: event["timestamp"])
        for event in fresh:
            self._seen[event["eventId"]] = event["timestamp"]
            self._newest_ms = max(self._newest_ms, event["timestamp"])
        horizon = self._newest_ms - OVERLAP_MS
        self._seen = {name: at for name, at in self._seen.items() if at >= horizon}
        lines = []
        for event in fresh:
            match = _STREAM.fullmatch(event["logStreamName"])
            host, start = (match["host"], match["start"] or "") if match else (event["logStreamName"], "")
            starts = self._starts[host]
            if start not in starts:
                starts.append(start)
            text = event["message"].rstrip("\n")
            of_role = _ROLE.fullmatch(text)
            lines.append(
                LogLine(
                    text=of_role["text"] if of_role else text,
                    attempt=f"{self._job}-{starts.index(start)}",
                    node=host,
                    role=of_role["role"] if of_role else "",
                )
            )
        return lines
