"""The output of Slurm's programs read into one form, and what its states mean.

A job has one base state and any number of flags. Up to 23.02 Slurm prints the most telling of them as one
word; later it lists them all, and they are reduced here as Slurm's own `job_state_string` does. A state
that is not in the table is `unknown`, which ends nothing. JSON of every shape since 21.08 is read, and
plain fields before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.launch.contract import JobState

# Numbers of 22.05 are numbers, or null; from 23.02 on they are `{"set": true, "infinite": false, "number":
# 7}`. `job_state` is a word, and from 23.11 on a list of words. What cannot be read is left out; it never
# becomes a state. Formats: `squeue`, `sacct` and `scontrol` manuals.

FIELD, RECORD = "\x1f", "\x1e"
"""What `squeue` prints between fields and before each job: names and paths may hold anything else."""

PLAIN_FORMAT = RECORD + FIELD.join(("%i", "%A", "%T", "%r", "%N", "%V", "%j", "%Z", "%k"))
"""For `squeue -o`; its columns mean the same in every version."""

ACCOUNTING_FIELDS = ("JobID", "State", "ExitCode", "NodeList")
"""For `sacct -P -o`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenJob:
    """One job, or one component of one, as a query showed it."""

    base_id: str
    """What `sbatch` printed: the id of an array, of the first component, or its own."""
    own_id: str
    tasks: tuple[int, ...]
    """Array tasks that it stands for; (0,) without an array."""
    state: SeenState
    component: int = 0
    """Offset in a heterogeneous job."""
    name: str = ""
    comment: str = ""
    work_path: str = ""
    submitted_at: float = 0.0
    """Unix seconds; 0 where the query does not say."""
    since: float | None = None


def read_json(text: str, *, now: float) -> list[SeenJob] | None:
    """Read `squeue --json`; None if it is no such answer. What cannot be read is left out."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    jobs = document.get("jobs") if isinstance(document, dict) else None
    # Without a controller 22.05 prints an error, no jobs, and exits with 0: an empty list is then no answer.
    if not isinstance(jobs, list) or document.get("errors"):
        return None
    return [seen for job in jobs if isinstance(job, dict) and (seen := _read_job(job, now)) is not None]


def read_plain(text: str) -> list[SeenJob]:
    """Read `squeue -h -o PLAIN_FORMAT`. It does not say how often a job was started again."""
    found = []
    for record in text.split(RECORD)[1:]:
        fields = record.removesuffix("\n").split(FIELD)
        if len(fields) != 9:
            continue
        shown, own_id, state, reason, nodes, submitted, name, work_path, comment = fields
        place = _parse_shown_id(shown)
        if place is None or not state:
            continue
        base_id, tasks, component = place
        found.append(
            SeenJob(
                base_id=base_id,
                own_id=own_id,
                tasks=tasks,
                component=component,
                state=SeenState(names=(state,), reason=reason, nodes=nodes),
                name=name,
                comment="" if comment == "(null)" else comment,
                work_path=work_path,
                submitted_at=_parse_local_time(submitted),
            )
        )
    return found


def read_restarts(text: str) -> dict[str, SeenState]:
    """Read `scontrol show job -o`: by a job's own id, its state with restarts and exit code."""
    found = {}
    for line in text.splitlines():
        values = dict(
            re.findall(r"(?<!\S)(JobId|JobState|Reason|Restarts|ExitCode|NodeList|Requeue)=(\S*)", line)
        )
        if not {"JobId", "JobState", "Restarts"} <= values.keys() or not values["Restarts"].isdigit():
            continue
        code, number = _parse_exit(values.get("ExitCode", ""))
        found[values["JobId"]] = SeenState(
            names=(values["JobState"],),
            reason=values.get("Reason", ""),
            num_restarts=int(values["Restarts"]),
            exit_code=code,
            exit_signal=number,
            nodes="" if values.get("NodeList") == "(null)" else values.get("NodeList", ""),
            may_requeue=None if "Requeue" not in values else values["Requeue"] == "1",
        )
    return found


def add_restarts(jobs: list[SeenJob], known: Mapping[str, SeenState]) -> list[SeenJob]:
    """Return jobs of `read_plain` with the states of `read_restarts`."""
    return [replace(job, state=known[job.own_id]) if job.own_id in known else job for job in jobs]


def read_accounting(text: str) -> list[SeenJob]:
    """Read `sacct -X -n -P` of ACCOUNTING_FIELDS: the last run of each job."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")
        place = _parse_shown_id(fields[0])
        if len(fields) != len(ACCOUNTING_FIELDS) or place is None or not fields[1]:
            continue
        base_id, tasks, component = place
        code, number = _parse_exit(fields[2])
        nodes = "" if fields[3] == "None assigned" else fields[3]
        state = SeenState(names=(fields[1],), exit_code=code, exit_signal=number, nodes=nodes)
        found.append(
            SeenJob(base_id=base_id, own_id=fields[0], tasks=tasks, component=component, state=state)
        )
    return found


def _read_job(job: Mapping[str, Any], now: float) -> SeenJob | None:
    own_id = _number(job.get("job_id"))
    states = job.get("job_state")
    names = (states,) if isinstance(states, str) else tuple(states) if isinstance(states, list) else ()
    if own_id is None or not names or not all(isinstance(name, str) and name for name in names):
        return None
    code, number = _exit_of(job.get("exit_code"))
    ended_at = _number(job.get("end_time"))
    array_id = _number(job.get("array_job_id")) or 0
    leader_id = _number(job.get("het_job_id")) or 0
    tasks: tuple[int, ...] | None = (0,)
    if array_id:
        waiting, task = _text(job.get("array_task_string")), _number(job.get("array_task_id"))
        tasks = _expand(waiting) if waiting else None if task is None else (task,)
    if tasks is None:
        return None
    state = SeenState(
        names=names,
        reason=_text(job.get("state_reason")),
        num_restarts=_number(job.get("restart_cnt")) or 0,
        exit_code=code,
        exit_signal=number,
        nodes=_text(job.get("nodes")),
        may_requeue=job.get("requeue") if isinstance(job.get("requeue"), bool) else None,
        ended_ago_s=now - ended_at if ended_at else None,
    )
    since_key = {"PENDING": "submit_time", "RUNNING": "start_time"}.get(names[0], "end_time")
    since = _number(job.get(since_key))
    return SeenJob(
        base_id=str(array_id or leader_id or own_id),
        own_id=str(own_id),
        tasks=tasks,
        component=(_number(job.get("het_job_offset")) or 0) if leader_id else 0,
        state=state,
        name=_text(job.get("name")),
        comment=_text(job.get("comment")),
        work_path=_text(job.get("current_working_directory")),
        submitted_at=float(_number(job.get("submit_time")) or 0),
        since=float(since) if since else None,
    )


def _number(value: Any) -> int | None:
    """Read a number of any version; None where it is not set, or infinite."""
    if isinstance(value, Mapping):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    if isinstance(value, Mapping):  # `comment` of some versions: {"job": "...", "administrator": "..."}
        value = value.get("job")
    return value if isinstance(value, str) else ""


def _exit_of(value: Any) -> tuple[int | None, int | None]:
    """Read an exit code: a raw wait status up to 22.05, later an object that names code and signal."""
    if isinstance(value, Mapping) and "return_code" in value:
        named = value.get("signal")
        number = None
        if isinstance(named, Mapping):
            number = _number(named.get("id", named.get("signal_id")))
        return _number(value["return_code"]), number or None
    status = _number(value)
    if status is None:
        return None, None
    # As WIFSIGNALED reads it: the bits above the signal are then no exit code.
    return (0, status & 0x7F) if status & 0x7F else (status >> 8, None)


_SHOWN_ID = re.compile(r"(?P<base>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\])|\+(?P<component>\d+))?$")


def _parse_shown_id(text: str) -> tuple[str, tuple[int, ...], int] | None:
    """Read `7`, `7_2`, `7_[2-3%2]` or `7+1` as base id, array tasks and component."""
    found = _SHOWN_ID.match(text.strip())
    if found is None:
        return None
    tasks: tuple[int, ...] | None = (int(found["task"] or 0),)
    if found["tasks"] is not None:
        tasks = _expand(found["tasks"])
    return None if tasks is None else (found["base"], tasks, int(found["component"] or 0))


def _expand(text: str) -> tuple[int, ...] | None:
    """Return the numbers of `1,4-6:2%3`; None if it is something else, or cut short as by `...`."""
    numbers: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is None:
            return None
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        numbers.extend(range(first, last + 1, max(1, step)))
    return tuple(numbers)


def _parse_exit(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(found[1]), int(found[2]) or None) if found else (None, None)


def _parse_local_time(text: str) -> float:
    from datetime import datetime

    try:
        # Slurm prints the time of its own zone, which on a login node is ours.
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return 0.0


def tasks_by_number(jobs: list[SeenJob]) -> Iterator[tuple[tuple[str, int], SeenJob]]:
    """Yield each job once for each array task that it stands for, by base id and task."""
    for job in jobs:
        for task in job.tasks:
            yield (job.base_id, task), job


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
# Flags of newer versions that do not tell whether a job is running.
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
    """The state of one job in one reply, unchanged."""

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
    """Return what a job's state means, and the reason in Slurm's words or ours.

    A job that is COMPLETING is still running until Slurm reports how it ended.
    """
    # A base state and its flags reduced to one name; an unknown name takes precedence.
    words = [word for word in _long_names(seen.names) if word not in _SILENT]
    strange = [word for word in words if word not in _SHORT.values()]
    flags = [flag for flag in _FLAGS if flag in words]
    name = (strange or flags or words or [""])[0]
    why = "" if seen.reason in ("", "None") else seen.reason
    if name in ("PENDING", "REQUEUED", "REQUEUE_FED"):
        return _read_waiting(name, why, seen)
    if name in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"):
        return JobState.QUEUED, f"held: {why or name}"
    if name == "COMPLETING" and "PENDING" in _long_names(seen.names):
        return JobState.PREEMPTED, why
    if name in ("FAILED", *_FAILURES):
        lost = _FAILURES.get(name, "") + (f" ({why})" if why else "")
        lost += f" on {seen.nodes}" if seen.nodes else ""
        return JobState.FAILED, lost if name in _FAILURES else _explain_exit(seen, why)
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


def _long_names(names: Sequence[str]) -> list[str]:
    # sacct names who cancelled: "CANCELLED by 1000".
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


def _explain_exit(seen: SeenState, why: str) -> str:
    code, number = seen.exit_code, seen.exit_signal
    # Slurm gives the same reason if the log's folder is missing (0:53) and if a signal ended the batch shell.
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
