"""Which process supervises a job of this machine, for whoever asks later."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.hardware.identity import ProcessIdentity, identify_self
from strop.io.atomic import write_bytes_atomically

_NAME = "supervisor.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervisor:
    """The process above a job's agents."""

    host: str
    process: ProcessIdentity
    job_id: str
    cancelled_by: str = ""
    """The signal that cancelled the job, once it has ended for that reason."""

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine: of others nothing can be known."""
        return self.host == socket.gethostname()


def write_identity(job_path: Path, job_id: str, *, cancelled_by: str = "") -> None:
    """Write who supervises, and where. Raises: StoreError."""
    content = {
        "host": socket.gethostname(),
        "process": asdict(identify_self()),
        "job_id": job_id,
        "cancelled_by": cancelled_by,
    }
    write_bytes_atomically(job_path / _NAME, json.dumps(content).encode())


def read_identity(job_path: Path) -> Supervisor | None:
    """Return who supervises; None where none has begun."""
    try:
        content = json.loads((job_path / _NAME).read_bytes())
        process = ProcessIdentity(**content["process"])
        rest = {name: str(content[name]) for name in ("host", "job_id", "cancelled_by")}
        return Supervisor(process=process, **rest)
    except (OSError, ValueError, KeyError, TypeError):
        return None
