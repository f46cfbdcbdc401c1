"""What one busy program costs a training beside it, and what bounded spinning costs a training alone.

A thread of OpenMP that waits for its partner spins. Beside a program that wants a core, the partner has to
wait for one, and spinning keeps it from getting it. Three workers take real GRPO steps in turn, each of the
same work: alone, alone with the spinning that GNU's OpenMP chooses by itself, and beside an endless loop of
one thread. The second is never beside the loop, where its step would hardly end.

In float32 and by AVX2, where a step has most parallel regions for its time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cases import CASES, Case
from benchmarks.figures import Figure, Measured
from benchmarks.harness import Arm, ArmProcess, Protocol, Record
from benchmarks.machine import AVX2
from benchmarks.prompts import make_prompts, write_prompts
from benchmarks.ratio import RatioSummary, summarize_ratios
from benchmarks.rivals import strop_arm
from strop.hardware import spawn, terminate

CASE = CASES["grpo-32-forced"]
NUM_ROUNDS = 6
ALONE, DEFAULT, BESIDE = "alone", "OpenMP's own", "beside"
MAX_BESIDE = 2.2
"""Half of one of two cores is lost to the loop, and the step waits for the slower half: 2 is the share."""
MAX_COST = 1.02


@contextmanager
def busy_loop() -> Iterator[int]:
    """Keep one core busy for as long as the block runs; yields the process's id."""
    # A loop that outlived its benchmark would spoil every later one: it ends with this process.
    process = spawn([sys.executable, "-c", "while True: pass"], Path(os.devnull))
    try:
        yield process.pid
    finally:
        terminate(process, 0.0)


def build_arms() -> dict[str, Arm]:
    """Return the three arms by name; they differ in how long OpenMP's threads spin, and in nothing else."""
    bounded = strop_arm()
    bounded = replace(bounded, settings={"dtype": "float32"}, environment={**bounded.environment, **AVX2})
    # GNU OpenMP's default if neither GOMP_SPINCOUNT nor OMP_WAIT_POLICY is set (libgomp, env.c).
    default = {**bounded.environment, "GOMP_SPINCOUNT": "300000"}
    return {
        ALONE: replace(bounded, name=ALONE),
        DEFAULT: replace(bounded, name=DEFAULT, environment=default),
        BESIDE: replace(bounded, name=BESIDE),
    }


def take_rounds(arms: Mapping[str, Arm], case: Case, protocol: Protocol) -> list[dict[str, Record]]:
    """Have every arm take a step in each round, in an order that turns round; return the steps by arm.

    Raises: ArmFailed if a worker ends early.
    """
    workers: list[ArmProcess] = []
    rounds: list[dict[str, Record]] = []
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        num_steps = protocol.num_pairs + protocol.num_warm_ups
        write_prompts(Path(folder) / "prompts.json", make_prompts(case, num_steps))
        try:
            for arm in arms.values():
                workers.append(ArmProcess(arm, case, protocol, Path(folder)))
                workers[-1].wait_until_ready()
            for worker in workers:
                for _ in range(protocol.num_warm_ups):
                    worker.step()
            for index in range(protocol.num_pairs):
                machine.wait_until_quiet(protocol.quiet_wait_s)
                rounds.append({one.arm.name: take_step(one) for one in workers[:: -1 if index % 2 else 1]})
            return rounds
        finally:
            for worker in workers:
                worker.close()


def take_step(worker: ArmProcess) -> Record:
    """Have a worker take a step, beside the loop if that is its arm."""
    with busy_loop() if worker.arm.name == BESIDE else nullcontext():
        return worker.step()


def compare(rounds: Sequence[Mapping[str, Record]], arm: str, reference: str) -> RatioSummary:
    """Return how many times as long an arm's step takes as another one's in the same round."""
    return summarize_ratios([one[arm]["step_s"] / one[reference]["step_s"] for one in rounds])


def measure_busy(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure the ratio of step times with and without a busy loop, and with and without the bound."""
    case = CASE
    protocol = Protocol(model_dir=model_dir, num_pairs=NUM_ROUNDS, num_warm_ups=1, quiet_wait_s=120.0)
    if is_quick:
        case = replace(CASE, num_prompts=2, group_size=2, max_new_tokens=8)
        # One thread waits for no other: beside other tests, two that spin without a bound would not end.
        protocol = Protocol(model_dir=model_dir, num_pairs=1, num_warm_ups=0, threads=1, quiet_wait_s=0.0)
    arms = build_arms()
    rounds = take_rounds(arms, case, protocol)
    figures = [
        _tell("step beside one busy loop by alone", rounds, (BESIDE, ALONE), MAX_BESIDE),
        _tell("step with bounded spinning by OpenMP's own", rounds, (ALONE, DEFAULT), MAX_COST),
    ]
    return Measured(figures=figures, details=_describe(case, arms, rounds))


def _tell(name: str, rounds: Sequence[Mapping[str, Record]], arms: tuple[str, str], at_most: float) -> Figure:
    summary = compare(rounds, *arms)
    return Figure(
        name=name,
        unit=f"({summary.low:.3f} to {summary.high:.3f})",
        value=summary.median,
        measured=tuple(one[arms[0]]["step_s"] / one[arms[1]]["step_s"] for one in rounds),
        at_most=at_most,
    )


def _describe(case: Case, arms: Mapping[str, Arm], rounds: Sequence[Mapping[str, Record]]) -> dict[str, Any]:
    environments = {name: arm.environment for name, arm in arms.items()}
    return {"case": dataclasses.asdict(case), "environments": environments, "rounds": rounds}
