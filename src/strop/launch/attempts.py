"""The attempts of a trial from its own record, and the meaning of exit codes.

The supervisor above the agents writes `verdict.json`. Without it the exit codes of the nodes are combined,
once every node has written one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from signal import Signals
from typing import Any

from strop.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE
from strop.io.atomic import write_bytes_atomically
from strop.launch.contract import AttemptRecord
from strop.launch.job_dir import ATTEMPTS_FOLDER
from strop.record.files import RecordFiles

VERDICT_NAME = "verdict.json"
_PLACE = re.compile(
    rf"{ATTEMPTS_FOLDER}/(?P<attempt>[^/]+)/(?:(?P<kind>agent|end)-(?P<node>\d+)|(?P<verdict>verdict))\.json"
)
MILD = (EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_DONE)
"""In order of precedence; every other code takes precedence over these."""
SIGNAL_BASE = 128
_MEANINGS = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "wrong usage or settings",
    EXIT_INTERRUPTED: "interrupted, its state saved",
    EXIT_REFUSED: "refused by a check before it began",
}


def write_verdict(
    attempt_path: Path,
    *,
    number: int,
    exit_code: int | None,
    signal: str,
    started_at: float,
    ended_at: float,
    nodes: tuple[str, ...],
    cause: str = "",
) -> None:
    """Write the end of a whole attempt, which outranks the nodes' files. Raises: StoreError.

    `exit_code`: None for an attempt that another one follows. `cause`: what no node could write itself.
    """
    content = {
        "number": number,
        "exit_code": exit_code,
        "signal": signal,
        "started_at": started_at,
        "ended_at": ended_at,
        "nodes": list(nodes),
        "cause": cause,
    }
    attempt_path.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(attempt_path / VERDICT_NAME, json.dumps(content, indent=1).encode())


def combine_exit_files(attempt_path: Path, num_nodes: int) -> int:
    """Return the exit codes of an attempt's nodes as one; a missing one counts as a failure."""
    return combine(read_exit_code(attempt_path / "exit" / str(node)) for node in range(num_nodes))


def read_attempts(record: RecordFiles) -> list[AttemptRecord]:
    """Return a trial's attempts, oldest first. Files that cannot be parsed are ignored.

    Raises: StoreError if the record cannot be read.
    """
    attempts: dict[str, dict[str, Any]] = {}
    for name in record.list(ATTEMPTS_FOLDER):
        match = _PLACE.fullmatch(name)
        if match is None:
            continue
        content = _read_json(record, name)
        if content is None:
            continue
        attempt = attempts.setdefault(match["attempt"], {"agent": {}, "end": {}, "verdict": None})
        if match["verdict"]:
            attempt["verdict"] = content
        else:
            attempt[match["kind"]][int(match["node"])] = content
    records = [_to_record(name, parts) for name, parts in attempts.items()]
    return sorted(records, key=lambda item: (item.number, item.started_at or item.ended_at or 0.0))


def _to_record(name: str, parts: dict[str, Any]) -> AttemptRecord:
    agents, ends, verdict = parts["agent"], list(parts["end"].values()), parts["verdict"] or {}
    first = agents.get(0, {})
    hosts = tuple(str(agents[node].get("host", "")) for node in sorted(agents))
    listed = verdict.get("nodes")
    exit_code, ended_at = _integer(verdict, "exit_code"), _number(verdict, "ended_at")
    if not verdict and agents and len(ends) == _integer(first, "num_nodes"):
        exit_code = combine(_integer(end, "exit_code") for end in ends)
        ended_at = max(_ended_at(end) for end in ends)
    causes = [str(end["cause"]) for end in sorted(ends, key=_ended_at) if end.get("cause")]
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
        # The first cause: later ones are its consequences.
        cause="\n".join(filter(None, [verdict.get("cause"), *causes[:1]])),
    )


def _number(content: dict[str, Any], key: str) -> float | None:
    value = content.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ended_at(end: dict[str, Any]) -> float:
    return _number(end, "ended_at") or 0.0


def _read_json(record: RecordFiles, name: str) -> dict[str, Any] | None:
    data = record.read(name)
    try:
        content = json.loads(data) if data is not None else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def read_exit_code(path: Path) -> int | None:
    """Return a node's exit code from its file; None if it is missing or unreadable."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def combine(codes: Iterable[int | None]) -> int:
    """Return one code for all nodes: a failure before 76, before 75, before 0. A missing code is a failure.

    A maximum, as `srun` returns it, would let a 75 hide a 1.
    """
    exit_codes = [EXIT_FAILED if code is None else code for code in codes]
    failures = [code for code in exit_codes if code not in MILD]
    if failures:
        # A cause before its consequence: the other nodes are killed once one has failed.
        return next((code for code in failures if code < SIGNAL_BASE), failures[0])
    return next((code for code in MILD if code in exit_codes), EXIT_FAILED)


def from_wait(exit_code: int) -> int:
    """Return a child's exit code as a shell reports it: 128 + n for a death by signal n."""
    return SIGNAL_BASE - exit_code if exit_code < 0 else exit_code


def describe_exit(exit_code: int) -> str:
    """Describe an exit code."""
    if exit_code > SIGNAL_BASE:
        try:
            return f"killed by {Signals(exit_code - SIGNAL_BASE).name}"
        except ValueError:
            return f"exit code {exit_code}"
    meaning = _MEANINGS.get(exit_code)
    return f"exit code {exit_code}" + (f": {meaning}" if meaning else "")
