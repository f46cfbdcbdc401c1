"""RL algorithms: advantages, losses, group filters and off-policy corrections.

Pure functions; an algorithm is a record that names four of them (`catalog.py`), and `building.py` puts a
run's settings in it. Credit is numpy in float64, computed once per batch. Losses take and return tensors
through their methods, so this room imports no torch. Every formula is fixed by docs/notation.md and tested
against cases by hand. Left out on purpose: the loop, the model, and everything that needs more than one
forward.
"""

from strop.algorithm.advantages import Aggregation
from strop.algorithm.building import build_algorithm
from strop.algorithm.catalog import ALGORITHMS, Algorithm
from strop.algorithm.credit import Credit, assign_credit, needs_replacement
from strop.algorithm.losses import TokenLoss

__all__ = [
    "ALGORITHMS",
    "Aggregation",
    "Algorithm",
    "Credit",
    "TokenLoss",
    "assign_credit",
    "build_algorithm",
    "needs_replacement",
]
