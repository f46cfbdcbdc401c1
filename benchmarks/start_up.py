"""How long the commands a person waits for take: a fresh process each, wall time."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, Measured

ROOT = Path(__file__).parents[1]
LIMITS_S = {("--help",): 0.5, ("plan", "recipes/arithmetic.toml"): 1.0}


def measure_start_up(*, is_quick: bool) -> Measured:
    """Measure `strop --help` and `strop plan` of the demo's run file, and whether torch is imported."""
    figures = []
    for arguments, limit_s in LIMITS_S.items():
        command = [str(Path(sys.executable).parent / "strop"), *arguments]
        _time_once(command)  # Byte code and file cache: a person's second call is the common one.
        seconds = tuple(_time_once(command) for _ in range(1 if is_quick else 7))
        name, torch = f"strop {arguments[0]}", float(_imports_torch(command))
        figures += [
            Figure(name=name, unit="s", value=statistics.median(seconds), measured=seconds, at_most=limit_s),
            Figure(name=f"{name}: torch imported", unit="", value=torch, measured=(torch,), at_most=0.0),
        ]
    return Measured(figures=figures)


def _time_once(command: Sequence[str]) -> float:
    # As a person has it, whose second call finds its byte code.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begun_at = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
    return time.perf_counter() - begun_at


def _imports_torch(command: Sequence[str]) -> bool:
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    return "torch" in {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
