"""Findings of a check: the three parts of every message, and a code for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from strop.errors import CheckRefused, StropError, format_error, split_error


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The run would fail, or harm another one; it is not started."""
    WARNING = "warning"
    UNKNOWN = "unknown"
    """The check was not possible, which is no success."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem, or a check that was not possible."""

    code: str
    """A short fixed word, for example `free_memory`."""
    given: str
    allowed: str
    next_step: str
    where: str = ""
    """UUID of a GPU or of a slice, or the name of a node."""
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        """Format it as one message, with its place."""
        place = f"{self.where}: " if self.where else ""
        return format_error(f"{place}{self.given}", allowed=self.allowed, next_step=self.next_step)


def find_refusal(
    code: str, error: StropError, *, where: str = "", severity: Severity = Severity.ERROR
) -> Finding:
    """Make a finding from an error of strop, whose message has the three parts already."""
    problem, allowed, next_step = split_error(str(error))
    return Finding(
        code=code, given=problem, allowed=allowed, next_step=next_step, where=where, severity=severity
    )


def require_none(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that do not forbid a start.

    Raises: CheckRefused naming all that do, each with its code.
    """
    all_findings = list(findings)
    errors = [finding for finding in all_findings if finding.severity is Severity.ERROR]
    if errors:
        raise CheckRefused("\n".join(f"{finding.code}: {finding}" for finding in errors))
    return all_findings
