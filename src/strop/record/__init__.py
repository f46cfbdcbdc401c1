"""The record of a run: its directory, its metrics, its events and its rollouts.

`RunDir` fixes the layout and holds the lock; `find_resumable` finds the run to continue.
`MetricsLog` and `EventLog` append lines that survive a kill and can be cut back for a resume.
Rollouts as Parquet are in `strop.record.rollouts`, which needs pyarrow and is imported by path.
Not here: checkpoints' content (policy), reports (view), other places than this disk (store).
"""

from strop.record.events import Event, EventKind, EventLog, MetricsLog
from strop.record.run_dir import Attempt, RunDir, RunState, find_resumable, list_runs, point_latest

__all__ = [
    "Attempt",
    "Event",
    "EventKind",
    "EventLog",
    "MetricsLog",
    "RunDir",
    "RunState",
    "find_resumable",
    "list_runs",
    "point_latest",
]
