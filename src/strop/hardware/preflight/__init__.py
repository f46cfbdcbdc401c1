"""Whether this node can do what a run asks of it, looked at before anything is started.

Level a reads (under a second), b multiplies on each GPU (about ten), c reduces over all nodes, d asks the
site's own tools. `run_preflight` returns what is wrong; `require_ready` refuses with 76, or with 75 where
only another node is at fault, so that exactly the bad ones are excluded. The checks themselves can be
tried without a GPU: `PreflightRequest.device`.
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
