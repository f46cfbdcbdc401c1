"""The checkpoints of a member, seen through its record, wherever that is."""

from __future__ import annotations

import re

from strop.io.atomic import MANIFEST_NAME
from strop.record.files import RecordFiles

CHECKPOINTS = "checkpoints/"
_INSIDE = re.compile(rf"{CHECKPOINTS}step-(\d{{6,}})/(.+)")


def find_checkpoints(record: RecordFiles) -> list[int]:
    """Return the steps of complete checkpoints, in order. Raises: StoreError if the place does not answer."""
    found = (_INSIDE.fullmatch(name) for name in record.list(CHECKPOINTS.rstrip("/")))
    return sorted(int(match[1]) for match in found if match is not None and match[2] == MANIFEST_NAME)


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file of a record belongs to."""
    match = _INSIDE.fullmatch(name)
    return None if match is None else int(match[1])
