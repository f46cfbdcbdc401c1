"""The failure file: the one thing that anybody who may describe a job learns of its end.

The platform shows its first 1,024 characters, so the cause comes first: code, host, exception, last frame.
The first cause is kept; what comes later is appended. No secrets and no lines of a log but the exception's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from strop.errors import EXIT_INTERRUPTED, EXIT_REFUSED
from strop.launch.exit_codes import describe_exit
from strop.launch.sagemaker.places import NUM_FAILURE_CHARACTERS
from strop.launch.secrets import redact

_PREFIXES = {EXIT_INTERRUPTED: "requeue:", EXIT_REFUSED: "preflight:"}
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)
_EXCEPTION = re.compile(r"^(?:strop: )?[\w.]*(?:Error|Exception|Refused|Interrupt|Record)\b.*$", re.MULTILINE)
_RANK = re.compile(r"\brank[ =:]*(\d+)\b", re.IGNORECASE)


def describe_failure(exit_code: int, *, host: str, cause: str, secrets: Iterable[str] = ()) -> str:
    """Return what the failure file says of an end that is no success."""
    head, _, tail = cause.partition("\n")
    parts = [_PREFIXES.get(exit_code, ""), f"{describe_exit(exit_code)} on {host}"]
    if found := _RANK.search(tail):
        parts.append(f"rank {found[1]}")
    exceptions = _EXCEPTION.findall(tail)
    if exceptions:
        parts.append(exceptions[-1].strip())
    frames = list(_FRAME.finditer(tail))
    if frames:
        last = frames[-1]
        parts.append(f"at {Path(last['file']).name}:{last['line']} in {last['name']}")
    if head:
        parts.append(head)
    text = parts[0] + (" " if parts[0] else "") + "; ".join(parts[1:])
    return redact(text, secrets)


def write_failure(path: Path, text: str) -> None:
    """Write the first cause, or append a later one below it. A disk that is full is no second failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_first = not path.exists() or path.stat().st_size == 0
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text[:NUM_FAILURE_CHARACTERS] if is_first else f"\n--- later\n{text}")
    except OSError:
        return
