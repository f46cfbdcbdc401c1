"""What a node's agent tells the roles that it starts, by environment variables of these names."""

from __future__ import annotations

from collections.abc import Mapping

NODE_VARIABLE = "STROP_NODE"
"""Which node of its attempt a role is on, from 0."""
NUM_NODES_VARIABLE = "STROP_NUM_NODES"
ADDRESS_VARIABLE = "STROP_NODE_ADDRESS"
"""Of node 0, as the other nodes reach it."""
NAMES_VARIABLE = "STROP_JOB_NAMES"
"""Names of the job's variables and secrets, with commas: every process of the run must have them."""


def count_nodes(environ: Mapping[str, str]) -> int:
    """Return how many nodes this process's job has; 1 outside of one."""
    return int(environ.get(NUM_NODES_VARIABLE, "1"))
