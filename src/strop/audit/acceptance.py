"""Accepting what an audit found: by the name of the probe and a reason, for one version of the task."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from strop.audit.report import Acceptance, AuditReport, Verdict
from strop.hardware.identity import find_user_name

_SHOWN_VERSION_CHARS = 12


def accept_probes(report: AuditReport, reasons: Mapping[str, str]) -> AuditReport:
    """Return a report that says what of it was accepted, by whom and why.

    `reasons` are by probe, or by PROBE@VERSION: these hold while the task's version begins so, and no
    longer once its prompts, data or verifier are others.
    """
    accepted = []
    for name, reason in reasons.items():
        probe, _, version = name.partition("@")
        is_meant = any(result.probe == probe for result in report.broken())
        if is_meant and _holds(version, report.task_version):
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
    """Say in a line what was found, what of it was accepted, and how the rest could be."""
    broken, verdict = report.broken(), report.accepted_verdict
    shown = "; ".join(result.describe() for result in broken) or f"{len(report.probes)} probes found nothing"
    parts = [f"{verdict}: {shown}"]
    if report.lost:
        parts.insert(0, report.lost)
    names = [acceptance.probe for acceptance in report.accepted]
    if names:
        parts.append(f"accepted: {', '.join(names)}")
    if others := [name for name in reasons if not _holds(name.partition("@")[2], report.task_version)]:
        parts.append(f"accepted for another version of the task, and not for this one: {', '.join(others)}")
    if verdict is Verdict.RED:
        # Failures come first, so it is one of those that make it red.
        probe = next(result.probe for result in broken if result.probe not in names)
        name = f"audit.{probe}@{report.task_version[:_SHOWN_VERSION_CHARS]}"
        parts.append(f"`strop audit {report.task}` shows each; train.accept = '{name}: reason' goes on")
    return "; ".join(parts)


def _holds(version: str, task_version: str) -> bool:
    return not version or task_version.startswith(version)
