"""What an audit found: one result per probe, and a verdict that follows from them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SCHEMA = 3
"""Raised with every change of what a report holds or of what probes ask, so that older ones are made anew."""
_MAX_WARNINGS = 2
_MILD = frozenset({"constant", "cost", "judge_length"})
"""Probes whose failure is a matter of degree: they make a report amber, not red."""
MAX_EVIDENCE = 5
_MAX_SHOWN_CHARS = 200


class ProbeStatus(StrEnum):
    """How a probe ended."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    ERROR = "error"
    """The probe could not be carried out; nothing is known."""
    NOT_APPLICABLE = "n/a"


class Verdict(StrEnum):
    """What follows for training."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"
    """No training on this task, unless the run file accepts it by name and reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One judgement that was not as it must be."""

    example_id: str
    reply: str
    """Its beginning."""
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
    """What one probe found."""

    probe: str
    status: ProbeStatus
    value: float | None = None
    """The measured figure; what it is, says `detail`."""
    limit: float | None = None
    """The value up to which the probe passes, or from which for `gold`."""
    num: int = 0
    """Judgements behind the value."""
    seconds: float = 0.0
    detail: str = ""
    evidence: tuple[Evidence, ...] = ()

    def describe(self) -> str:
        """Say it in one line."""
        figure = "" if self.value is None else f" {self.value:.3g}"
        bound = "" if self.limit is None else f" (limit {self.limit:.3g})"
        example = f", for example {self.evidence[0].reply[:60]!r}" if self.evidence else ""
        return f"{self.probe} {self.status}{figure}{bound} {self.detail}{example}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """What somebody accepted of an audit; it holds for this version of the task alone."""

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
    """Which of the tasks of this name it is."""
    isolation: str | None = None
    """The lowest sandbox level that a judged program ran at; None where no program ran."""
    seed: int
    num_examples: int
    max_reward: float
    chance: float
    """Share of full marks that the task declares to be had by chance."""
    started_at: float
    """Unix seconds."""
    seconds: float
    probes: tuple[ProbeResult, ...]
    accepted: tuple[Acceptance, ...] = ()
    """By the run whose directory this report lies in."""

    @property
    def verdict(self) -> Verdict:
        """Red, amber or green; it follows from the probes alone."""
        return _judge_probes(self.probes)

    @property
    def accepted_verdict(self) -> Verdict:
        """The verdict without the probes that were accepted."""
        names = {acceptance.probe for acceptance in self.accepted}
        return _judge_probes([result for result in self.probes if result.probe not in names])

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
        """What kept all replies that the broken probes show from being judged; empty where one was judged."""
        shown = [entry for result in self.broken() for entry in result.evidence]
        if not shown or any(entry.reward is not None for entry in shown):
            return ""
        return Counter(entry.detail for entry in shown).most_common(1)[0][0]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with its verdict and a digest over all the rest."""
        values = {
            "schema": SCHEMA,
            **asdict(self),
            "counts": dict(self.counts),
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
    return Verdict.AMBER if broken or num_warnings > _MAX_WARNINGS else Verdict.GREEN
