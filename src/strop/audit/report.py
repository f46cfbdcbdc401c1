"""The report of an audit: one result per probe, the verdict, acceptance by the user, and the file."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.errors import CorruptRecord
from strop.hardware.identity import find_user_name
from strop.io import user_cache_dir, write_bytes_atomically

SCHEMA = 5
"""Raised with every change of a report's fields or of the probes, so that older reports are not used."""
_MAX_WARNINGS = 2
_MILD = frozenset({"constant", "cost", "judge_length"})
"""Probes whose failure is a matter of degree: they make a report amber, not red."""
MAX_EVIDENCE = 5
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
    reply: str
    """The beginning of the reply."""
    reply_digest: str
    """Hash over the whole reply."""
    reward: float | None
    detail: str = ""

    @classmethod
    def of(cls, example_id: str, reply: str, reward: float | None, detail: str = "") -> Evidence:
        """Keep a reply's beginning and its digest."""
        digest = hashlib.sha256(reply.encode(errors="surrogatepass")).hexdigest()[:16]
        return cls(
            example_id=example_id,
            reply=reply[:_MAX_SHOWN_CHARS],
            reply_digest=digest,
            reward=reward,
            detail=detail,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of one probe."""

    probe: str
    status: ProbeStatus
    value: float | None = None
    """The measured figure; `detail` has its meaning."""
    limit: float | None = None
    """The largest value that passes; for `gold` the smallest."""
    num: int = 0
    """Number of judgements behind the value."""
    seconds: float = 0.0
    detail: str = ""
    evidence: tuple[Evidence, ...] = ()

    def describe(self) -> str:
        """Describe it in one line."""
        figure = "" if self.value is None else f" {self.value:.3g}"
        bound = "" if self.limit is None else f" (limit {self.limit:.3g})"
        example = f", for example {self.evidence[0].reply[:60]!r}" if self.evidence else ""
        return f"{self.probe} {self.status}{figure}{bound} {self.detail}{example}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """A probe that a user accepted; valid for this version of the task only."""

    probe: str
    reason: str
    user: str
    accepted_at: float
    """Unix seconds."""
    task_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """One audit of one task."""

    task: str
    task_version: str
    variant: str | None = None
    """The variant of the task, for names with several."""
    isolation: str | None = None
    """The lowest sandbox level that a judged program ran at; None if no program ran."""
    seed: int
    num_examples: int
    max_reward: float
    chance: float
    """Share of full marks that chance gives, as the task declares."""
    started_at: float
    """Unix seconds."""
    seconds: float
    probes: tuple[ProbeResult, ...]
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
    def counts(self) -> Mapping[str, int]:
        """Number of probes by status."""
        return {
            status.value: sum(result.status is status for result in self.probes) for status in ProbeStatus
        }

    def broken(self) -> list[ProbeResult]:
        """Return the probes that make the report less than green, failures first."""
        order = (ProbeStatus.ERROR, ProbeStatus.FAIL, ProbeStatus.WARN)
        return [result for status in order for result in self.probes if result.status is status]

    @property
    def lost(self) -> str:
        """The cause, if none of the replies in the broken probes' evidence could be judged; else empty."""
        shown = [entry for result in self.broken() for entry in result.evidence]
        if not shown or any(entry.reward is not None for entry in shown):
            return ""
        return Counter(entry.detail for entry in shown).most_common(1)[0][0]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with its verdict and a digest over all other values."""
        values = {
            "schema": SCHEMA,
            **asdict(self),
            "counts": dict(self.counts),
            "unjudged": self.unjudged,
            "verdict": self.verdict.value,
            "accepted_verdict": self.accepted_verdict.value,
        }
        text = json.dumps(values, sort_keys=True)
        values = json.loads(text)  # As read back: lists, no tuples.
        return {**values, "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _judge_probes(probes: Sequence[ProbeResult]) -> Verdict:
    broken = {result.probe for result in probes if result.status is ProbeStatus.FAIL}
    has_errors = any(result.status is ProbeStatus.ERROR for result in probes)
    num_warnings = sum(result.status is ProbeStatus.WARN for result in probes)
    if has_errors or broken - _MILD:
        return Verdict.RED
    has_open = any(result.status is ProbeStatus.WARN and not result.num for result in probes)
    return Verdict.AMBER if broken or has_open or num_warnings > _MAX_WARNINGS else Verdict.GREEN


_SHOWN_VERSION_CHARS = 12


def accept_probes(report: AuditReport, reasons: Mapping[str, str]) -> AuditReport:
    """Return the report with the accepted probes, each with user and reason.

    `reasons` are by probe, or by PROBE@VERSION, which applies while the task's version begins with VERSION,
    that is, until prompts, data or verifier change.
    """
    accepted = []
    for name, reason in reasons.items():
        probe, _, version = name.partition("@")
        is_broken = any(result.probe == probe for result in report.broken())
        if is_broken and _applies(version, report.task_version):
            accepted.append(
                Acceptance(
                    probe=probe,
                    reason=reason,
                    user=find_user_name(),
                    accepted_at=time.time(),
                    task_version=report.task_version,
                )
            )
    return replace(report, accepted=tuple(accepted))


def describe_acceptance(report: AuditReport, reasons: Mapping[str, str]) -> str:
    """Describe in one line the broken probes, the accepted ones, and how to accept the rest."""
    broken, verdict = report.broken(), report.accepted_verdict
    shown = "; ".join(result.describe() for result in broken) or f"{len(report.probes)} probes found nothing"
    parts = [f"{verdict}: {shown}"]
    if report.lost:
        parts.insert(0, report.lost)
    names = [acceptance.probe for acceptance in report.accepted]
    if names:
        parts.append(f"accepted: {', '.join(names)}")
    if others := [name for name in reasons if not _applies(name.partition("@")[2], report.task_version)]:
        parts.append(f"accepted for another version of the task, and not for this one: {', '.join(others)}")
    if verdict is Verdict.RED:
        # Failures come first, so this is one that makes the report red.
        probe = next(result.probe for result in broken if result.probe not in names)
        name = f"audit.{probe}@{report.task_version[:_SHOWN_VERSION_CHARS]}"
        parts.append(f"`strop audit RUN.toml` shows each; train.accept = '{name}: reason' goes on")
    return "; ".join(parts)


def _applies(version: str, task_version: str) -> bool:
    return not version or task_version.startswith(version)


def stored_audit_path(task: str, task_version: str) -> Path:
    """Return the path of the newest audit of a task, for the runs of this user.

    Audits with another schema have other paths, so their tasks count as not audited.
    """
    return user_cache_dir() / "audits" / f"{task}-{task_version}-{SCHEMA}.json"


def write_audit(report: AuditReport, path: Path) -> None:
    """Write a report as JSON, complete or not at all.

    Raises: StoreError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False, sort_keys=True)
    write_bytes_atomically(path, (text + "\n").encode())


def find_audit(task: str, task_version: str) -> AuditReport | None:
    """Return the stored audit of exactly this version of a task; None if there is none.

    Raises: CorruptRecord if the file was changed or is incomplete.
    """
    path = stored_audit_path(task, task_version)
    try:
        values = json.loads(path.read_bytes())
        probes = []
        for probe in values["probes"]:
            evidence = tuple(Evidence(**entry) for entry in probe["evidence"])
            status = ProbeStatus(probe["status"])
            probes.append(ProbeResult(**{**probe, "status": status, "evidence": evidence}))
        fields = {name: values[name] for name in AuditReport.__slots__}
        accepted = tuple(Acceptance(**entry) for entry in values["accepted"])
        report = AuditReport(**{**fields, "probes": tuple(probes), "accepted": accepted})
        if report.to_json() != values:
            raise ValueError("its fields do not give its digest")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord(
            f"{path} is not a whole audit ({error})",
            allowed="a report as `strop audit` wrote it",
            next_step="run `strop audit` again; it replaces the file",
        ) from error
    return report
