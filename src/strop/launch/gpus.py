"""The state of a running job's GPUs: written by the agent of each node, read from the run's record.

    attempts/<attempt>/gpus-<node>.json     the job's GPUs on the node, every few seconds

A GPU is `busy` if it computes, `waiting` if a process of the job holds it without computing, `idle` if no
process holds it, and `held` if a process of another job does, which is named with its user. It is `held` too
if no visible process accounts for its used memory, which a dead one may have left.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import StoreError
from strop.hardware.allocation import Allocation
from strop.hardware.gpus import Gpu, GpuUser, read_gpu_users, read_gpu_work, read_gpus
from strop.io.atomic import write_bytes_atomically
from strop.launch.job_dir import ATTEMPTS_FOLDER
from strop.launch.logs import number_of
from strop.record.files import RecordFiles

WRITE_EVERY_S = 10.0
_NAME = re.compile(rf"{ATTEMPTS_FOLDER}/(?P<attempt>[^/]+)/gpus-(?P<node>\d+)\.json")
_BUSY_FRAC = 0.05
_UNSEEN_BYTES = 1 << 30
"""More used memory than this without a process counts as held: a driver alone uses less."""
_STALE_S = 60.0
_TRACES = ("rollouts", "metrics.jsonl", "events.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    """One GPU of a running job."""

    node: int
    host: str
    index: str
    uuid: str
    name: str
    role: str
    """`ROLE/part` of the job, such as train/infer."""
    state: str
    """busy, waiting, idle, held or unknown."""
    work_frac: float | None
    """Share of about the last second in which it computed; None if the driver does not report it."""
    used_bytes: int | None
    memory_bytes: int | None
    holders: tuple[str, ...]
    """Descriptions of processes of other jobs."""
    age_s: float
    """Age of these values."""
    trace_age_s: float | None
    """Age of the run's newest trace at that time; None if there was none, or on another node than 0."""


@contextmanager
def watch_gpus(
    attempt_path: Path, node: int, allocation: Allocation, lease_id: str, *, every_s: float = WRITE_EVERY_S
) -> Iterator[None]:
    """Write the state of the job's GPUs on this node during a block; do nothing if it has none here."""
    path, run_path = attempt_path / f"gpus-{node}.json", attempt_path.parent.parent
    roles = {uuid: name for name, role in allocation.roles.items() for uuid in role.uuids}
    is_done = threading.Event()

    def write_all() -> None:
        while not is_done.is_set():
            users, work = read_gpu_users(), read_gpu_work()
            rows = []
            for gpu in read_gpus():
                names = (gpu.uuid, *(part.uuid for part in gpu.slices))
                if role := next((roles[uuid] for uuid in names if uuid in roles), None):
                    of_gpu = [user for user in users if user.gpu_uuid in names]
                    rows.append(_describe(gpu, role, of_gpu, work.get(gpu.uuid), lease_id))
            content = {
                "at": time.time(),
                "node": node,
                "host": socket.gethostname(),
                "traced_at": _newest_trace(run_path) if node == 0 else None,
                "gpus": rows,
            }
            # A full disk is reported by writers that depend on it.
            with suppress(OSError, StoreError):
                if not is_done.is_set():
                    write_bytes_atomically(path, json.dumps(content).encode())
            is_done.wait(every_s)

    if roles:
        # nvidia-smi may hang for seconds, and the agent must react to signals.
        threading.Thread(target=write_all, name="strop-gpu-watch", daemon=True).start()
    try:
        yield
    finally:
        # A running query is not waited for.
        is_done.set()


def _describe(
    gpu: Gpu, role: str, users: list[GpuUser], work_frac: float | None, lease_id: str
) -> dict[str, Any]:
    foreign = [str(user) for user in users if user.lease_id != lease_id]
    if foreign:
        state = "held"
    elif work_frac is not None and work_frac >= _BUSY_FRAC:
        state = "busy"
    elif users:
        state = "waiting"
    elif (gpu.used_bytes or 0) > _UNSEEN_BYTES:
        state = "held"
        foreign = ["memory that no visible process accounts for"]
    else:
        state = "idle"
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "role": role,
        "state": state,
        "work_frac": work_frac,
        "used_bytes": gpu.used_bytes,
        "memory_bytes": gpu.memory_bytes,
        "holders": foreign,
    }


def _newest_trace(run_path: Path) -> float | None:
    times = []
    for path in (run_path / name for name in _TRACES):
        # The time of a folder is when its newest file was added.
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def read_gpu_rows(record: RecordFiles, *, now: float) -> list[GpuRow]:
    """Return the GPUs of a trial's newest attempt, node by node; empty if nothing was written.

    `now`: Unix seconds. After a minute without an update a state is `unknown`.
    Raises: StoreError if the record cannot be read.
    """
    matches = [match for name in record.list(ATTEMPTS_FOLDER) if (match := _NAME.fullmatch(name))]
    newest = max((match["attempt"] for match in matches), key=number_of, default=None)
    rows: list[GpuRow] = []
    for match in sorted(matches, key=lambda match: int(match["node"])):
        data = record.read(match[0]) if match["attempt"] == newest else None
        if data is None:
            continue
        content = json.loads(data)
        age_s, traced_at = max(0.0, now - content["at"]), content["traced_at"]
        of_node = {
            "node": content["node"],
            "host": content["host"],
            "age_s": age_s,
            "trace_age_s": None if traced_at is None else max(0.0, content["at"] - traced_at),
        }
        for gpu in content["gpus"]:
            state = gpu["state"] if age_s < _STALE_S else "unknown"
            rows.append(GpuRow(**{**gpu, **of_node, "holders": tuple(gpu["holders"]), "state": state}))
    return rows
