"""Trying a run's schedule at a size that is not there: the real loop's parts on simulated time.

Real are the schedule of examples, the source that samples ahead within its bound, the walk of every
rollout, the router, the credit of a batch, and the fate of every group. Simulated are the engines, which
take the time that the plan predicts, the learner, the judge, and the clock. The order is that of the
training loop: take a batch, learn, publish where it is due.

Left out: evaluations, checkpoints, the gate, and whatever rewards learn from. Learner and engines have
devices of their own, also where a plan says that they share one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from strop.algorithm import build_algorithm
from strop.cluster import Roles
from strop.engine.contract import (
    Completion,
    Engine,
    GenerationRequest,
    ReplyScore,
    UpdateMode,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
)
from strop.engine.router import Router, RouterLimits
from strop.errors import ConfigError
from strop.hardware.accelerators import Accelerator, find_accelerator
from strop.hardware.busy_clock import BusyClock
from strop.plan.estimate import learn_s, sync_s
from strop.plan.planning import plan_work
from strop.plan.roles import RoleCounts
from strop.plan.rollouts import Work, decode_speed, typical_reply_s
from strop.plan.speeds import Speeds
from strop.rollout import Example, IntArray, Outcome
from strop.spec import ResolvedSpec, load_spec
from strop.tasks import Task, limits_of
from strop.testing.simulated_engine import SimulatedEngine, SimulatedSpeed, SimulatedTrouble
from strop.testing.virtual_time import run_virtually
from strop.tokenizer import Tokenizer
from strop.train.batch import TrainBatch, build_batch, schedule_examples
from strop.train.generation import Batch, Collector, find_staleness, sort_by_status


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationWish:
    """What is tried beside what the run file says."""

    num_engines: int
    num_learners: int = 1
    num_steps: int = 20
    trouble: SimulatedTrouble = field(default_factory=SimulatedTrouble)
    """Of every engine. A dead one that was repaired serves from the next publication on."""
    solved_frac: float = 0.5
    """Mean chance that a reply is right; every example has its own."""
    reply_sigma: float = 0.6
    """Spread of log-normal reply lengths."""

    def __post_init__(self) -> None:
        """Refuse what cannot be tried. Raises: ConfigError naming the value."""
        trouble = self.trouble
        failures_per_hour = 3600.0 / trouble.mean_life_s
        wanted = {
            "engines": (self.num_engines, self.num_engines >= 1, "1 or more"),
            "learners": (self.num_learners, self.num_learners >= 1, "1 or more"),
            "steps": (self.num_steps, self.num_steps >= 1, "1 or more"),
            "stragglers": (
                trouble.straggler_frac,
                0.0 <= trouble.straggler_frac <= 1.0,
                "a share from 0 to 1",
            ),
            "straggler-factor": (trouble.straggler_factor, trouble.straggler_factor >= 1.0, "1 or more"),
            "failures": (failures_per_hour, failures_per_hour >= 0.0, "0 or more for each hour"),
            "repair": (trouble.repair_s, trouble.repair_s > 0.0, "seconds above 0"),
            "solved": (self.solved_frac, 0.0 < self.solved_frac < 1.0, "a share between 0 and 1"),
            "sigma": (self.reply_sigma, self.reply_sigma >= 0.0, "0 or more"),
        }
        for name, (value, is_fine, allowed) in wanted.items():
            if not is_fine:
                raise ConfigError(
                    f"--{name} {value} cannot be simulated", allowed=allowed, next_step=f"correct --{name}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What came of it. Times are simulated seconds."""

    num_engines: int
    num_learners: int
    num_steps: int
    simulated_s: float
    step_s: float
    """Median time from one step to the next, the first one left out."""
    seconds: Mapping[str, float]
    """Medians of waiting for rollouts, learning and publishing."""
    scored_tokens_per_s: float
    """Of the batches, over the whole time."""
    engine_busy_frac: float
    """Mean share of time that an engine decodes something."""
    engine_rows_frac: float
    """Mean share of its rows that are taken."""
    learner_busy_frac: float
    staleness: Mapping[int, float]
    """Share of groups by steps between their oldest token and the step that trains on them."""
    fates: Mapping[str, int]
    """Groups by how they ended, and those started and ahead at the end."""
    wasted_token_frac: float
    """Tokens of groups that were discarded."""
    num_lost_rollouts: int
    """Rollouts of batches that no engine answered."""
    engine_events: Mapping[str, int]
    """How often replicas left and came back, by cause."""


@dataclass(slots=True)
class _Tally:
    """Sums over the steps."""

    ends_s: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"generate": [], "learn": [], "sync": []})
    num_tokens: int = 0
    num_wasted: int = 0
    num_lost: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


class WatchedEngine:
    """An engine, and how long it has something to do."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self.busy = BusyClock(clock)
        self.row_s = 0.0
        """Sum over rows of the time that they are taken."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply, and count its time."""
        begun_at = self._clock()
        try:
            with self.busy.running():
                return await self._engine.generate(request)
        finally:
            self.row_s += self._clock() - begun_at

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Pass on."""
        return await self._engine.score(prompt_ids, reply_ids, temperature)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Pass on."""
        return await self._engine.update(update)

    async def close(self) -> None:
        """Pass on."""
        await self._engine.close()


class ChanceJudge:
    """Says by the seed alone whether a reply is right; every example has its own chance."""

    def __init__(self, solved_frac: float, *, seed: int, judge_s: float) -> None:
        self._exponent = 1.0 / solved_frac - 1.0
        self._seed = seed
        self._judge_s = judge_s
        self._draws = random.Random(seed)

    def chance(self, example_id: str) -> float:
        """Return the example's chance: a uniform draw to the power whose mean is `solved_frac`."""
        uniform = random.Random(zlib.crc32(f"{self._seed} {example_id}".encode())).random()
        return float(uniform**self._exponent)

    async def judge(self, example: Example, text: str) -> Outcome:
        """Take the time of a judge, and draw."""
        await asyncio.sleep(self._judge_s)
        is_right = self._draws.random() < self.chance(example.example_id)
        return Outcome(parts={"correct": float(is_right)}, is_correct=is_right)

    async def close(self) -> None:
        """Hold nothing, release nothing."""


@dataclass(slots=True)
class SimulatedLearner:
    """What the collector needs of a learner: its version and how long its prompts may be."""

    shape: object
    version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationInput:
    """The run, and how fast everything is."""

    work: Work
    speeds: Speeds
    wish: SimulationWish
    task: Task
    tokenizer: Tokenizer


def simulate_run(
    resolved: ResolvedSpec,
    wish: SimulationWish,
    *,
    accelerator: Accelerator | None = None,
    cache_dir: Path | None = None,
) -> Simulation:
    """Simulate a run file with the speeds of its plan. See `simulate`.

    Raises: ConfigError if model or data are not on this machine.
    """
    planned = plan_work(resolved, accelerator=accelerator, cache_dir=cache_dir)
    return simulate(
        SimulationInput(
            work=planned.work,
            speeds=planned.speeds,
            wish=wish,
            task=planned.task,
            tokenizer=Tokenizer.load(planned.model_path),
        )
    )


def simulate(given: SimulationInput) -> Simulation:
    """Run the steps on simulated time. Equal input gives an equal result.

    Raises: DataError if the task has too few examples; RunStopped where the schedule cannot go on;
        EngineError where no engine is left.
    """
    return run_virtually(_Desk(given).run())


def simulated_speed(work: Work, speeds: Speeds, layout: RoleCounts, wish: SimulationWish) -> SimulatedSpeed:
    """Return the plan's speed of one engine in the words of the simulated one."""
    from math import exp

    speed = decode_speed(work, speeds, layout)
    is_read_bound = speed.read_s > speed.rows * speed.token_s
    base_s = speed.overhead_s + (speed.read_s if is_read_bound else 0.0)
    rows = work.spec.engine.max_num_seqs or speed.rows
    return SimulatedSpeed(
        # The mean of log-normal lengths is the median times exp(sigma squared / 2).
        median_reply_tokens=work.reply_tokens / exp(wish.reply_sigma**2 / 2),
        reply_sigma=wish.reply_sigma,
        prefill_tokens_per_s=1.0 / speed.prefill_token_s,
        step_base_s=base_s,
        step_row_s=0.0 if is_read_bound else speed.token_s,
        max_num_seqs=rows,
        max_cache_tokens=rows * int(work.prompt_tokens_mean + work.max_reply_tokens + 1) * 2,
        update_s=sync_s(work, speeds, layout),
    )


class _Desk:
    """The loop's steps, in its order, with nothing but their time."""

    def __init__(self, given: SimulationInput) -> None:
        wish, spec = given.wish, given.work.spec
        self._given = given
        train = spec.train.model_copy(update={"steps": wish.num_steps})
        self._spec = spec.model_copy(update={"train": train})
        self._layout = RoleCounts(
            num_learners=wish.num_learners, num_engines=wish.num_engines, num_workers=0, is_shared=False
        )
        self._algorithm = build_algorithm(spec.algorithm, spec.reference, spec.train)
        schedule = schedule_examples(self._spec, given.task)
        if schedule is None:
            raise ConfigError(
                f"train.terms={spec.train.terms!r} samples no rollouts",
                allowed="a run with rollouts",
                next_step="simulate a run whose train.terms names 'rl'",
            )
        self._schedule = schedule
        self._tally = _Tally()
        self._learner = SimulatedLearner(shape=given.work.size)

    async def run(self) -> Simulation:
        given, spec = self._given, self._spec
        self._engines = self._build_engines()
        judge = ChanceJudge(given.wish.solved_frac, seed=spec.seed, judge_s=typical_reply_s(spec.task))
        roles = Roles(
            learner=self._learner,  # type: ignore[arg-type]
            engine=self._router,
            publisher=self,  # type: ignore[arg-type]
            tokenizer=given.tokenizer,
        )
        collector = Collector(spec, given.task, judge, roles, on_group=lambda: None)
        self._source = collector.open_buffer(self._algorithm, self._schedule, first_number=0, first_step=0)
        published_step = 0
        await self._publish()
        begun_at = self._now()
        try:
            for step in range(spec.train.steps):
                published_step = await self._step(step, published_step)
        finally:
            counts = {**self._source.counts, "ahead": self._source.num_ahead}
            await self._source.close()
            await self._router.close()
        return self._sum_up(self._now() - begun_at, counts)

    def _build_engines(self) -> list[WatchedEngine]:
        given, wish = self._given, self._given.wish
        speed = simulated_speed(given.work, given.speeds, self._layout, wish)
        first_seed, clock = self._spec.seed << 20, asyncio.get_running_loop().time
        engines = [
            WatchedEngine(SimulatedEngine(speed=speed, trouble=wish.trouble, seed=first_seed + index), clock)
            for index in range(wish.num_engines)
        ]
        self._max_num_seqs = speed.max_num_seqs
        self._router = Router(
            {f"engine-{index}": engine for index, engine in enumerate(engines)},
            limits=RouterLimits(max_running=speed.max_num_seqs),
            on_event=lambda event: self._tally.events.update([event.cause.value]),
        )
        return engines

    async def _step(self, step: int, published_step: int) -> int:
        """Do one step as the training loop does; return the step whose weights the engines serve."""
        times = [self._now()]
        self._source.admit(published_step)
        collected = await self._source.take()
        times.append(self._now())
        task, groups = self._given.task, collected.groups
        limit_P = [limits_of(task, group.example).max_reply_tokens for group in groups]
        batch = build_batch(self._algorithm, groups, task.limits.max_reply_tokens, limit_P)
        await asyncio.sleep(self._learn_s(batch))
        times.append(self._now())
        self._count(collected, batch)
        self._learner.version += 1
        if (step + 1) % self._spec.train.sync_every == 0:
            if self._spec.train.deterministic:
                await self._source.settle()
            await self._publish()
            published_step = step + 1
        times.append(self._now())
        for stage, begun, ended in zip(("generate", "learn", "sync"), times, times[1:], strict=False):
            self._tally.seconds[stage].append(ended - begun)
        self._tally.ends_s.append(times[-1])
        return published_step

    def _learn_s(self, batch: TrainBatch) -> float:
        """Return how long the learner takes for what a batch forwards."""
        positions = sum(group.num_positions for group in batch.groups)
        scored = sum(int(reply.is_scored.sum()) for group in batch.groups for reply in group.replies)
        return learn_s(self._given.work, self._given.speeds, self._layout, positions, scored)

    async def _publish(self) -> None:
        update = WeightUpdate(
            version=self._learner.version,
            digest=str(self._learner.version),
            transport=WeightTransport.BROADCAST,
            mode=UpdateMode(self._spec.engine.update_mode),
        )
        await self._router.update(update)

    def _count(self, collected: Batch, batch: TrainBatch) -> None:
        """Count what a batch holds. Before the version moves on, as the loop does."""
        tally = self._tally
        for fate, num_groups in Counter(sort_by_status(collected.groups, batch)).items():
            self._source.note(fate, num_groups)
        tally.num_tokens += sum(r.num_new_tokens for group in collected.groups for r in group.rollouts)
        tally.num_wasted += sum(r.num_new_tokens for _, group in collected.discarded for r in group.rollouts)
        for group in collected.groups:
            staleness = find_staleness([group], self._learner.version)
            if staleness is not None:
                tally.staleness[staleness] += 1
            tally.num_lost += sum(not rollout.outcome.is_scored for rollout in group.rollouts)

    def _sum_up(self, passed_s: float, counts: Mapping[str, int]) -> Simulation:
        tally, wish = self._tally, self._given.wish
        periods = [after - before for before, after in zip(tally.ends_s, tally.ends_s[1:], strict=False)]
        num_groups = max(tally.staleness.total(), 1)
        engine_s = max(passed_s, 1e-9) * wish.num_engines
        return Simulation(
            num_engines=wish.num_engines,
            num_learners=wish.num_learners,
            num_steps=len(tally.ends_s),
            simulated_s=passed_s,
            step_s=median(periods or [passed_s]),
            seconds={stage: median(values) for stage, values in tally.seconds.items()},
            scored_tokens_per_s=tally.num_tokens / max(passed_s, 1e-9),
            engine_busy_frac=sum(engine.busy.take_s() for engine in self._engines) / engine_s,
            engine_rows_frac=sum(engine.row_s for engine in self._engines) / (engine_s * self._max_num_seqs),
            learner_busy_frac=sum(tally.seconds["learn"]) / max(passed_s, 1e-9),
            staleness={age: number / num_groups for age, number in sorted(tally.staleness.items())},
            fates=dict(counts),
            wasted_token_frac=tally.num_wasted / max(tally.num_wasted + tally.num_tokens, 1),
            num_lost_rollouts=tally.num_lost,
            engine_events=dict(sorted(tally.events.items())),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def main(words: Sequence[str] | None = None) -> int:
    """Simulate a run file; print what came of it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--engines", type=int, help="engine replicas; left out: placement.engines")
    parser.add_argument("--learners", type=int, help="ranks; left out: placement.learners")
    parser.add_argument("--hardware", help="h100, l4, ...: one for each engine and each rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stragglers", type=float, default=0.0, help="share of engines that are slow in all")
    parser.add_argument("--straggler-factor", type=float, default=3.0)
    parser.add_argument("--failures", type=float, default=0.0, help="how often one engine dies, per hour")
    parser.add_argument("--repair", type=float, default=60.0, help="seconds after which it answers again")
    parser.add_argument("--solved", type=float, default=0.5, help="mean chance that a reply is right")
    parser.add_argument("--sigma", type=float, default=0.6, help="spread of log-normal reply lengths")
    given = parser.parse_args(words)
    resolved = load_spec(given.run_file, given.overrides)
    layout = resolved.spec.layout
    wish = SimulationWish(
        num_engines=layout.num_engines if given.engines is None else given.engines,
        num_learners=layout.num_learners if given.learners is None else given.learners,
        num_steps=given.steps,
        trouble=SimulatedTrouble(
            straggler_frac=given.stragglers,
            straggler_factor=given.straggler_factor,
            mean_life_s=3600.0 / given.failures if given.failures else math.inf,
            repair_s=given.repair,
        ),
        solved_frac=given.solved,
        reply_sigma=given.sigma,
    )
    accelerator = None if given.hardware is None else find_accelerator(given.hardware)
    print(json.dumps(asdict(simulate_run(resolved, wish, accelerator=accelerator)), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
