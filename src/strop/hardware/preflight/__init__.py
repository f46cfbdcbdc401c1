"""Check that this node meets the requirements of a run, before anything is started.

Level a reads (under a second), b multiplies on each GPU (about ten). `run_preflight` returns the problems;
`require_ready` refuses with exit code 76, for a fault of the node, so that it is excluded, or of the job. The
checks can be tried without a GPU: `PreflightRequest.device`.
"""

from strop.hardware.findings import Finding, Severity
from strop.hardware.preflight.checks import require_ready, run_preflight
from strop.hardware.preflight.request import Level, PreflightRequest

__all__ = [
    "Finding",
    "Level",
    "PreflightRequest",
    "Severity",
    "require_ready",
    "run_preflight",
]
