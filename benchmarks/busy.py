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
import resource
import sys
import tempfile
import time
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
from strop.hardware.tuning import GNU_SPIN_COUNT

CASE = CASES["grpo-32-forced"]
NUM_ROUNDS = 6
PATIENCE = 2
"""So many times as many rounds are taken at most, for as long as too few were undisturbed."""
MAX_OTHERS = 0.1
"""Cores that others may use during a step that counts; the worker's own work between steps is among it."""
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
    default = {**bounded.environment, "GOMP_SPINCOUNT": str(GNU_SPIN_COUNT)}
    return {
        ALONE: replace(bounded, name=ALONE),
        DEFAULT: replace(bounded, name=DEFAULT, environment=default),
        BESIDE: replace(bounded, name=BESIDE),
    }


def take_rounds(arms: Mapping[str, Arm], case: Case, protocol: Protocol) -> list[dict[str, Record]]:
    """Have every arm take a step in each round, in an order that turns round; return the steps by arm.

    Ends when `protocol.num_pairs` rounds were undisturbed, at the latest after `PATIENCE` times as many.
    Raises: ArmFailed if a worker ends early.
    """
    workers: list[ArmProcess] = []
    rounds: list[dict[str, Record]] = []
    max_rounds = PATIENCE * protocol.num_pairs
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        write_prompts(Path(folder) / "prompts.json", make_prompts(case, max_rounds + protocol.num_warm_ups))
        try:
            for arm in arms.values():
                workers.append(ArmProcess(arm, case, protocol, Path(folder)))
                workers[-1].wait_until_ready()
            for worker in workers:
                for _ in range(protocol.num_warm_ups):
                    worker.step()
            while len(rounds) < max_rounds and sum(map(is_undisturbed, rounds)) < protocol.num_pairs:
                order = workers[:: -1 if len(rounds) % 2 else 1]
                rounds.append({worker.arm.name: take_step(worker, protocol) for worker in order})
                # Said at once: whoever ends the benchmark early has the rounds that were whole.
                told = (f"{name} {step['step_s']:.1f} s" for name, step in sorted(rounds[-1].items()))
                print(f"round {len(rounds)}: {', '.join(told)}", flush=True)
            return rounds
        finally:
            for worker in workers:
                worker.close()


def take_step(worker: ArmProcess, protocol: Protocol) -> Record:
    """Have a worker take a step, beside the loop if that is its arm, when other programs leave the cores.

    The record says under `others` how many cores these had meanwhile.
    """
    wait_for_cores(protocol.quiet_wait_s)
    before_s, begun_at = _others_seconds(), time.perf_counter()
    with busy_loop() if worker.arm.name == BESIDE else nullcontext():
        record = worker.step()
    wall_s = time.perf_counter() - begun_at
    return {**record, "others": (_others_seconds() - before_s - record["cpu_s"]) / wall_s}


def wait_for_cores(limit_s: float) -> None:
    """Wait until a second has passed in which all programs together used as good as no core."""
    ends_at = time.monotonic() + limit_s
    used_s = float(machine.num_cores())
    while used_s > MAX_OTHERS and time.monotonic() < ends_at:
        before_s = machine.busy_seconds()
        time.sleep(1.0)
        used_s = machine.busy_seconds() - before_s


def _others_seconds() -> float:
    """Return the processor seconds of all programs but the loops that have ended."""
    loops = resource.getrusage(resource.RUSAGE_CHILDREN)
    return machine.busy_seconds() - loops.ru_utime - loops.ru_stime


def is_undisturbed(steps: Mapping[str, Record]) -> bool:
    """Whether other programs left the cores to all steps of a round."""
    return all(step["others"] <= MAX_OTHERS for step in steps.values())


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
    taken = take_rounds(arms, case, protocol)
    # A machine that was never quiet has figures too, and `others` in the result says what they are worth.
    rounds = [steps for steps in taken if is_undisturbed(steps)] or taken
    figures = [
        _tell("step beside one busy loop by alone", rounds, (BESIDE, ALONE), MAX_BESIDE),
        _tell("step with bounded spinning by OpenMP's own", rounds, (ALONE, DEFAULT), MAX_COST),
    ]
    return Measured(figures=figures, details=_describe(case, arms, taken))


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
