"""The report of an audit: one result per probe, the verdict, acceptance by the user, and the file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from strop.hardware.machine import find_user_name
from strop.io import user_cache_dir, write_bytes_atomically
from strop.rollout import Example
from strop.tasks.failures import FailureCause, sum_up

SCHEMA = 6
"""Raised with every change of a report's fields or of the probes, so that older reports are not used."""
_MAX_SHOWN_CHARS = 200


class ProbeStatus(StrEnum):
    """The end of a probe."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    ERROR = "error"
    """The probe could not be run, so its question is open."""
    NOT_APPLICABLE = "n/a"


class Verdict(StrEnum):
    """The consequence for training."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"
    """No training on this task, unless the run file accepts it by name and reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One judgement that contradicts its probe's expectation."""

    example_id: str
    answer: str | None
    """The beginning of the example's answer."""
    reply: str
    """The beginning of the reply."""
    reward: float | None
    detail: str

    @classmethod
    def of(cls, example: Example, reply: str, reward: float | None, detail: str) -> Evidence:
        """Keep the beginnings of a reply and of the example's answer."""
        answer = example.answer and example.answer[:_MAX_SHOWN_CHARS]
        shown = reply[:_MAX_SHOWN_CHARS]
        return cls(example_id=example.example_id, answer=answer, reply=shown, reward=reward, detail=detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of one probe."""

    probe: str = ""
    status: ProbeStatus
    value: float | None = None
    """The measured figure; `detail` has its meaning."""
    limit: float | None = None
    """The largest value that passes; for `gold` the smallest."""
    num: int = 0
    """Number of judgements behind the value."""
    detail: str = ""
    evidence: tuple[Evidence, ...] = ()

    def describe(self) -> str:
        """Describe it in one line."""
        figure = "" if self.value is None else f" {self.value:.3g}"
        bound = "" if self.limit is None else f" (limit {self.limit:.3g})"
        text = f"{self.probe} {self.status}{figure}{bound} {self.detail}"
        for first in self.evidence[:1]:
            text += f", for example {first.reply[:60]!r} where the answer is {first.answer!r:.60}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """A probe that a user accepted, of this version of the task."""

    probe: str
    reason: str
    user: str
    accepted_at: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """One audit of one task."""

    task: str
    task_version: str
    seed: int
    num_examples: int
    seconds: float
    probes: tuple[ProbeResult, ...]
    num_judged: int = 0
    causes: tuple[FailureCause, ...] = ()
    """Why replies could not be judged, the commonest first."""
    accepted: tuple[Acceptance, ...] = ()
    """Accepted by the run whose directory has this report."""

    @property
    def verdict(self) -> Verdict:
        """Red, amber or green, by the probes alone."""
        return _judge_probes(self.probes)

    @property
    def accepted_verdict(self) -> Verdict:
        """The verdict without the probes that were accepted."""
        names = {acceptance.probe for acceptance in self.accepted}
        return _judge_probes([result for result in self.probes if result.probe not in names])

    @property
    def unjudged(self) -> tuple[str, ...]:
        """The probes that judged nothing, because they do not apply or had nothing to judge."""
        return tuple(result.probe for result in self.probes if not result.num)

    @property
    def lost(self) -> str:
        """Why most replies could not be judged, as the beginning of a line; empty if most were."""
        num_lost = sum(cause.num for cause in self.causes)
        is_most = 2 * num_lost > self.num_judged
        return f"{sum_up(self.causes, self.num_judged, 'replies')}; " if is_most else ""

    def broken(self) -> list[ProbeResult]:
        """Return the probes that make the report less than green, failures first."""
        order = (ProbeStatus.ERROR, ProbeStatus.FAIL, ProbeStatus.WARN)
        return [result for status in order for result in self.probes if result.status is status]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with what follows from them."""
        values = {
            **asdict(self),
            "unjudged": self.unjudged,
            "verdict": self.verdict,
            "accepted_verdict": self.accepted_verdict,
        }
        return dict(json.loads(json.dumps(values)))


def _judge_probes(probes: Sequence[ProbeResult]) -> Verdict:
    found = {result.status for result in probes}
    if found & {ProbeStatus.FAIL, ProbeStatus.ERROR}:
        return Verdict.RED
    return Verdict.AMBER if ProbeStatus.WARN in found else Verdict.GREEN


def accept_probes(report: AuditReport, reasons: Mapping[str, str]) -> AuditReport:
    """Return the report with the accepted probes, each with user and reason.

    `reasons` are by probe, or by PROBE@VERSION, which applies while the task's version begins with VERSION,
    that is, until prompts, data or verifier change.
    """
    broken = {result.probe for result in report.broken()}
    accepted = [
        Acceptance(
            probe=name.partition("@")[0],
            reason=reason,
            user=find_user_name(),
            accepted_at=time.time(),
        )
        for name, reason in reasons.items()
        if name.partition("@")[0] in broken and report.task_version.startswith(name.partition("@")[2])
    ]
    return replace(report, accepted=tuple(accepted))


def describe_acceptance(report: AuditReport) -> str:
    """Describe in one line the broken probes, the accepted ones, and how to accept the rest."""
    broken, verdict = report.broken(), report.accepted_verdict
    shown = "; ".join(result.describe() for result in broken) or f"{len(report.probes)} probes found nothing"
    parts = [f"{report.lost}{verdict}: {shown}"]
    names = [acceptance.probe for acceptance in report.accepted]
    if names:
        parts.append(f"accepted: {', '.join(names)}")
    if verdict is Verdict.RED:
        # Failures come first, so this is one that makes the report red.
        probe = next(result.probe for result in broken if result.probe not in names)
        name = f"audit.{probe}@{report.task_version[:12]}"
        parts.append(f"`strop audit RUN.toml` shows each; train.accept = '{name}: reason' goes on")
    return "; ".join(parts)


def stored_audit_path(task: str, task_version: str) -> Path:
    """Return the path of the newest audit of a task, for the runs of this user."""
    return user_cache_dir() / "audits" / f"{task}-{task_version}-{SCHEMA}.json"


def write_audit(report: AuditReport, path: Path) -> None:
    """Write a report as JSON. Raises: StoreError if the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False)
    write_bytes_atomically(path, (text + "\n").encode())


def find_audit(task: str, task_version: str) -> AuditReport | None:
    """Return the stored audit of exactly this version of a task; None if there is none that can be read."""
    try:
        return TypeAdapter(AuditReport).validate_json(stored_audit_path(task, task_version).read_bytes())
    except (OSError, ValueError):
        return None
