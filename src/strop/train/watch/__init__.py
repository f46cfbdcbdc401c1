"""What watches a run while it trains: bounds on a step, trends, replies, and the process itself."""

from strop.train.watch.process import DiskWatch, LoopLagWatch, Watchdog, full_collections_by_hand
from strop.train.watch.trends import find_divergence
from strop.train.watch.tripwires import CauseLog, StepWatch, find_fate_leak, find_impossible_rollouts

__all__ = [
    "CauseLog",
    "DiskWatch",
    "LoopLagWatch",
    "StepWatch",
    "Watchdog",
    "find_divergence",
    "find_fate_leak",
    "find_impossible_rollouts",
    "full_collections_by_hand",
]
