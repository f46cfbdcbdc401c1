"""Where the programs of one attempt listen, for those of the same attempt on other nodes.

`ports.json` in the attempt's directory says it, together with the attempt's number. A reader that comes
late, after the next attempt has begun, is refused and not sent to strangers; what an earlier attempt left is
not there yet for its readers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import StoreError, explain_refusal
from strop.io.atomic import write_bytes_atomically

PORTS_NAME = "ports.json"
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What one attempt listens on."""

    attempt: int
    """Its number, which grows with each attempt."""
    node: str
    """Who published it."""
    addresses: Mapping[str, str]
    """Name to host:port."""


def publish_ports(
    attempt_path: Path, attempt: int, addresses: Mapping[str, str], *, node: str, name: str = PORTS_NAME
) -> Path:
    """Say where an attempt listens, in one piece; return the file.

    Several publishers take a `name` each. Raises: StoreError if a later attempt has published there already,
    or the file cannot be written.
    """
    path = attempt_path / name
    there = _read(path)
    if there is not None and there.attempt > attempt:
        raise _stale(path, attempt, there)
    content = {"attempt": attempt, "node": node, "addresses": dict(addresses)}
    write_bytes_atomically(path, json.dumps(content, indent=1).encode())
    return path


def read_ports(attempt_path: Path, attempt: int, *, name: str = PORTS_NAME) -> Published | None:
    """Return where an attempt listens; None while it has not said so.

    Raises: StoreError if a later attempt has begun.
    """
    path = attempt_path / name
    there = _read(path)
    if there is not None and there.attempt > attempt:
        raise _stale(path, attempt, there)
    return there if there is not None and there.attempt == attempt else None


def wait_for_ports(
    attempt_path: Path,
    attempt: int,
    wanted: Sequence[str],
    *,
    node: str,
    wait_limit_s: float,
    name: str = PORTS_NAME,
) -> Published:
    """Wait until an attempt has published certain names.

    Raises: StoreError naming the node that was to publish them and has not, or if a later attempt has begun.
    """
    deadline = time.monotonic() + wait_limit_s
    while True:
        found = read_ports(attempt_path, attempt, name=name)
        missing = [one for one in wanted if found is None or one not in found.addresses]
        if found is not None and not missing:
            return found
        if time.monotonic() >= deadline:
            raise StoreError(
                explain_refusal(
                    f"node {node} has not said within {wait_limit_s:g} s where {', '.join(missing)} of"
                    f" attempt {attempt} can be reached ({attempt_path / name})",
                    allowed="a node that starts with the others and sees the same disk",
                    next_step=f"read the logs of node {node}; exclude it if it does not start",
                )
            )
        time.sleep(_POLL_S)


def _read(path: Path) -> Published | None:
    """Return what a file says; None where there is none, or what it says has another form."""
    try:
        content = json.loads(path.read_bytes())
        return Published(
            attempt=int(content["attempt"]),
            node=str(content["node"]),
            addresses={str(key): str(value) for key, value in content["addresses"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _stale(path: Path, attempt: int, there: Published) -> StoreError:
    return StoreError(
        explain_refusal(
            f"this is attempt {attempt}, and {path} is of attempt {there.attempt}, by node {there.node}",
            allowed="the newest attempt: one that was replaced must not talk to its successor",
            next_step="nothing; the newer attempt goes on, and this one ends here",
        )
    )
