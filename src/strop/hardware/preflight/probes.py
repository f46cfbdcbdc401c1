"""Programs that a preflight starts, and the one line of JSON that each prints last."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.hardware.process import ChildProcess, spawn, terminate

FOLDER_NAME = "preflight"
"""Of the logs of probes, below the run's directory."""
_POLL_S = 0.05


def tell(answer: Mapping[str, Any]) -> None:
    """Say the one line, in the probe itself."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def start_probe(
    module: str,
    words: Sequence[str],
    log_path: Path,
    variables: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
) -> ChildProcess:
    """Start a module as a program with one compute thread; its log begins anew."""
    log_path.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    # -P: a file in the current directory never stands in for one of strop's modules.
    return spawn([sys.executable, "-P", "-m", module, *words], log_path, env, pass_fds=pass_fds)


def await_probes(probes: Sequence[ChildProcess], limit_s: float) -> list[dict[str, Any] | None]:
    """Return what each says; None of one that said nothing within the limit: it is ended."""
    deadline = time.monotonic() + limit_s
    while any(probe.poll() is None for probe in probes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    answers = [_read_answer(probe) if probe.poll() is not None else None for probe in probes]
    for probe in probes:
        terminate(probe, 0.0)
    return answers


def _read_answer(probe: ChildProcess) -> dict[str, Any]:
    for line in reversed(probe.tail(50).splitlines()):
        if line.startswith("{"):
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return answer
    last = " / ".join(probe.tail(3).splitlines())
    return {"error": f"the probe ended with exit code {probe.poll()} and said nothing: {last}"}
