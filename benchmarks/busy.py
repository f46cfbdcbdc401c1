"""What one busy program costs a training beside it, and what bounded spinning costs a training alone.

A thread of OpenMP that waits for its partner spins. Beside a program that wants a core, the partner has to
wait for one, and spinning keeps it from getting it. Two workers take real GRPO steps in turn, each of the
same work: one alone and beside an endless loop of one thread, the other alone with the spinning that GNU's
OpenMP chooses by itself. Beside the loop its step would hardly end.

In float32 and by AVX2, where a step has most parallel regions for its time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks import machine
from benchmarks.cases import CASES, Case
from benchmarks.figures import Figure, Measured
from benchmarks.harness import ArmProcess, Protocol, Record
from benchmarks.machine import AVX2
from benchmarks.prompts import make_prompts, write_prompts
from benchmarks.ratio import summarize_ratios
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


def take_rounds(case: Case, protocol: Protocol) -> list[dict[str, Record]]:
    """Take steps in rounds, in an order that turns round; return the steps by name.

    Raises: ArmFailed if a worker ends early.
    """
    bounded = strop_arm()
    bounded = replace(bounded, settings={"dtype": "float32"}, environment={**bounded.environment, **AVX2})
    # GNU OpenMP's default if neither GOMP_SPINCOUNT nor OMP_WAIT_POLICY is set (libgomp, env.c).
    default = replace(bounded, name="own", environment={**bounded.environment, "GOMP_SPINCOUNT": "300000"})
    rounds: list[dict[str, Record]] = []
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder, ExitStack() as ending:
        num_steps = 2 * (protocol.num_pairs + protocol.num_warm_ups)
        write_prompts(Path(folder) / "prompts.json", make_prompts(case, num_steps))
        one, other = (ArmProcess(arm, case, protocol, Path(folder)) for arm in (bounded, default))
        for worker in (one, other):
            ending.callback(worker.close)
            worker.wait_until_ready()
            for _ in range(protocol.num_warm_ups):
                worker.step()
        turns = [(ALONE, one), (DEFAULT, other), (BESIDE, one)]
        for index in range(protocol.num_pairs):
            machine.wait_until_quiet(protocol.quiet_wait_s)
            rounds.append({})
            for name, worker in turns[:: -1 if index % 2 else 1]:
                with busy_loop() if name == BESIDE else nullcontext():
                    rounds[-1][name] = worker.step()
    return rounds


def measure_busy(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure the ratio of step times with and without a busy loop, and with and without the bound."""
    case = CASE
    protocol = Protocol(model_dir=model_dir, num_pairs=NUM_ROUNDS, num_warm_ups=1, quiet_wait_s=120.0)
    if is_quick:
        case = replace(CASE, num_prompts=2, group_size=2, max_new_tokens=8)
        # One thread waits for no other: beside other tests, two that spin without a bound would not end.
        protocol = Protocol(model_dir=model_dir, num_pairs=1, num_warm_ups=0, threads=1, quiet_wait_s=0.0)
    rounds = take_rounds(case, protocol)
    figures = [
        _compare("step beside one busy loop by alone", rounds, (BESIDE, ALONE), MAX_BESIDE),
        _compare("step with bounded spinning by OpenMP's own", rounds, (ALONE, DEFAULT), MAX_COST),
    ]
    return Measured(figures=figures, details={"case": dataclasses.asdict(case), "rounds": rounds})


def _compare(
    name: str, rounds: Sequence[Mapping[str, Record]], arms: tuple[str, str], at_most: float
) -> Figure:
    """Tell how many times as long the first arm's step takes as the other's in the same round."""
    ratios = tuple(one[arms[0]]["step_s"] / one[arms[1]]["step_s"] for one in rounds)
    summary = summarize_ratios(ratios)
    unit = f"({summary.low:.3f} to {summary.high:.3f})"
    return Figure(name=name, unit=unit, value=summary.median, measured=ratios, at_most=at_most)
