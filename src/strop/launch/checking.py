"""What would stop a job, found by reading alone: room for its home, and what its backend sees."""

from __future__ import annotations

from pathlib import Path

from strop.hardware import free_disk_bytes
from strop.hardware.findings import Finding, Severity
from strop.launch.contract import Backend, JobPlan

MIN_FREE_BYTES = 1 << 30


def check_plan(backend: Backend, plan: JobPlan) -> list[Finding]:
    """Return what would stop the job, reading only; the worst first."""
    found = [*_check_disk(Path(plan.home)), *backend.probe(plan)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _check_disk(home: Path) -> list[Finding]:
    """Look for room where the job's home will be."""
    free_bytes = free_disk_bytes(home)
    if free_bytes >= MIN_FREE_BYTES:
        return []
    return [
        Finding(
            code="disk",
            given=f"{home}: {free_bytes / 1e9:.2f} GB are free",
            allowed=f"{MIN_FREE_BYTES / 1e9:.1f} GB or more for logs and checkpoints",
            next_step="free some, or name another output.root",
        )
    ]
