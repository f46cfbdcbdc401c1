"""Check that this node meets the requirements of a run, before anything is started.

Level a reads (under a second), b multiplies on each GPU (about ten), c reduces over all nodes, d runs the
site's own tools. `run_preflight` returns the problems; `require_ready` refuses with exit code 76, for a fault
of the node or of the job, or with 75 if only another node is at fault, so that exactly the bad nodes are
excluded. The checks can be tried without a GPU: `PreflightRequest.device`.
"""

from strop.hardware.findings import Finding, Severity
from strop.hardware.preflight.checks import require_ready, run_preflight
from strop.hardware.preflight.request import Level, NodeGroup, PreflightRequest

__all__ = [
    "Finding",
    "Level",
    "NodeGroup",
    "PreflightRequest",
    "Severity",
    "require_ready",
    "run_preflight",
]
