"""What one orchestrator core drives: 1,000 simulated engines with 100,000 rollouts in flight.

The real path (`run_group` with a one-turn task, router, seeds, prompts, rewards) on the real clock, against
engines that compute nothing and answer after the time that a real one would take. As soon as a group ends,
the next begins, so that the rollouts in flight stay as many. Measured once all have been replaced once.
In flight are those that an engine samples; about as many have ended and wait for the last of their group.
Goals: 2,000 rollouts/s, and the event loop late by less than 50 ms in 99 % of the time.

The lag is weighted by time: a clock that ticks every 5 ms counts each tick that a blocked loop missed, by
how late it came. The load is what the process does in its own CPU time, so the figures need a free core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Measured
from strop.engine.router import Router, RouterLimits
from strop.environments import RolloutPlan, SingleTurn, run_group
from strop.rollout import Example, Message, Outcome, Sampling, Split, make_example
from strop.tasks import TaskLimits
from strop.testing.simulated_engine import SimulatedEngine, SimulatedSpeed
from strop.testing.virtual_time import run_virtually
from strop.tokenizer import Tokenizer
from strop.train.watch.process import full_collections_by_hand

NUM_ENGINES = 1_000
NUM_IN_FLIGHT = 100_000
GROUP_SIZE = 8
OFFERED_PER_S = 2_500
"""What the engines would end: rollouts in flight over their mean latency, which is 40 s at full size."""
GROUP_SPREAD = 2.105
"""The longest of eight such latencies over their mean. A group that ends is replaced as a whole, so this is
how many rollouts there must be for each one that is in flight."""
MEDIAN_TOKENS = 100
REPLY_SIGMA = 0.6
WARM_UP_S = 160.0
MEASURED_S = 60.0
TICK_S = 0.005


class EchoTask:
    """Costs nothing to render and to judge."""

    name = "echo"
    version = "1"
    limits = TaskLimits(max_reply_tokens=4096)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return one problem after the other, as many as are in flight."""
        return [make_example(self.name, {"n": n}, str(n)) for n in range(NUM_IN_FLIGHT // GROUP_SIZE)]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Ask for a number."""
        return (Message(role="user", content=f"Repeat {example.fields['n']}."),)

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare."""
        return Outcome(parts={"echo": float(text == example.answer)})

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the number."""
        return (example.answer or "",)


class Desk:
    """Keeps rollouts in flight and counts those that end."""

    def __init__(self, tokenizer: Tokenizer, *, num_engines: int, num_in_flight: int) -> None:
        # Mean of the log-normal lengths: median times exp(sigma squared / 2).
        mean_tokens = MEDIAN_TOKENS * math.exp(REPLY_SIGMA**2 / 2)
        self._mean_latency_s = num_in_flight / OFFERED_PER_S
        speed = SimulatedSpeed(
            median_reply_tokens=MEDIAN_TOKENS,
            reply_sigma=REPLY_SIGMA,
            step_base_s=self._mean_latency_s / mean_tokens,
            step_row_s=0.0,
        )
        self._tokenizer = tokenizer
        self._task = EchoTask()
        self._examples = self._task.examples(Split.TRAIN)
        engines = {f"e{index}": SimulatedEngine(speed=speed, seed=index) for index in range(num_engines)}
        self._router = Router(engines, limits=RouterLimits(max_running=256))
        self._num_groups = round(num_in_flight * GROUP_SPREAD / GROUP_SIZE)
        self.num_ended = 0
        self.num_lost = 0
        self.ticks_late_s: list[float] = []

    async def run(self, warm_up_s: float, measured_s: float) -> dict[str, float]:
        """Run for the given times and return what was measured in the second one."""
        chains = [asyncio.create_task(self._keep_asking(index)) for index in range(self._num_groups)]
        ticker = asyncio.create_task(self._tick())
        await asyncio.sleep(warm_up_s)
        self.ticks_late_s.clear()
        num_before, begun_at, cpu_before = self.num_ended, time.perf_counter(), time.process_time()
        await asyncio.sleep(measured_s)
        passed_s, cpu_s = time.perf_counter() - begun_at, time.process_time() - cpu_before
        num_ended, load = self.num_ended - num_before, self._router.load
        late = sorted(self.ticks_late_s)
        collecting_at = time.perf_counter()
        gc.collect()
        collect_s = time.perf_counter() - collecting_at
        for task in (*chains, ticker):
            task.cancel()
        return {
            "rollouts_per_s": num_ended / passed_s,
            "in_flight": load.num_running + load.num_waiting,
            "cpu_ms_per_rollout": 1000 * cpu_s / max(num_ended, 1),
            "busy_frac": cpu_s / passed_s,
            "lag_p50_s": late[len(late) // 2],
            "lag_p99_s": late[int(0.99 * (len(late) - 1))],
            "lag_max_s": late[-1],
            "collect_s": collect_s,
            "num_lost": self.num_lost,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    async def _keep_asking(self, index: int) -> None:
        step = 0
        # Not all at once: a run does not begin with 100,000 prompts in one turn of the loop.
        await asyncio.sleep(2 * self._mean_latency_s * index / self._num_groups)
        while True:
            example = self._examples[(index + step) % len(self._examples)]
            plans = [
                RolloutPlan(
                    example=example,
                    step=step,
                    sample_index=sample,
                    run_seed=index,
                    sampling=Sampling(),
                    max_reply_tokens=4096,
                )
                for sample in range(GROUP_SIZE)
            ]
            group = await run_group(partial(SingleTurn, self._task), self._router, self._tokenizer, plans)
            self.num_ended += len(group.rollouts)
            self.num_lost += sum(not rollout.outcome.is_scored for rollout in group.rollouts)
            step += 1

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - loop.time()))
            now = loop.time()
            while due <= now:
                self.ticks_late_s.append(now - due)
                due += TICK_S
            due -= TICK_S


def measure_orchestrator(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure in a process of its own, whose memory is nothing else's."""
    size = ("10", "1000", "1", "2") if is_quick else (NUM_ENGINES, NUM_IN_FLIGHT, WARM_UP_S, MEASURED_S)
    command = [sys.executable, "-m", "benchmarks.orchestrator", str(model_dir), *map(str, size)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])

    def figure(name: str, unit: str, key: str, **goal: Any) -> Figure:
        return Figure(name=name, unit=unit, value=found[key], measured=(found[key],), **goal)

    return Measured(
        figures=[
            figure("rollouts through one core", "rollouts/s", "rollouts_per_s", at_least=2000.0),
            figure("rollouts in flight", "rollouts", "in_flight", at_least=0.95 * NUM_IN_FLIGHT),
            figure("event-loop lag, by time", "s, 99th percentile", "lag_p99_s", at_most=0.05),
            figure("resident memory, peak", "MiB", "peak_mib"),
            figure("a full collection, left to a step's end", "s", "collect_s"),
            figure("processor time", "ms/rollout", "cpu_ms_per_rollout"),
            figure("rollouts lost", "rollouts", "num_lost", at_most=0.0),
        ],
        details={"found": found},
    )


def main() -> None:
    """Measure here and print what was found as one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("num_engines", type=int)
    parser.add_argument("num_in_flight", type=int)
    parser.add_argument("warm_up_s", type=float)
    parser.add_argument("measured_s", type=float)
    parser.add_argument(
        "--virtual", action="store_true", help="on simulated time: processor time alone counts"
    )
    given = parser.parse_args()
    desk = Desk(
        Tokenizer.load(given.model_dir), num_engines=given.num_engines, num_in_flight=given.num_in_flight
    )

    async def measure() -> None:
        print(json.dumps(await desk.run(given.warm_up_s, given.measured_s)), flush=True)

    with full_collections_by_hand():
        if given.virtual:
            run_virtually(measure())
        else:
            asyncio.run(measure())


if __name__ == "__main__":
    main()
