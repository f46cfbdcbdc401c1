"""What a member wrote of its own attempts, read from wherever its directory is.

`verdict.json` is the word of whoever is above the agents; where it is missing and every node has left its
exit code, these are combined.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from strop.io.atomic import write_bytes_atomically
from strop.launch.contract import AttemptRecord
from strop.launch.exit_codes import combine
from strop.launch.home import ATTEMPTS_FOLDER
from strop.record.files import RecordFiles

VERDICT_NAME = "verdict.json"
_PLACE = re.compile(
    rf"{ATTEMPTS_FOLDER}/(?P<attempt>[^/]+)/(?:agent-(?P<node>\d+)\.json|(?P<verdict>verdict\.json))"
)


def write_verdict(
    attempt_path: Path,
    *,
    number: int,
    exit_code: int | None,
    signal: str,
    started_at: float,
    ended_at: float,
    nodes: tuple[str, ...],
) -> None:
    """Write how an attempt ended as a whole; the last word about it. Raises: StoreError."""
    content = {
        "number": number,
        "exit_code": exit_code,
        "signal": signal,
        "started_at": started_at,
        "ended_at": ended_at,
        "nodes": list(nodes),
    }
    attempt_path.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(attempt_path / VERDICT_NAME, json.dumps(content, indent=1).encode())


def combine_exit_files(attempt_path: Path, num_nodes: int) -> int:
    """Return the exit codes of an attempt's nodes as one; a missing one counts as a failure."""
    return combine(read_exit_code(attempt_path / "exit" / str(node)) for node in range(num_nodes))


def read_attempts(record: RecordFiles) -> list[AttemptRecord]:
    """Return a member's attempts, oldest first. Files that cannot be read say nothing.

    Raises: StoreError if the place does not answer.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in record.list(ATTEMPTS_FOLDER):
        match = _PLACE.fullmatch(name)
        if match is None:
            continue
        content = _read_json(record, name)
        if content is None:
            continue
        attempt = found.setdefault(match["attempt"], {"agents": {}, "verdict": None})
        if match["verdict"]:
            attempt["verdict"] = content
        else:
            attempt["agents"][int(match["node"])] = content
    records = [_to_record(record, name, parts) for name, parts in found.items()]
    return sorted(records, key=lambda one: (one.number, one.started_at or one.ended_at or 0.0))


def _to_record(record: RecordFiles, name: str, parts: dict[str, Any]) -> AttemptRecord:
    agents, verdict = parts["agents"], parts["verdict"] or {}
    first = agents.get(0, {})
    hosts = tuple(str(agents[node].get("host", "")) for node in sorted(agents))
    listed = verdict.get("nodes")
    exit_code, ended_at = _integer(verdict, "exit_code"), _number(verdict, "ended_at")
    ends = _read_ends(record, name, sorted(agents))
    if not verdict and agents and len(ends) == _integer(first, "num_nodes"):
        exit_code = combine(_integer(end, "exit_code") for end in ends)
        ended_at = max(_ended_at(end) for end in ends)
    decisive = [end for end in ends if end.get("cause")]
    number = _integer(verdict, "number")
    number = _integer(first, "number") if number is None else number
    return AttemptRecord(
        name=name,
        number=number or 0,
        started_at=_number(first, "started_at"),
        ended_at=ended_at,
        exit_code=exit_code,
        signal=str(verdict.get("signal") or next((end["signal"] for end in ends if end.get("signal")), "")),
        nodes=hosts or (tuple(map(str, listed)) if isinstance(listed, list) else ()),
        # The first cause: what came after it is its consequence.
        cause=str(min(decisive, key=_ended_at)["cause"]) if decisive else "",
    )


def _number(content: dict[str, Any], key: str) -> float | None:
    value = content.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ended_at(end: dict[str, Any]) -> float:
    return _number(end, "ended_at") or 0.0


def _read_ends(record: RecordFiles, attempt: str, nodes: list[int]) -> list[dict[str, Any]]:
    names = (f"{ATTEMPTS_FOLDER}/{attempt}/end-{node}.json" for node in nodes)
    return [content for name in names if (content := _read_json(record, name)) is not None]


def _read_json(record: RecordFiles, name: str) -> dict[str, Any] | None:
    data = record.read(name)
    try:
        content = json.loads(data) if data is not None else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def read_exit_code(path: Path) -> int | None:
    """Return what a node wrote last; None while it has not, or where it cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
