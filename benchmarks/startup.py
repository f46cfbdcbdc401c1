"""How long the commands a person waits for take: a fresh process each, wall time."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_REPEATS = 7
ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """Wall seconds of one command, over several fresh processes."""

    command: str
    limit_s: float
    """What the command may take; the median is compared with it."""
    median_s: float
    max_s: float
    is_torch_imported: bool

    @property
    def is_met(self) -> bool:
        """Whether the command is fast enough and leaves torch alone."""
        return self.median_s <= self.limit_s and not self.is_torch_imported


def person_environment() -> dict[str, str]:
    """Return this environment as a person has it, whose second call finds its byte code."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _time_once(command: Sequence[str]) -> float:
    begun_at = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=person_environment())
    return time.perf_counter() - begun_at


def _imports_torch(command: Sequence[str]) -> bool:
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    modules = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    return "torch" in modules


def measure_command(arguments: Sequence[str], limit_s: float) -> StartUp:
    """Measure one strop command.

    Raises: subprocess.CalledProcessError if the command fails.
    """
    command = [str(Path(sys.executable).parent / "strop"), *arguments]
    _time_once(command)  # Byte code and file cache: a person's second call is the common one.
    seconds = [_time_once(command) for _ in range(NUM_REPEATS)]
    return StartUp(
        command=" ".join(["strop", *(Path(argument).name for argument in arguments)]),
        limit_s=limit_s,
        median_s=statistics.median(seconds),
        max_s=max(seconds),
        is_torch_imported=_imports_torch(command),
    )


def measure_start_ups() -> list[StartUp]:
    """Measure `strop --help` and `strop plan` of the demo's run file."""
    return [
        measure_command(["--help"], limit_s=0.5),
        measure_command(["plan", str(RECIPE)], limit_s=1.0),
    ]
