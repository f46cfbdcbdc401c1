"""The worker's side of the protocol: JSON lines on standard input and output.

    harness -> worker   {"command": "step"}     do the next piece of work, reply with its record
    harness -> worker   {"command": "quit"}     end
    worker -> harness   {"ready": {...}}        once, when the first step could begin
    worker -> harness   {"record": {...}}       after every step

Between commands a worker is blocked reading standard input and uses no processor time.
Libraries print to standard output as they please, so the protocol keeps a private copy of that
descriptor and sends everything else to standard error. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Case

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrder:
    """What a worker was started with."""

    case: Case
    model_dir: str
    prompts_path: Path
    threads: int
    settings: dict[str, Any]
    """The arm's own settings; an absent key means its default."""


def read_order(arguments: Sequence[str] | None = None) -> WorkerOrder:
    """Parse a worker's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--settings", default="{}")
    parsed = parser.parse_args(arguments)
    return WorkerOrder(
        case=Case.from_json(parsed.case),
        model_dir=parsed.model,
        prompts_path=Path(parsed.prompts),
        threads=parsed.threads,
        settings=json.loads(parsed.settings),
    )


def peak_bytes() -> int:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def generation_record(
    total_s: float, prompt_lengths: Sequence[int], lengths: Sequence[int], peak_bytes: int
) -> Record:
    """Return the record of one batch of generation; lengths are in tokens, one per prompt and reply."""
    return {
        "step_s": total_s,
        "t_gen": total_s,
        "Lp_mean": sum(prompt_lengths) / len(prompt_lengths),
        "Lp_max": max(prompt_lengths),
        "Lc_mean": sum(lengths) / len(lengths),
        "Lc_max": max(lengths),
        "scored_tok": sum(lengths),
        "tok_per_s": sum(lengths) / total_s,
        "peak_bytes": peak_bytes,
    }


class Channel:
    """The worker's end of the pipe. Make it before importing anything that prints."""

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def _send(self, message: Record) -> None:
        self._out.write(json.dumps(message) + "\n")

    def ready(self, **facts: object) -> None:
        """Tell that the first step could begin; adds the start-up time since the imports."""
        self._send({"ready": {"start_up_s": time.perf_counter() - self.started_at, **facts}})

    def reply(self, record: Record) -> None:
        """Answer a step."""
        self._send({"record": record})

    def wait_for_step(self) -> None:
        """Block until the harness wants a step.

        Raises: SystemExit when the harness wants the worker to end, or is gone.
        """
        line = sys.stdin.readline()
        if not line or json.loads(line)["command"] == "quit":
            raise SystemExit(0)
