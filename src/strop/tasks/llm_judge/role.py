"""How judging processes find a judge that the run itself started: by files, never by settings.

The run names a directory in its environment, which all processes that judge inherit. Per judge it holds a
file with address and key that only this user may read. A process on another machine is given these files'
contents, and keeps them in a directory of its own for those that it starts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from strop.errors import ConfigError, explain_refusal

ROLES_VARIABLE = "STROP_JUDGE_ROLES"
"""Directory of the files."""


def handover_path(folder: Path, model: str) -> Path:
    """Where address and key of the judge of a name stand."""
    return folder / f"{hashlib.sha256(model.encode()).hexdigest()[:16]}.json"


def write_handover(path: Path, url: str, key: str) -> None:
    """Write address and key, readable by this user only. Raises: OSError if that cannot be done."""
    _write_privately(path, json.dumps({"url": f"{url}/v1", "key": key}))


def list_handovers() -> dict[str, str]:
    """Return what this process knows of judges, for `adopt_handovers` elsewhere: it holds their keys."""
    folder = os.environ.get(ROLES_VARIABLE)
    return {path.name: path.read_text() for path in Path(folder).glob("*.json")} if folder else {}


def adopt_handovers(folder: Path, handovers: Mapping[str, str]) -> None:
    """Know judges that another process listed, here and in all processes that this one starts.

    `folder` is made, and removed by who knows when nobody judges any more.
    Raises: OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in handovers.items():
        _write_privately(folder / name, content)
    os.environ[ROLES_VARIABLE] = str(folder.absolute())


def _write_privately(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)


def read_handover(model: str) -> tuple[str, str]:
    """Return address and key of a judge that the run started.

    Raises: ConfigError if this is no process of a run that started it.
    """
    folder = os.environ.get(ROLES_VARIABLE)
    try:
        found = json.loads(handover_path(Path(folder or ""), model).read_text()) if folder else None
    except (OSError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            explain_refusal(
                f"task.judge_url=role, and no run has started {model} for this process",
                allowed="'role' while `strop train` runs, which starts the judge; else an address",
                next_step="set task.judge_url to a server that answers, such as http://127.0.0.1:8000/v1",
            )
        )
    return str(found["url"]), str(found["key"])
