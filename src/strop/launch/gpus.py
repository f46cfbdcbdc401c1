"""What a running job's GPUs do: written by the agent of each node, read wherever the run's record is.

    attempts/<attempt>/gpus-<node>.json     the node's GPUs of this job, every few seconds

A GPU is `busy` where it computes, `waiting` where a process of the job holds it and it does not, `idle` where
nothing holds it. A process that is not the job's is `held`, named with its user; so is memory that no process
that can be seen accounts for, which one that has died may have left.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
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
"""Memory of a GPU without processes above which one is missed: a driver alone holds less."""
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
    """Share of the last second or so in which it computed; None where the driver does not say."""
    used_bytes: int | None
    memory_bytes: int | None
    holders: tuple[str, ...]
    """Processes that are not the job's, in words."""
    age_s: float
    """How old all this is."""
    trace_age_s: float | None
    """How old the newest trace of the run was at that time; None: there was none, or another node's."""


class GpuWatch:
    """Writes what this node's GPUs do while a block lasts; does nothing where the job has none here."""

    def __init__(
        self,
        attempt_path: Path,
        node: int,
        allocation: Allocation,
        lease_id: str,
        *,
        every_s: float = WRITE_EVERY_S,
    ) -> None:
        self._path = attempt_path / f"gpus-{node}.json"
        self._node, self._lease_id, self._every_s = node, lease_id, every_s
        self._run_path = attempt_path.parent.parent
        self._roles = {uuid: name for name, role in allocation.roles.items() for uuid in role.uuids}
        self._is_done = threading.Event()
        # nvidia-smi may hang for seconds, and the agent has signals to answer.
        self._thread = threading.Thread(target=self._write_all, name="strop-gpu-watch", daemon=True)

    def __enter__(self) -> GpuWatch:
        """Begin."""
        if self._roles:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; a question that is under way is not waited for."""
        self._is_done.set()

    def _write_all(self) -> None:
        while not self._is_done.is_set():
            users, work = read_gpu_users(), read_gpu_work()
            content = {
                "at": time.time(),
                "node": self._node,
                "host": socket.gethostname(),
                "traced_at": _newest_trace(self._run_path) if self._node == 0 else None,
                "gpus": [
                    self._describe(gpu, role, [one for one in users if one.gpu_uuid in _names(gpu)], work)
                    for gpu in read_gpus()
                    if (role := next((self._roles[one] for one in _names(gpu) if one in self._roles), None))
                ],
            }
            # A full disk is reported by those that cannot do without it.
            with suppress(OSError, StoreError):
                if not self._is_done.is_set():
                    write_bytes_atomically(self._path, json.dumps(content).encode())
            self._is_done.wait(self._every_s)

    def _describe(
        self, gpu: Gpu, role: str, users: list[GpuUser], work: Mapping[str, float]
    ) -> dict[str, Any]:
        foreign = [str(one) for one in users if one.lease_id != self._lease_id]
        frac = work.get(gpu.uuid)
        if foreign:
            state = "held"
        elif frac is not None and frac >= _BUSY_FRAC:
            state = "busy"
        elif users:
            state = "waiting"
        elif (gpu.used_bytes or 0) > _UNSEEN_BYTES:
            state = "held"
            foreign = ["memory that no process to be seen accounts for"]
        else:
            state = "idle"
        return {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "role": role,
            "state": state,
            "work_frac": frac,
            "used_bytes": gpu.used_bytes,
            "memory_bytes": gpu.memory_bytes,
            "holders": foreign,
        }


def _names(gpu: Gpu) -> tuple[str, ...]:
    return (gpu.uuid, *(part.uuid for part in gpu.slices))


def _newest_trace(run_path: Path) -> float | None:
    times = []
    for path in (run_path / name for name in _TRACES):
        # A folder's time is that of its newest file's arrival.
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def read_gpu_rows(record: RecordFiles, *, now: float) -> list[GpuRow]:
    """Return the GPUs of a trial's newest attempt, node by node; none where nothing was written.

    `now`: Unix seconds. What is older than a minute is `unknown`: its agent does not write any more.
    Raises: StoreError if the record's place does not answer.
    """
    found = [match for name in record.list(ATTEMPTS_FOLDER) if (match := _NAME.fullmatch(name))]
    newest = max((match["attempt"] for match in found), key=number_of, default=None)
    rows: list[GpuRow] = []
    for match in sorted(found, key=lambda match: int(match["node"])):
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
