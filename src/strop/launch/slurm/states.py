"""Read the output of Slurm's programs into one form, and interpret its states.

A job has one base state and any number of flags. Up to 23.02 Slurm prints the most important one as one word;
later versions list them all, and they are reduced here as Slurm's `job_state_string` does. A state that is
not in the table is `unknown`, which ends nothing. JSON of every version since 21.08 is read, and plain fields
of earlier ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.launch.contract import JobState

# Numbers of 22.05 are numbers or null; since 23.02 they are `{"set": true, "infinite": false, "number": 7}`.
# `job_state` is a word, and since 23.11 a list of words. Unreadable jobs are left out and never get a state.
# Formats: `squeue`, `sacct` and `scontrol` manuals.

FIELD, RECORD = "\x1f", "\x1e"
"""Separators of fields and jobs in the output of `squeue`: names and paths may hold anything else."""

PLAIN_FORMAT = RECORD + FIELD.join(("%i", "%A", "%T", "%r", "%N", "%V", "%j", "%Z", "%k"))
"""For `squeue -o`; the columns are the same in every version."""

ACCOUNTING_FIELDS = ("JobID", "State", "ExitCode", "NodeList")
"""For `sacct -P -o`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedJob:
    """A job, or a component of a heterogeneous one, in the reply to a query."""

    base_id: str
    """The id that `sbatch` printed: of the array, of the first component, or of the job."""
    own_id: str
    tasks: tuple[int, ...]
    """Array tasks that the entry covers; (0,) without an array."""
    state: ReportedState
    component: int = 0
    """Offset in a heterogeneous job."""
    name: str = ""
    comment: str = ""
    work_path: str = ""
    submitted_at: float = 0.0
    """Unix seconds; 0 if the reply lacks it."""
    since: float | None = None


def read_json(text: str, *, now: float) -> list[ReportedJob] | None:
    """Read `squeue --json`; None if the text is not such a reply. Unreadable jobs are left out."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    jobs = document.get("jobs") if isinstance(document, dict) else None
    # Without a controller 22.05 prints an error and no jobs, and exits with 0: that list is no reply.
    if not isinstance(jobs, list) or document.get("errors"):
        return None
    return [parsed for job in jobs if isinstance(job, dict) and (parsed := _read_job(job, now)) is not None]


def read_plain(text: str) -> list[ReportedJob]:
    """Read `squeue -h -o PLAIN_FORMAT`, which lacks the number of restarts."""
    jobs = []
    for record in text.split(RECORD)[1:]:
        fields = record.removesuffix("\n").split(FIELD)
        if len(fields) != 9:
            continue
        shown, own_id, state, reason, nodes, submitted, name, work_path, comment = fields
        place = _parse_shown_id(shown)
        if place is None or not state:
            continue
        base_id, tasks, component = place
        jobs.append(
            ReportedJob(
                base_id=base_id,
                own_id=own_id,
                tasks=tasks,
                component=component,
                state=ReportedState(names=(state,), reason=reason, nodes=nodes),
                name=name,
                comment="" if comment == "(null)" else comment,
                work_path=work_path,
                submitted_at=_parse_local_time(submitted),
            )
        )
    return jobs


def read_restarts(text: str) -> dict[str, ReportedState]:
    """Read `scontrol show job -o` into job id to state, with restarts and exit code."""
    states = {}
    for line in text.splitlines():
        values = dict(
            re.findall(r"(?<!\S)(JobId|JobState|Reason|Restarts|ExitCode|NodeList|Requeue)=(\S*)", line)
        )
        if not {"JobId", "JobState", "Restarts"} <= values.keys() or not values["Restarts"].isdigit():
            continue
        code, number = _parse_exit(values.get("ExitCode", ""))
        states[values["JobId"]] = ReportedState(
            names=(values["JobState"],),
            reason=values.get("Reason", ""),
            num_restarts=int(values["Restarts"]),
            exit_code=code,
            exit_signal=number,
            nodes="" if values.get("NodeList") == "(null)" else values.get("NodeList", ""),
            may_requeue=None if "Requeue" not in values else values["Requeue"] == "1",
        )
    return states


def add_restarts(jobs: list[ReportedJob], states: Mapping[str, ReportedState]) -> list[ReportedJob]:
    """Return jobs of `read_plain` with the states of `read_restarts`."""
    return [replace(job, state=states[job.own_id]) if job.own_id in states else job for job in jobs]


def read_accounting(text: str) -> list[ReportedJob]:
    """Read `sacct -X -n -P` of ACCOUNTING_FIELDS: the last run of each job."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|")
        place = _parse_shown_id(fields[0])
        if len(fields) != len(ACCOUNTING_FIELDS) or place is None or not fields[1]:
            continue
        base_id, tasks, component = place
        code, number = _parse_exit(fields[2])
        nodes = "" if fields[3] == "None assigned" else fields[3]
        state = ReportedState(names=(fields[1],), exit_code=code, exit_signal=number, nodes=nodes)
        jobs.append(
            ReportedJob(base_id=base_id, own_id=fields[0], tasks=tasks, component=component, state=state)
        )
    return jobs


def _read_job(job: Mapping[str, Any], now: float) -> ReportedJob | None:
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
    state = ReportedState(
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
    return ReportedJob(
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
    """Read a number in the form of any version; None if it is not set or infinite."""
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
    """Read an exit code: a raw wait status up to 22.05, later an object with code and signal."""
    if isinstance(value, Mapping) and "return_code" in value:
        signal = value.get("signal")
        number = None
        if isinstance(signal, Mapping):
            number = _number(signal.get("id", signal.get("signal_id")))
        return _number(value["return_code"]), number or None
    status = _number(value)
    if status is None:
        return None, None
    # As in WIFSIGNALED: with a signal the higher bits are no exit code.
    return (0, status & 0x7F) if status & 0x7F else (status >> 8, None)


_SHOWN_ID = re.compile(r"(?P<base>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\])|\+(?P<component>\d+))?$")


def _parse_shown_id(text: str) -> tuple[str, tuple[int, ...], int] | None:
    """Read `7`, `7_2`, `7_[2-3%2]` or `7+1` as base id, array tasks and component."""
    match = _SHOWN_ID.match(text.strip())
    if match is None:
        return None
    tasks: tuple[int, ...] | None = (int(match["task"] or 0),)
    if match["tasks"] is not None:
        tasks = _expand(match["tasks"])
    return None if tasks is None else (match["base"], tasks, int(match["component"] or 0))


def _expand(text: str) -> tuple[int, ...] | None:
    """Return the numbers of `1,4-6:2%3`; None for another form, or a text cut short by `...`."""
    numbers: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None:
            return None
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        numbers.extend(range(first, last + 1, max(1, step)))
    return tuple(numbers)


def _parse_exit(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(match[1]), int(match[2]) or None) if match else (None, None)


def _parse_local_time(text: str) -> float:
    from datetime import datetime

    try:
        # Slurm prints local time, which on a login node is the local time of this process.
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return 0.0


def tasks_by_number(jobs: list[ReportedJob]) -> Iterator[tuple[tuple[str, int], ReportedJob]]:
    """Yield each job once for each array task that it covers, with base id and task."""
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
# Flags of newer versions that say nothing about whether a job is running.
_SILENT = frozenset({"LAUNCH_FAILED", "UPDATE_DB", "POWER_UP_NODE", "EXPEDITING"})
_FAILURES = {
    "NODE_FAIL": "a node was lost",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "out of memory",
    "DEADLINE": "its deadline passed",
}
_BROKEN_DEPENDENCY = "DependencyNeverSatisfied"
_PREEMPTION_SETTLES_S = 60.0
"""A job that is requeued after a preemption shows PREEMPTED only for a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedState:
    """The unchanged state of one job in one reply."""

    names: tuple[str, ...]
    """States and flags, long or short."""
    reason: str = ""
    num_restarts: int = 0
    exit_code: int | None = None
    exit_signal: int | None = None
    nodes: str = ""
    may_requeue: bool | None = None
    """Whether Slurm may requeue the job; None if the reply lacks it."""
    ended_ago_s: float | None = None

    @property
    def raw(self) -> str:
        """The states and flags of the reply, unchanged."""
        return "+".join(self.names)


def read_state(job_state: ReportedState) -> tuple[JobState, str]:
    """Return a job's state for strop, and the reason in Slurm's words or strop's.

    A job that is COMPLETING is still running until Slurm reports its end.
    """
    # Reduce the base state and its flags to one name; an unknown name takes precedence.
    words = [word for word in _long_names(job_state.names) if word not in _SILENT]
    strange = [word for word in words if word not in _SHORT.values()]
    flags = [flag for flag in _FLAGS if flag in words]
    name = (strange or flags or words or [""])[0]
    why = "" if job_state.reason in ("", "None") else job_state.reason
    if name in ("PENDING", "REQUEUED", "REQUEUE_FED"):
        return _read_waiting(name, why, job_state)
    if name in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"):
        return JobState.QUEUED, f"held: {why or name}"
    if name == "COMPLETING" and "PENDING" in _long_names(job_state.names):
        return JobState.PREEMPTED, why
    if name in ("FAILED", *_FAILURES):
        lost = _FAILURES.get(name, "") + (f" ({why})" if why else "")
        lost += f" on {job_state.nodes}" if job_state.nodes else ""
        return JobState.FAILED, lost if name in _FAILURES else _explain_exit(job_state, why)
    if name == "PREEMPTED":
        is_over = job_state.may_requeue is False or (job_state.ended_ago_s or 0.0) > _PREEMPTION_SETTLES_S
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
    # sacct appends the user who cancelled: "CANCELLED by 1000".
    words = [re.sub(r" by \d+$", "", name.strip()).upper().removesuffix("+") for name in names]
    return [_SHORT.get(word, word) for word in words]


def _read_waiting(name: str, why: str, job_state: ReportedState) -> tuple[JobState, str]:
    if why.startswith(_BROKEN_DEPENDENCY):
        return JobState.FAILED, f"dependency: {why}"
    if why.startswith(("JobHeld", "job requeued in held state")):
        return JobState.QUEUED, f"held: {why}"
    # Preemption, node loss and a job that requeued itself look alike from outside.
    if job_state.num_restarts or name != "PENDING":
        return JobState.PREEMPTED, why
    return JobState.QUEUED, why


def _explain_exit(job_state: ReportedState, why: str) -> str:
    code, number = job_state.exit_code, job_state.exit_signal
    # Slurm gives the same reason for a missing log folder (0:53) and for a batch shell ended by a signal.
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
