"""Servers that a run has started, handed by name to every process that asks them: an address and a key.

The process that started a server hands it over; the processes that it starts itself find it by a variable
that they inherit, which names a directory of files that this user alone may read. A process on another
machine is sent what `list_endpoints` returns, over a connection that is secured, and hands it over there.
A key stands in no variable, argument, log or record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

ENDPOINTS_VARIABLE = "STROP_ENDPOINTS"
"""Directory of the files."""
RUNTIME = "runtime"
"""The name of the sandbox service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A server, and the key without which it answers nothing."""

    url: str
    key: str = field(repr=False)


def hand_over(folder: Path, endpoints: Mapping[str, Endpoint]) -> None:
    """Let this process, and all that it starts from here on, find servers by their names.

    All servers of a run are handed over in one folder, which is created.
    Raises: OSError if it cannot be written.
    """
    for name, endpoint in endpoints.items():
        write_endpoint(folder, name, endpoint)
    os.environ[ENDPOINTS_VARIABLE] = str(folder.absolute())


def write_endpoint(folder: Path, name: str, endpoint: Endpoint) -> None:
    """Write a server's address and key for this user's processes that know the folder.

    Raises: OSError if it cannot be written.
    """
    # Whole or not at all: others may be waiting for it, on a disk that nodes share.
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{_path_of(folder, name).name}.{os.getpid()}"
    partial.unlink(missing_ok=True)
    write_secret(partial, json.dumps({"name": name, **asdict(endpoint)}))
    os.replace(partial, _path_of(folder, name))


def read_endpoint(folder: Path, name: str) -> Endpoint | None:
    """Return a server that was written there; None where there is none, or nobody may read it."""
    try:
        found = json.loads(_path_of(folder, name).read_text())
        return Endpoint(url=found["url"], key=found["key"])
    except (OSError, ValueError, TypeError, LookupError):
        return None


def withdraw(folder: Path, names: Iterable[str]) -> None:
    """Remove servers that were handed over. May be called for names that never were, and twice."""
    for name in names:
        _path_of(folder, name).unlink(missing_ok=True)
    is_ours = os.environ.get(ENDPOINTS_VARIABLE) == str(folder.absolute())
    if is_ours and not any(folder.glob("endpoint-*.json")):
        del os.environ[ENDPOINTS_VARIABLE]


def list_endpoints() -> dict[str, Endpoint]:
    """Return the servers that this process can find, keys included, to hand them over on another machine."""
    folder = os.environ.get(ENDPOINTS_VARIABLE)
    found = [json.loads(path.read_text()) for path in Path(folder).glob("endpoint-*.json")] if folder else []
    return {one["name"]: Endpoint(url=one["url"], key=one["key"]) for one in found}


def find_endpoint(name: str) -> Endpoint | None:
    """Return a server by its name, None where none of this name was handed over to this process."""
    folder = os.environ.get(ENDPOINTS_VARIABLE)
    return read_endpoint(Path(folder), name) if folder else None


def write_secret(path: Path, text: str) -> None:
    """Write a file that is not there yet, readable by this user alone at any moment. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _path_of(folder: Path, name: str) -> Path:
    return folder / f"endpoint-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
