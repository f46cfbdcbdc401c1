"""Addresses and keys of a run's servers, by name, for all processes that use them.

The process that started a server writes its endpoint; its child processes find it through an inherited
variable that names a directory of files readable only by this user. A process on another machine receives the
result of `list_endpoints` over a secured connection, and writes it there. A key is never in a variable, an
argument, a log or a record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from strop.io.atomic import make_directory, write_bytes_atomically

ENDPOINTS_VARIABLE = "STROP_ENDPOINTS"
"""Holds the directory of the files."""
RUNTIME = "runtime"
"""The name of the sandbox service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The address of a server, and the key that it requires."""

    url: str
    key: str = field(repr=False)


def hand_over(folder: Path, endpoints: Mapping[str, Endpoint]) -> None:
    """Let this process and its future children find servers by their names.

    All servers of a run share one folder, which is created.
    Raises: StoreError if it cannot be written.
    """
    for name, endpoint in endpoints.items():
        write_endpoint(folder, name, endpoint)
    os.environ[ENDPOINTS_VARIABLE] = str(folder.absolute())


def write_endpoint(folder: Path, name: str, endpoint: Endpoint) -> None:
    """Write a server's address and key for this user's processes that know the folder.

    Raises: StoreError if it cannot be written.
    """
    # Atomically, because other nodes may be waiting for the file on a shared disk.
    make_directory(folder)
    data = json.dumps({"name": name, **asdict(endpoint)}).encode()
    write_bytes_atomically(_path_of(folder, name), data, mode=0o600)


def read_endpoint(folder: Path, name: str) -> Endpoint | None:
    """Read a server's endpoint; None if it is missing or not readable."""
    try:
        content = json.loads(_path_of(folder, name).read_text())
        return Endpoint(url=content["url"], key=content["key"])
    except (OSError, ValueError, TypeError, LookupError):
        return None


def withdraw(folder: Path, names: Iterable[str]) -> None:
    """Remove the endpoints of servers. Missing ones are ignored."""
    for name in names:
        _path_of(folder, name).unlink(missing_ok=True)
    is_ours = os.environ.get(ENDPOINTS_VARIABLE) == str(folder.absolute())
    if is_ours and not any(folder.glob("endpoint-*.json")):
        del os.environ[ENDPOINTS_VARIABLE]


def list_endpoints() -> dict[str, Endpoint]:
    """Return all endpoints that this process can find, keys included, to write them on another machine."""
    folder = os.environ.get(ENDPOINTS_VARIABLE)
    rows = [json.loads(path.read_text()) for path in Path(folder).glob("endpoint-*.json")] if folder else []
    return {row["name"]: Endpoint(url=row["url"], key=row["key"]) for row in rows}


def find_endpoint(name: str) -> Endpoint | None:
    """Return a server by its name; None if this process has none of this name."""
    folder = os.environ.get(ENDPOINTS_VARIABLE)
    return read_endpoint(Path(folder), name) if folder else None


def write_secret(path: Path, text: str) -> None:
    """Create a file that is never readable by other users. Raises: OSError, also if the file exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _path_of(folder: Path, name: str) -> Path:
    return folder / f"endpoint-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
