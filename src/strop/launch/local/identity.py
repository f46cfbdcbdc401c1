"""Which process supervises a job of this machine, for whoever asks later."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from pathlib import Path

from strop.hardware.identity import ProcessIdentity, identify_self
from strop.store.atomic import write_bytes_atomically

_NAME = "supervisor.json"


def write_identity(job_path: Path) -> None:
    """Write who supervises, and where. Raises: StoreError."""
    content = {"host": socket.gethostname(), "process": asdict(identify_self())}
    write_bytes_atomically(job_path / _NAME, json.dumps(content).encode())


def read_identity(job_path: Path) -> tuple[str, ProcessIdentity] | None:
    """Return host and process of the supervisor; None where none has begun."""
    try:
        content = json.loads((job_path / _NAME).read_bytes())
        return str(content["host"]), ProcessIdentity(**content["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
