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
    """Measure `strop --help` and `strop plan` of the demo's run file."""
    figures = []
    for arguments, limit_s in LIMITS_S.items():
        command = [str(Path(sys.executable).parent / "strop"), *arguments]
        _time_once(command)  # Byte code and file cache: a person's second call is the common one.
        seconds = tuple(_time_once(command) for _ in range(1 if is_quick else 7))
        name, value = f"strop {arguments[0]}", statistics.median(seconds)
        figures.append(Figure(name=name, unit="s", value=value, measured=seconds, at_most=limit_s))
    return Measured(figures=figures)


def _time_once(command: Sequence[str]) -> float:
    # As a person has it, whose second call finds its byte code.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begun_at = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
    return time.perf_counter() - begun_at
