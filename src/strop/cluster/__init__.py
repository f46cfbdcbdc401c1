"""Who runs where: starting the roles of a run, connecting them, and stopping them all.

A role is the policy's learner or an engine. `inline` keeps both in one process over one set of
weights; `process` puts the engine into a process of its own and sends weights by file. The loop
gets the same `Roles` from either and cannot tell which it has: this is the only room that knows.
Placements import torch; import them by path, or let `contract.build_placement` do it.
"""

from strop.cluster.contract import LearnerRole, Placement, Publisher, Roles, Scorer

__all__ = ["LearnerRole", "Placement", "Publisher", "Roles", "Scorer"]
