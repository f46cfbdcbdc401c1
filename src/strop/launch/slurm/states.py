"""What Slurm's states mean here. A name that this table lacks is `unknown`, which ends nothing.

A job has one base state and any number of flags. Up to 23.02 Slurm says the most telling of them as one
word; later it lists them all, and they are reduced here as Slurm's own `job_state_string` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.launch.contract import JobState

_SHORT = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RD": "RESV_DEL_HOLD",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "TO": "TIMEOUT",
}
# In the order in which Slurm itself lets them hide the base state.
_FLAGS = (
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING"),
)
# Flags of newer versions that say nothing about whether a job lives.
_SILENT = frozenset({"LAUNCH_FAILED", "UPDATE_DB", "POWER_UP_NODE", "EXPEDITING"})
_FAILURES = {
    "NODE_FAIL": "a node was lost",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "out of memory",
    "DEADLINE": "its deadline passed",
}
_BROKEN_DEPENDENCY = "DependencyNeverSatisfied"
_PREEMPTION_SETTLES_S = 60.0
"""A job that waits again after a preemption shows PREEMPTED for a moment only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenState:
    """What one query said of one job, as it said it."""

    names: tuple[str, ...]
    """States and flags, long or short."""
    reason: str = ""
    num_restarts: int = 0
    exit_code: int | None = None
    exit_signal: int | None = None
    nodes: str = ""
    may_requeue: bool | None = None
    """Whether Slurm may start it again; None where the query does not say."""
    ended_ago_s: float | None = None

    @property
    def raw(self) -> str:
        """The words of the answer, unchanged."""
        return "+".join(self.names)


def read_state(seen: SeenState) -> tuple[JobState, str]:
    """Return what a job's state means, and why it is so in Slurm's words or ours.

    A job that is COMPLETING still lives: it is running until Slurm says how it ended.
    """
    name = _main_name(seen.names)
    why = "" if seen.reason in ("", "None") else seen.reason
    if name in ("PENDING", "REQUEUED", "REQUEUE_FED"):
        return _read_waiting(name, why, seen)
    if name in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"):
        return JobState.QUEUED, f"held: {why or name}"
    if name == "COMPLETING" and "PENDING" in _long_names(seen.names):
        return JobState.PREEMPTED, why
    if name in ("FAILED", *_FAILURES):
        return JobState.FAILED, _explain_failure(name, why, seen)
    if name == "PREEMPTED":
        is_over = seen.may_requeue is False or (seen.ended_ago_s or 0.0) > _PREEMPTION_SETTLES_S
        return (JobState.FAILED, "preempted, and not started again") if is_over else (JobState.PREEMPTED, why)
    plain = {
        "CONFIGURING": (JobState.STARTING, why),
        "RUNNING": (JobState.RUNNING, why),
        "COMPLETING": (JobState.RUNNING, "ending"),
        "SUSPENDED": (JobState.RUNNING, "suspended"),
        "STOPPED": (JobState.RUNNING, "suspended"),
        "COMPLETED": (JobState.SUCCEEDED, ""),
        "CANCELLED": (JobState.CANCELLED, why),
        "TIMEOUT": (JobState.TIMEOUT, "its time limit ended it"),
    }
    return plain.get(name, (JobState.UNKNOWN, why))


def _main_name(names: Sequence[str]) -> str:
    """Reduce a base state and its flags to one name; a name that nobody knows stays, and wins."""
    words = [word for word in _long_names(names) if word not in _SILENT]
    strange = [word for word in words if word not in _SHORT.values()]
    flags = [flag for flag in _FLAGS if flag in words]
    return (strange or flags or words or [""])[0]


def _long_names(names: Sequence[str]) -> list[str]:
    # sacct says who cancelled: "CANCELLED by 1000".
    words = [re.sub(r" by \d+$", "", name.strip()).upper().removesuffix("+") for name in names]
    return [_SHORT.get(word, word) for word in words]


def _read_waiting(name: str, why: str, seen: SeenState) -> tuple[JobState, str]:
    if why.startswith(_BROKEN_DEPENDENCY):
        return JobState.FAILED, f"dependency: {why}"
    if why.startswith(("JobHeld", "job requeued in held state")):
        return JobState.QUEUED, f"held: {why}"
    # Preemption, node loss and a job that requeued itself look alike from outside.
    if seen.num_restarts or name != "PENDING":
        return JobState.PREEMPTED, why
    return JobState.QUEUED, why


def _explain_failure(name: str, why: str, seen: SeenState) -> str:
    said = _FAILURES.get(name, "")
    if name == "FAILED":
        said = _explain_exit(seen.exit_code, seen.exit_signal, why)
    elif why:
        said = f"{said} ({why})"
    return f"{said} on {seen.nodes}" if seen.nodes and name != "FAILED" else said


def _explain_exit(code: int | None, number: int | None, why: str) -> str:
    # The same reason stands where a log's folder is missing (0:53) and where a signal ended the batch shell.
    if number == 53 and not code:
        return (
            f"could not start: its log's folder is missing or not writable ({why or 'JobLaunchFailure'} 0:53)"
        )
    if number:
        return f"signal {number}"
    if code == 75:
        return "exit 75: saved, and not started again"
    if code == 76:
        return "exit 76: preflight"
    if code:
        return f"signal {code - 128}" if code > 128 else f"exit {code}"
    return why
