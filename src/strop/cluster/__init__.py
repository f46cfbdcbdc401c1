"""Placements: they start the roles of a run, connect them, and stop them all.

A role is the policy's learner or an engine. `inline` keeps both in one process over one set of weights; `ray`
makes every role an actor, on this machine or on all nodes of a job. The loop gets the same `Roles` from each
and cannot tell them apart.
Placements import torch; import them by path, or let `contract.build_placement` do it.
"""

from strop.cluster.contract import LearnerRole, Roles

__all__ = ["LearnerRole", "Roles"]
