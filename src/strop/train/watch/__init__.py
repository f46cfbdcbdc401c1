"""What watches a run while it trains: bounds on a step, trends, replies, and the process itself.

What looks at tensors is imported by path: `tripwires`.
"""

from strop.train.watch.process import DiskWatch, LoopLagWatch, Watchdog, full_collections_by_hand
from strop.train.watch.trends import find_divergence

__all__ = [
    "DiskWatch",
    "LoopLagWatch",
    "Watchdog",
    "find_divergence",
    "full_collections_by_hand",
]
