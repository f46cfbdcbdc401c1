"""Runs two arms alternately on one machine and keeps every record.

Protocol: both workers start and warm up, then take turns in the order A B B A A B B A ..., so a
slow drift of the machine hits both alike. Only one works at a time; the other waits for input.
The ratio is formed within each pair. Calibration and load are taken before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks import machine
from benchmarks.cases import Case
from benchmarks.prompts import make_prompts, write_prompts
from benchmarks.ratio import RatioSummary, summarize_ratios
from strop.io import write_bytes_atomically

ROOT = Path(__file__).parents[1]
RESULTS_DIR = Path(__file__).parent / "results"
QUIT_LIMIT_S = 60.0

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One system under test and how its worker is started."""

    name: str
    python: Path
    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How often, with what and on how much of the machine a case is measured."""

    model_dir: Path
    model_digest: str = ""
    num_pairs: int = 6
    num_warm_ups: int = 2
    threads: int = 2
    quiet_wait_s: float = 60.0
    """Longest wait for a quiet machine before a case; the load is recorded either way."""


class ArmFailed(RuntimeError):
    """Raised when a worker ended without an answer; the message ends with its last output."""


class ArmProcess:
    """The harness's end of one worker."""

    def __init__(self, arm: Arm, case: Case, protocol: Protocol, work_dir: Path) -> None:
        self.arm = arm
        self._log_path = work_dir / f"{arm.name}.log"
        self._log: IO[str] = self._log_path.open("w")
        self._began_at = time.perf_counter()
        command = [str(arm.python), "-m", arm.module, "--case", case.to_json()]
        command += ["--model", str(protocol.model_dir), "--prompts", str(work_dir / "prompts.json")]
        command += ["--threads", str(protocol.threads), "--settings", json.dumps(arm.settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            # A group of its own: a rival's helper processes must not outlive their worker.
            start_new_session=True,
            env=worker_environment(arm, protocol.threads),
        )

    def _receive(self) -> Record:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = "".join(self._log_path.read_text().splitlines(keepends=True)[-30:])
            raise ArmFailed(f"arm {self.arm.name} ended with code {code}:\n{tail}")
        message: Record = json.loads(line)
        return message

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command}) + "\n")
        self._process.stdin.flush()

    def wait_until_ready(self) -> Record:
        """Return the worker's facts; `t_start` is the time from process start to its first step."""
        facts: Record = self._receive()["ready"]
        return {**facts, "t_start": time.perf_counter() - self._began_at}

    def step(self) -> Record:
        """Have the worker do one piece of work; return its record with the load before it."""
        load_before = machine.load_average()
        self._send("step")
        record: Record = self._receive()["record"]
        return {"arm": self.arm.name, "load_before": load_before, **record}

    def close(self) -> None:
        """End the worker and all it started, by force if it does not end by itself."""
        try:
            # communicate also closes both pipes; a worker that already ended is only collected.
            self._process.communicate(json.dumps({"command": "quit"}) + "\n", timeout=QUIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()


def worker_environment(arm: Arm, threads: int) -> dict[str, str]:
    """Return the environment variables of a worker: same threads for every arm, no network."""
    python_path = [str(ROOT / "src"), str(ROOT)] if arm.python == Path(sys.executable) else [str(ROOT)]
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(python_path),
        **arm.environment,
    }


def pair_order(num_pairs: int) -> list[tuple[int, int]]:
    """Return which arm goes first in each pair: A B, B A, A B, ..."""
    return [(0, 1) if index % 2 == 0 else (1, 0) for index in range(num_pairs)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What the workers of one case reported."""

    ready: dict[str, Record]
    """By arm: its settings and `t_start`, seconds from process start to the first step."""
    warm_ups: list[Record]
    pairs: list[dict[str, Record]]
    """By pair and arm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Everything that one case measured."""

    case: Case
    arms: tuple[str, str]
    """Arm under test first, rival second."""
    turns: Turns
    speedup: RatioSummary
    """Of the time for a step (grpo) or of tokens per second (generate); above 1 is faster."""
    speedup_per_token: RatioSummary
    """The same, with each step's time divided by the tokens it sampled."""
    calibration_before: dict[str, float]
    calibration_after: dict[str, float]
    load_before: float

    @property
    def is_quiet(self) -> bool:
        """Whether the machine was idle before and equally fast before and after."""
        drift = machine.calibration_drift(self.calibration_before, self.calibration_after)
        is_idle = self.load_before <= machine.QUIET_LOAD_PER_CORE * machine.num_cores()
        return is_idle and drift <= machine.CALIBRATION_DRIFT_FRAC


def _step_ratio(pair: dict[str, Record], arms: tuple[str, str]) -> float:
    ours, rival = (pair[name] for name in arms)
    return float(rival["step_s"]) / float(ours["step_s"])


def _token_ratio(pair: dict[str, Record], arms: tuple[str, str]) -> float:
    ours, rival = (pair[name] for name in arms)
    return _step_ratio(pair, arms) * float(ours["scored_tok"]) / float(rival["scored_tok"])


def _take_turns(workers: Sequence[ArmProcess], ready: dict[str, Record], protocol: Protocol) -> Turns:
    warm_ups = [worker.step() for worker in workers for _ in range(protocol.num_warm_ups)]
    pairs = [
        {workers[index].arm.name: workers[index].step() for index in order}
        for order in pair_order(protocol.num_pairs)
    ]
    return Turns(ready=ready, warm_ups=warm_ups, pairs=pairs)


def measure_pairs(case: Case, arms: tuple[Arm, Arm], protocol: Protocol) -> Turns:
    """Start both arms, warm them up and let them take turns; end them whatever happens.

    Raises: ArmFailed if a worker ends early.
    """
    workers: list[ArmProcess] = []
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        work_dir = Path(folder)
        num_steps = protocol.num_pairs + protocol.num_warm_ups
        write_prompts(work_dir / "prompts.json", make_prompts(case, num_steps))
        try:
            ready = {}
            for arm in arms:
                # One after the other: a rival that compiles itself must not share the cores.
                workers.append(ArmProcess(arm, case, protocol, work_dir))
                ready[arm.name] = workers[-1].wait_until_ready()
            return _take_turns(workers, ready, protocol)
        finally:
            for worker in workers:
                worker.close()


def run_case(case: Case, arms: tuple[Arm, Arm], protocol: Protocol) -> CaseResult:
    """Measure one case with two arms on a machine as quiet as it can be had.

    Raises: ArmFailed if a worker ends early; the other one is stopped as well.
    """
    load_before = machine.wait_until_quiet(protocol.quiet_wait_s)
    before = machine.calibrate(protocol.threads)
    turns = measure_pairs(case, arms, protocol)
    names = (arms[0].name, arms[1].name)
    return CaseResult(
        case=case,
        arms=names,
        turns=turns,
        speedup=summarize_ratios([_step_ratio(pair, names) for pair in turns.pairs]),
        speedup_per_token=summarize_ratios([_token_ratio(pair, names) for pair in turns.pairs]),
        calibration_before=before,
        calibration_after=machine.calibrate(protocol.threads),
        load_before=load_before,
    )


def result_document(results: Sequence[CaseResult], protocol: Protocol) -> Record:
    """Return everything that is kept of a run, as JSON values."""
    return {
        "taken_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "model_hash": protocol.model_digest[:16],
        "machine": machine.machine_facts(),
        "threads": protocol.threads,
        "num_warm_ups": protocol.num_warm_ups,
        "cases": [{**dataclasses.asdict(result), "is_quiet": result.is_quiet} for result in results],
    }


def write_result(name: str, document: Record) -> Path:
    """Write a result file named after its case and day; one of the same name is replaced.

    What instructions it was limited to stands in the name too, and the commit in the file.
    """
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    parts = [name, *sorted(set(machine.limits().values())), dt.datetime.now(dt.UTC).date().isoformat()]
    path = RESULTS_DIR / f"{'-'.join(parts)}.json"
    write_bytes_atomically(
        path, (json.dumps({"git_rev": machine.git_revision(ROOT), **document}, indent=1) + "\n").encode()
    )
    return path
