"""Names in a run's mirror."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from strop.store.uris import join_uri

MIRROR_FOLDER = ".mirror"
"""In the run directory: what the uploader pins, and what it and the trainer tell each other."""
TRACES = "traces"
RUN_FOLDER = "run"
"""In a record of a checkpoint: the files of the run that belong to that step."""
_RECORD = re.compile(r"(?P<run>.+)_step(?P<step>\d+)(?:-(?P<fence>\d+))?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorOrder:
    """The uploader's settings. No credentials: those are in its environment."""

    run_path: str
    uri: str
    """Where the run is mirrored to."""
    owner: str
    attempt: int
    may_claim: bool = True
    """False: the trainer has claimed the mirror for this owner, and what was lost since is lost."""
    every_s: float = 30.0
    keep_last: int = 2
    keep_every: int | None = None
    max_mb_per_s: float | None = None

    def to_json(self) -> str:
        """Return the order as one argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read an order back."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class RecordName:
    """The name of a checkpoint's record. The newer one is the greater one."""

    step: int
    fence: int = 0
    """Above 0 where an attempt found another content under the plain name."""

    @classmethod
    def parse(cls, text: str, run: str) -> Self | None:
        """Read the name of a folder; None: it is no checkpoint of that run."""
        match = _RECORD.match(text)
        if match is None or match["run"] != run:
            return None
        return cls(step=int(match["step"]), fence=int(match["fence"] or 0))

    def uri(self, root: str, run: str) -> str:
        """Return where the record is."""
        return join_uri(root, f"{run}_step{self.step}" + (f"-{self.fence}" if self.fence else ""))


def mirror_uri(store_uri: str, name: str) -> str:
    """Return where a run is mirrored to; `name` is its directory's, or `store.mirror_as`."""
    return join_uri(store_uri, "checkpoints", name)


def flush_path(run_path: Path) -> Path:
    """Return the file that the trainer makes when it has ended: the uploader then sends the rest and ends."""
    return run_path / MIRROR_FOLDER / "flush"


def notes_path(run_path: Path) -> Path:
    """Return the file with the uploader's notices for the trainer to show, one JSON line each."""
    return run_path / MIRROR_FOLDER / "notes.jsonl"
