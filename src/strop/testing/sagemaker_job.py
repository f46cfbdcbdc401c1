"""One job of `FakeSageMaker`: its script, its history, and the service's replies about it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

TRAINING = "Training"
BILLED = frozenset({"Downloading", TRAINING, "Uploading", "Stopping"})
TERMINAL = frozenset({"Completed", "Failed", "Stopped"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One state of a job and how long it lasts."""

    secondary: str
    duration_s: float
    primary: str = "InProgress"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScript:
    """The course of a job that is not stopped."""

    stages: tuple[Stage, ...] = (
        Stage(secondary="Pending", duration_s=30.0),
        Stage(secondary="Starting", duration_s=60.0),
        Stage(secondary="Downloading", duration_s=30.0),
        Stage(secondary=TRAINING, duration_s=600.0),
        Stage(secondary="Uploading", duration_s=20.0),
    )
    failure_reason: str = ""
    """If not empty, the job fails with this at the end of its stages."""
    num_internal_errors: int = 0
    """Number of platform failures in the middle of Training."""
    log_lines: tuple[str, ...] = ()
    """Log lines of each host while it trains."""


def spot_script(train_s: float, wait_s: float, rest_s: float) -> JobScript:
    """Return a script with one interruption: train, wait for another instance, train on."""
    words = ("Starting", TRAINING, "Interrupted", "Starting", "Downloading", TRAINING, "Uploading")
    times = (60.0, train_s, wait_s, 60.0, 30.0, rest_s, 20.0)
    return JobScript(
        stages=tuple(Stage(secondary=word, duration_s=time) for word, time in zip(words, times, strict=True))
    )


class Instance(Protocol):
    """The hosts of a job as real programs, such as the emulator."""

    def start(self, request: Mapping[str, Any], attempt: int) -> None:
        """Fetch the checkpoints, build /opt/ml and start the entry on every host."""

    def poll(self) -> int | None:
        """Return the exit code once all hosts have ended: the first that is not 0."""

    def terminate(self) -> None:
        """Send SIGTERM to every entry."""

    def kill(self) -> None:
        """Kill every entry, and send the checkpoints."""

    def failure(self) -> str:
        """Return the failure file's text."""


@dataclass(kw_only=True, slots=True)
class FakeJob:
    """The service's state of one job."""

    request: dict[str, Any]
    arn: str
    created_at: float
    script: JobScript
    history: list[tuple[float, str, str]] = field(default_factory=list)
    """Instant, primary and secondary status of each change."""
    stage: int = 0
    stage_at: float = 0.0
    stop_at: float | None = None
    """The instant of the KILL after a stop."""
    stop_word: str = "Stopped"
    reason: str = ""
    num_internal_errors: int = 0
    num_attempts: int = 0
    instance: Instance | None = None
    tags: list[dict[str, str]] = field(default_factory=list)

    @property
    def primary(self) -> str:
        """TrainingJobStatus."""
        return self.history[-1][1]

    @property
    def secondary(self) -> str:
        """SecondaryStatus."""
        return self.history[-1][2]

    @property
    def is_over(self) -> bool:
        """Whether its state is final."""
        return self.primary in TERMINAL

    def billed_s(self, now: float) -> float:
        """Return the seconds that this job had instances up to an instant."""
        ends = [at for at, _, _ in self.history[1:]] + [now]
        spans = zip(self.history, ends, strict=True)
        return sum(max(0.0, end - at) for (at, _, word), end in spans if word in BILLED)


def describe_job(job: FakeJob, at: float) -> dict[str, Any]:
    """Return the service's description of a job as it was at an instant."""
    history = [change for change in job.history if change[0] <= at] or job.history[:1]
    _, primary, secondary = history[-1]
    request = copy.deepcopy({key: value for key, value in job.request.items() if key != "Tags"})
    end = history[-1][0]
    answer = {
        **request,
        "TrainingJobArn": job.arn,
        "ModelArtifacts": {"S3ModelArtifacts": f"{output_uri(job)}/model.tar.gz"},
        "TrainingJobStatus": primary,
        "SecondaryStatus": secondary,
        "CreationTime": to_time(job.created_at),
        "LastModifiedTime": to_time(end),
        "SecondaryStatusTransitions": _transitions(history),
    }
    if primary == "Failed" or (job.reason and primary == "Stopped"):
        answer["FailureReason"] = job.reason
    if primary in TERMINAL:
        billed = int(job.billed_s(end))
        answer |= {
            "TrainingEndTime": to_time(end),
            "TrainingTimeInSeconds": billed,
            "BillableTimeInSeconds": billed,
        }
    return answer


def summarize_job(job: FakeJob) -> dict[str, Any]:
    """Return the line of a job in a listing."""
    summary = {
        "TrainingJobName": job.request["TrainingJobName"],
        "TrainingJobArn": job.arn,
        "CreationTime": to_time(job.created_at),
        "LastModifiedTime": to_time(job.history[-1][0]),
        "TrainingJobStatus": job.primary,
        "SecondaryStatus": job.secondary,
    }
    return summary | ({"TrainingEndTime": to_time(job.history[-1][0])} if job.is_over else {})


def _transitions(history: list[tuple[float, str, str]]) -> list[dict[str, Any]]:
    transitions: list[dict[str, Any]] = []
    for index, (at, primary, word) in enumerate(history):
        transition = {"Status": word, "StartTime": to_time(at), "StatusMessage": f"{word}, for people"}
        if index + 1 < len(history):
            transition["EndTime"] = to_time(history[index + 1][0])
        elif primary in TERMINAL:
            transition["EndTime"] = to_time(at)
        transitions.append(transition)
    return transitions


def output_uri(job: FakeJob) -> str:
    """Return the URI of the folder of a job's archives."""
    root = job.request["OutputDataConfig"]["S3OutputPath"].rstrip("/")
    return f"{root}/{job.request['TrainingJobName']}/output"


def to_time(at: float) -> datetime:
    """Return an instant as the client's datetime."""
    return datetime.fromtimestamp(at, tz=UTC)
