"""Engines and learner under attempts whose lengths differ by two orders of magnitude, on simulated time.

An attempt has 1 to 100 turns, as many short ones as long ones (log-uniform), and each turn waits for a tool.
Real are the source that samples ahead, the walk of every attempt, the router and the credit; simulated are
the engine, the learner and the clock. The learner takes as long for a batch as the full engine, or half as
long: then the engine is what it waits for. What is asked: how busy both are, beside the synchronous run.

The prompt's prefix counts as cached: a turn's prefill takes no time. The first quarter of the steps is left
out: nothing is ahead when a run begins.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

from benchmarks.figures import Figure, Measured
from benchmarks.simulation import SimulatedLearner, WatchedEngine
from strop.algorithm import build_algorithm
from strop.cluster import Roles
from strop.engine.contract import UpdateMode, WeightTransport, WeightUpdate
from strop.engine.router import Router, RouterLimits
from strop.environments.contract import Done
from strop.environments.worlds import BuiltInWorld
from strop.rollout import Example, Split
from strop.spec import RunSpec
from strop.spec.task import EnvironmentSection
from strop.tasks import Task
from strop.tasks.contract import TaskLimits
from strop.tasks.judging import InlineJudge
from strop.testing.simulated_engine import SimulatedEngine, SimulatedSpeed
from strop.testing.virtual_time import run_virtually
from strop.tokenizer import Tokenizer
from strop.train.batch import build_batch, schedule_examples
from strop.train.generation import Collector, find_staleness

MAX_TURNS = 100
REPLY_TOKENS = 30
TOOL_S = 0.5
ROWS = 32
SPEED = SimulatedSpeed(
    median_reply_tokens=REPLY_TOKENS,
    reply_sigma=0.3,
    prefill_tokens_per_s=1e12,
    step_base_s=0.010,
    step_row_s=0.0001,
    max_num_seqs=ROWS,
    max_cache_tokens=10**9,
    update_s=0.5,
)
LEARNED_TOKENS_PER_S = ROWS / (SPEED.step_base_s + ROWS * SPEED.step_row_s)
"""Tokens that the learner takes in a second: those of the full engine."""
ARMS = ((0, "drain", 1), (2, "drain", 1), (8, "continue", 1), (16, "continue", 1), (16, "continue", 2))
"""Steps ahead, what an update does to replies under way, and how many times as fast the learner is."""


class ErrandsSpec(EnvironmentSection):
    """Attempts of very different lengths."""

    name: Literal["errands"] = "errands"
    num_train: int = 4096
    num_held_out: int = 1


class Errands:
    """Takes a number of turns that nobody knows before."""

    name = "errands"
    version = "1"
    max_turns = MAX_TURNS
    limits = TaskLimits(max_reply_tokens=8 * REPLY_TOKENS)
    _num_made: ClassVar[Counter[str]] = Counter()

    def __init__(self, spec: ErrandsSpec) -> None:
        self._left = 0
        self._draws = random.Random(0)

    def examples(self, split: Split) -> Sequence[dict[str, Any]]:
        """Return errands by number."""
        return [{"split": split, "number": n} for n in range(4096 if split is Split.TRAIN else 1)]

    def reset(self, example: Example, seed: int) -> str:
        """Draw the length: every attempt has its own, also within a group."""
        made = self._num_made[example.example_id]
        self._num_made[example.example_id] += 1
        self._draws = random.Random(f"{example.example_id} {made}")
        self._left = round(MAX_TURNS ** self._draws.random())
        return "Begin."

    async def step(self, text: str) -> str | Done:
        """Wait for a tool."""
        self._left -= 1
        await asyncio.sleep(TOOL_S * self._draws.expovariate(1.0))
        return Done() if self._left < 1 else "Go on."

    def score(self) -> float:
        """Draw it too."""
        return float(self._draws.random() < 0.5)

    def gold_replies(self, example: Example) -> Sequence[tuple[str, ...]]:
        """Return none that is known."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """How a simulated run spent its time. Times are simulated seconds."""

    max_staleness: int
    update_mode: str
    learner_factor: int
    step_s: float
    tokens_per_s: float
    rows_frac: float
    """Mean share of its rows that are taken."""
    learner_frac: float
    """Share of the time in which the learner learns."""
    staleness_mean: float
    staleness_max: int
    longest_turns: int
    shortest_turns: int
    num_evicted: int


def run_once(
    tokenizer: Tokenizer,
    max_staleness: int,
    num_steps: int,
    mode: str = "drain",
    factor: int = 1,
    num_prompts: int = 4,
) -> Shares:
    """Run the schedule of a run file on simulated time. Equal input gives an equal result."""
    Errands._num_made.clear()
    spec = RunSpec.model_validate(
        {
            "name": "long-tail",
            "task": {"name": "guess-number"},
            "placement": {"kind": "process"},
            "engine": {"update_mode": mode},
            "train": {
                # It goes on behind the last step that is counted: else nothing is sampled for later ones.
                "steps": num_steps + max_staleness + 1,
                "prompts_per_step": num_prompts,
                "group_size": 8,
                "max_staleness": max_staleness,
            },
        }
    )
    task = BuiltInWorld(ErrandsSpec(), Errands)
    return run_virtually(_run(spec, cast("Task", task), tokenizer, num_steps, factor))


async def _run(spec: RunSpec, task: Task, tokenizer: Tokenizer, num_steps: int, factor: int) -> Shares:
    loop = asyncio.get_running_loop()
    engine = WatchedEngine(SimulatedEngine(speed=SPEED, say=lambda request: "ok"), loop.time)
    # What waits does so at the router, and is in no row.
    router = Router({"engine": engine}, limits=RouterLimits(max_running=ROWS, max_group_lead=0))
    learner = SimulatedLearner(shape=SimpleNamespace(max_positions=10**9))
    roles = Roles(
        learner=cast("Any", learner), engine=router, publisher=cast("Any", None), tokenizer=tokenizer
    )
    algorithm = build_algorithm(spec.algorithm, spec.reference, spec.train)
    schedule = schedule_examples(spec, task)
    assert schedule is not None
    collector = Collector(spec, task, InlineJudge(task), roles, on_group=lambda: None)
    source = collector.open_buffer(algorithm, schedule, first_number=0, first_step=0)
    num_tokens, learned_s, turns = 0, 0.0, list[int]()
    ages: list[int] = []
    publish = partial(_publish, router, UpdateMode(spec.engine.update_mode))
    await publish(0)
    begun_at, row_s, num_left_out = loop.time(), 0.0, num_steps // 4
    for step in range(num_steps):
        if step == num_left_out:
            begun_at, row_s, num_tokens, learned_s = loop.time(), engine.row_s, 0, 0.0
        source.admit(step)
        groups = (await source.take()).groups
        build_batch(algorithm, groups, task.limits.max_reply_tokens * MAX_TURNS)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert all(rollout.outcome.is_scored for rollout in rollouts)
        new = sum(rollout.num_sampled_tokens for rollout in rollouts)
        turns += [sum(turn.is_sampled for turn in rollout.turns) for rollout in rollouts]
        ages += [find_staleness([group], learner.version) or 0 for group in groups]
        begun_learning_at = loop.time()
        await asyncio.sleep(new / (factor * LEARNED_TOKENS_PER_S))
        learned_s += loop.time() - begun_learning_at
        num_tokens += new
        learner.version += 1
        await publish(step + 1)
    passed_s = loop.time() - begun_at
    num_evicted = source.counts["evicted"]
    await source.close()
    await router.close()
    return Shares(
        max_staleness=spec.train.max_staleness,
        update_mode=spec.engine.update_mode,
        learner_factor=factor,
        step_s=passed_s / (num_steps - num_left_out),
        tokens_per_s=num_tokens / passed_s,
        rows_frac=(engine.row_s - row_s) / passed_s / ROWS,
        learner_frac=learned_s / passed_s,
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        longest_turns=max(turns),
        shortest_turns=min(turns),
        num_evicted=num_evicted,
    )


async def _publish(router: Router, mode: UpdateMode, version: int) -> None:
    await router.update(
        WeightUpdate(version=version, digest=str(version), transport=WeightTransport.BROADCAST, mode=mode)
    )


def measure_long_tail(model_dir: Path, *, is_quick: bool) -> Measured:
    """Run the synchronous schedule and those that sample ahead."""
    tokenizer, num_steps = Tokenizer.load(model_dir), 4 if is_quick else 28
    arms = (ARMS[0], ARMS[2]) if is_quick else ARMS
    found = [run_once(tokenizer, ahead, num_steps, mode, factor) for ahead, mode, factor in arms]
    longest = max((one for one in found if one.learner_factor == 1), key=lambda one: one.max_staleness)
    gain = longest.learner_frac / found[0].learner_frac
    name = f"learner busy, {longest.max_staleness} steps ahead beside synchronous"
    figures = [_figure(name, gain, 1.5 if is_quick else 5.0, unit="times")]
    for one in found:
        name = f"{one.max_staleness} steps ahead, {one.update_mode}"
        name += ", fast learner" if one.learner_factor > 1 else ""
        # Who is waited for has no pause: the learner, or where that is faster the engine.
        goals = {"learner": 0.9} if one.learner_factor == 1 else {"rows": 0.8}
        if is_quick or one.max_staleness < ARMS[-1][0]:
            goals = {}
        figures += [
            _figure(f"learner busy, {name}", one.learner_frac, goals.get("learner")),
            _figure(f"engine's rows taken, {name}", one.rows_frac, goals.get("rows")),
            _figure(f"tokens, {name}", one.tokens_per_s, unit="a simulated s"),
        ]
    return Measured(figures=tuple(figures), details={"runs": [_to_json(one) for one in found]})


def _figure(name: str, value: float, at_least: float | None = None, unit: str = "share") -> Figure:
    return Figure(name=name, unit=unit, value=value, measured=(value,), at_least=at_least)


def _to_json(one: Shares) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Shares.__slots__}
