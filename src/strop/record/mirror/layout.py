"""Names in a run's mirror."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from strop.store.uris import join_uri

MIRROR_FOLDER = ".mirror"
"""Folder in the run directory for the uploader's pinned files, and its messages from and to the trainer."""
TRACES = "traces"
RUN_FOLDER = "run"
"""Folder in a checkpoint's record for the run's files up to that step."""
_RECORD = re.compile(r"(?P<run>.+)_step(?P<step>\d+)(?:-(?P<fence>\d+))?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorOrder:
    """The uploader's settings. Credentials are in its environment."""

    run_path: str
    uri: str
    """The run's mirror."""
    owner: str
    attempt: int
    may_claim: bool = True
    """False: the trainer has claimed the mirror for this owner, and a lost claim is final."""
    every_s: float = 30.0
    """Between two uploads of metrics, rollouts and logs. Checkpoints are sent at once."""
    keep_last: int = 2

    def to_json(self) -> str:
        """Return the order as a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse an order."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class RecordName:
    """The name of a checkpoint's record. Newer records compare greater."""

    step: int
    fence: int = 0
    """Above 0 if an attempt found other content under the plain name."""

    @classmethod
    def parse(cls, text: str, run: str) -> Self | None:
        """Parse the name of a folder; None: it is no checkpoint of that run."""
        match = _RECORD.match(text)
        if match is None or match["run"] != run:
            return None
        return cls(step=int(match["step"]), fence=int(match["fence"] or 0))

    def uri(self, root: str, run: str) -> str:
        """Return the record's URI."""
        return join_uri(root, f"{run}_step{self.step}" + (f"-{self.fence}" if self.fence else ""))


def mirror_uri(store_uri: str, name: str) -> str:
    """Return the URI of a run's mirror; `name` is its directory's name, or `store.mirror_as`."""
    return join_uri(store_uri, "checkpoints", name)


def flush_path(run_path: Path) -> Path:
    """Return the file that the trainer makes at its end: the uploader then sends the rest and exits."""
    return run_path / MIRROR_FOLDER / "flush"


def notes_path(run_path: Path) -> Path:
    """Return the file of the uploader's notices, which the trainer shows, one JSON line each."""
    return run_path / MIRROR_FOLDER / "notes.jsonl"
