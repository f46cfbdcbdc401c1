"""Run all tests: five streams beside each other, and once more, alone, what failed beside the others.

Two cores run five streams, so a test may wait far longer than it would by itself. What fails there and passes
alone is named at the end and does not count; what fails alone counts.

Usage: python -m tools.test_streams
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]

_SLURM = "tests/launch/slurm"
_APART = {
    "clusters": [
        "tests/cluster",
        _SLURM,
        "tests/faults/test_slurm_jobs.py",
        "tests/runtime",
        "tests/sandbox",
    ],
    "jobs": ["tests/launch"],
    "programs": [
        *("tests/benchmarks", "tests/test_demo.py", "tests/test_processors.py", "tests/test_recipes.py"),
        *("tests/evaluate", "tests/audit"),
    ],
}
"""Slow tests by stream. Those of clusters, sandboxes and jobs mostly wait, for schedulers, containers and
processes, and leave the cores to the others: one after the other, they would be the last to end."""

STREAMS: Mapping[str, Sequence[str]] = {
    "clusters": ["-m", "slow", *_APART["clusters"]],
    "jobs": ["-m", "slow", *_APART["jobs"], f"--ignore={_SLURM}"],
    "slow": ["-m", "slow", *(f"--ignore={path}" for paths in _APART.values() for path in paths)],
    "programs": ["-m", "slow", *_APART["programs"]],
    "fast": ["-m", "not slow"],
}
"""Arguments of pytest by stream; the last one is shown while it runs."""

_SOME_FAILED = 1
"""pytest's exit code; all others above 0 say that it could not run the tests."""


def run_streams(streams: Mapping[str, Sequence[str]], root: Path = ROOT) -> int:
    """Run all streams, then each one's failed tests alone; return 0 if all tests passed, else 1."""
    *_, shown = streams
    with tempfile.TemporaryDirectory(prefix="strop-tests-") as folder:
        logs = {name: Path(folder) / f"{name}.log" for name in streams if name != shown}
        # One place for the models that streams make.
        (Path(folder) / "models").mkdir()
        environment = {**os.environ, "STROP_TEST_MODELS": str(Path(folder) / "models")}
        python = (sys.executable, "-m", "pytest", "--durations=15")
        commands = {
            name: [*python, "-o", f"cache_dir={folder}/{name}", *arguments]
            for name, arguments in streams.items()
        }
        with ExitStack() as stack:
            running = {}
            for name, command in commands.items():
                output = stack.enter_context(logs[name].open("wb")) if name in logs else None
                errors = output and subprocess.STDOUT
                running[name] = stack.enter_context(
                    subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=errors)
                )
            codes = {name: process.wait() for name, process in running.items()}
        for log in logs.values():
            print(log.read_text(errors="replace"), flush=True)
        only_alone: list[str] = []
        for name in [name for name, code in codes.items() if code == _SOME_FAILED]:
            failed = json.loads(Path(folder, name, "v", "cache", "lastfailed").read_bytes())
            print(f"{name}: {len(failed)} tests failed and are run again, alone", flush=True)
            again = [*commands[name], "--last-failed", "--last-failed-no-failures=none"]
            codes[name] = subprocess.run(again, cwd=root, env=environment, check=False).returncode
            if codes[name] == 0:
                only_alone += failed
    for name, code in codes.items():
        print(f"{name}: {f'exit code {code}' if code else 'passed'}")
    for test in only_alone:
        print(f"FAILED beside other streams, passed alone: {test}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(run_streams(STREAMS))
