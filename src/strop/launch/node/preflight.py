"""What is checked on a node before the run begins there: a refusal costs seconds, a bad node the night."""

from __future__ import annotations

from collections.abc import Callable

from strop.hardware import require_free_disk, require_writable
from strop.hardware.allocation import Allocation
from strop.launch.jobs.contract import JobPlan
from strop.launch.node.task import NodeTask

MIN_FREE_BYTES = 256 << 20
"""Of the run's disk: less would not hold the logs of the attempt."""


def check_node(plan: JobPlan, task: NodeTask, allocation: Allocation, say: Callable[[str], None]) -> None:
    """Check that this node can do what the plan asks of it.

    Raises: CheckRefused naming what is missing (exit code 76); StoreError if the run's folder fails.
    """
    require_writable(task.member_path, "the run's directory")
    require_free_disk(task.member_path, MIN_FREE_BYTES, "the logs of this attempt")
