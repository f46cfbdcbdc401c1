"""The levels of a preflight, one after the other."""

from __future__ import annotations

from strop.errors import Interrupted
from strop.hardware.findings import Finding, Severity, require_none
from strop.hardware.preflight.collective import check_collective
from strop.hardware.preflight.compute import check_compute
from strop.hardware.preflight.reading import check_readings
from strop.hardware.preflight.request import Level, PreflightRequest
from strop.hardware.preflight.site_tools import check_site_tools

_LEVELS = {
    Level.READ: check_readings,
    Level.COMPUTE: check_compute,
    Level.COLLECT: check_collective,
    Level.SITE: check_site_tools,
}


def run_preflight(request: PreflightRequest) -> list[Finding]:
    """Look at a node, level by level; the first level with an error is the last one that is tried."""
    findings: list[Finding] = []
    for level, check in _LEVELS.items():
        if level not in request.levels:
            continue
        findings += check(request)
        if any(finding.severity is Severity.ERROR for finding in findings):
            break
    return findings


def require_ready(request: PreflightRequest) -> list[Finding]:
    """Return what is worth knowing of a node that can start.

    Raises: CheckRefused (exit code 76) naming everything that forbids it, each with its code; Interrupted
        (75) if only other nodes are at fault: this one need not be excluded, and the job can start again.
    """
    found = run_preflight(request)
    errors = [finding for finding in found if finding.severity is Severity.ERROR]
    others = set() if request.group is None else {*request.group.names} - {request.group.name}
    if errors and all(finding.where in others for finding in errors):
        raise Interrupted("\n".join(f"{finding.code}: {finding}" for finding in errors))
    return require_none(found)
