"""Schedules on simulated time: what theory says of them, and what must hold whatever goes wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation import (
    ChanceJudge,
    Simulation,
    SimulationInput,
    SimulationWish,
    simulate,
    simulated_speed,
)
from strop.errors import ConfigError
from strop.plan.estimate import learn_s
from strop.plan.roles import RoleCounts
from strop.plan.rollouts import Work
from strop.spec import RunSpec
from strop.tasks import build_task
from strop.testing.simulated_engine import SimulatedTrouble
from strop.tokenizer import Tokenizer
from tests.plan.test_estimate import HALF, SIZE, make_speeds

# A million operations a second: a step of the tiny model's size takes seconds.
DEVICES = make_speeds(is_processor=False, memory_bytes=10**9, efficiency=replace(HALF, decode_layer_s=0.05))


def run_it(tmp_path: Path, tiny_model_dir: Path, wish: SimulationWish, **train: Any) -> Simulation:
    values = {"prompts_per_step": 8, "group_size": 4, "steps": 99} | train
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "model": {"dtype": "bfloat16"},
            "task": {"name": "arithmetic", "max_reply_tokens": 32},
            "placement": {"kind": "process"},
            "train": values,
        }
    )
    work = Work(
        spec=spec,
        size=replace(SIZE, max_positions=512),
        prompt_tokens_mean=30.0,
        max_reply_tokens=32,
        num_eval_examples=0,
        num_evals=0,
    )
    given = SimulationInput(
        work=work,
        speeds=DEVICES,
        wish=wish,
        task=build_task(spec.task),
        tokenizer=Tokenizer.load(tiny_model_dir),
    )
    return simulate(given)


def test_groups_end_in_one_way_each_and_time_is_shared_out(tmp_path: Path, tiny_model_dir: Path) -> None:
    found = run_it(tmp_path, tiny_model_dir, SimulationWish(num_engines=2, num_steps=5))
    # 5 steps of 8 groups, none ahead, none stale.
    assert found.fates["started"] == 40
    assert sum(found.fates[name] for name in ("trained", "skipped", "filtered", "evicted", "failed")) == 40
    assert found.staleness == {0: 1.0}
    assert (found.num_steps, found.num_lost_rollouts, found.wasted_token_frac) == (5, 0, 0.0)
    assert found.engine_events == {}
    # One stage after the other: they add up to the step.
    assert sum(found.seconds.values()) == pytest.approx(found.step_s, rel=0.3)
    assert 0.0 < found.engine_busy_frac < 1.0
    assert 0.0 < found.learner_busy_frac < 1.0
    assert found.engine_rows_frac <= found.engine_busy_frac


def test_equal_input_gives_an_equal_result(tmp_path: Path, tiny_model_dir: Path) -> None:
    wish = SimulationWish(
        num_engines=3,
        num_steps=4,
        trouble=SimulatedTrouble(straggler_frac=0.5, mean_life_s=60.0, repair_s=5.0),
    )
    first, second = (run_it(tmp_path, tiny_model_dir, wish, max_staleness=1) for _ in range(2))
    assert first == second


def test_sampling_ahead_hides_the_shorter_stage(tmp_path: Path, tiny_model_dir: Path) -> None:
    wish = SimulationWish(num_engines=1, num_steps=12)
    step_by_step = run_it(tmp_path, tiny_model_dir, wish)
    ahead = run_it(tmp_path, tiny_model_dir, wish, max_staleness=1)
    generate_s, rest_s = step_by_step.seconds["generate"], step_by_step.seconds["learn"]
    assert ahead.step_s < 0.9 * step_by_step.step_s
    assert ahead.step_s >= 0.8 * max(generate_s, rest_s)
    assert max(ahead.staleness) == 1
    assert ahead.scored_tokens_per_s > step_by_step.scored_tokens_per_s


def test_slow_and_dying_engines_cost_time_and_lose_no_group(tmp_path: Path, tiny_model_dir: Path) -> None:
    steady = run_it(tmp_path, tiny_model_dir, SimulationWish(num_engines=4, num_steps=8))
    slow = SimulationWish(
        num_engines=4, num_steps=8, trouble=SimulatedTrouble(straggler_frac=1.0, straggler_factor=4.0)
    )
    # All engines are four times slower.
    assert run_it(tmp_path, tiny_model_dir, slow).seconds["generate"] == pytest.approx(
        4 * steady.seconds["generate"], rel=0.05
    )
    dying = SimulationWish(
        num_engines=4, num_steps=8, trouble=SimulatedTrouble(mean_life_s=6.0, repair_s=1.0)
    )
    found = run_it(tmp_path, tiny_model_dir, dying)
    assert found.engine_events["replica_lost"] >= 1
    assert found.fates["started"] == 64
    assert sum(found.fates[name] for name in ("trained", "skipped", "filtered", "evicted", "failed")) == 64


def test_hundreds_of_engines_with_stragglers_and_deaths_lose_no_group(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    wish = SimulationWish(
        num_engines=300,
        num_steps=3,
        trouble=SimulatedTrouble(straggler_frac=0.05, mean_life_s=180.0, repair_s=5.0),
    )
    found = run_it(tmp_path, tiny_model_dir, wish, prompts_per_step=300, max_staleness=1)
    assert found.fates["started"] == 900
    assert sum(found.fates[name] for name in ("trained", "skipped", "filtered", "evicted", "failed")) == 900
    assert found.engine_events["replica_lost"] >= 3
    assert max(found.staleness) == 1
    # Only a rollout that two engines in turn did not answer.
    assert found.num_lost_rollouts < 0.01 * 3600


def test_a_simulated_engine_has_the_plans_speed() -> None:
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "model": {"dtype": "bfloat16"},
            "task": {"name": "arithmetic"},
            "placement": {"kind": "process"},
        }
    )
    work = Work(
        spec=spec, size=SIZE, prompt_tokens_mean=5.0, max_reply_tokens=8, num_eval_examples=0, num_evals=0
    )
    layout = RoleCounts(num_learners=1, num_engines=1, num_workers=0, is_shared=False)
    speed = simulated_speed(work, DEVICES, layout, SimulationWish(num_engines=1, reply_sigma=0.0))
    # Half of 1e6 operations a second. A token: 2 x 2000 and attention 4 x 10 x 8 = 4320; a prompt token 2000.
    assert speed.step_row_s == pytest.approx(4320 / 5e5)
    assert speed.prefill_tokens_per_s == pytest.approx(250.0)
    assert (speed.step_base_s, speed.median_reply_tokens, speed.max_num_seqs) == (0.05, 6.0, 64)
    # Slow memory: every step reads 4000 bytes of weights and 64 rows x 8 x 40 of cache, whatever the rows.
    bound = simulated_speed(work, replace(DEVICES, copy_gb_per_s=1e-9), layout, SimulationWish(num_engines=1))
    assert bound.step_base_s == pytest.approx(0.05 + 24_480)
    assert bound.step_row_s == 0.0
    # And a learner the plan's.
    assert learn_s(work, DEVICES, layout, 0.0, 0.0) == pytest.approx(0.0, abs=1e-6)


def test_chances_have_the_mean_that_was_asked_for() -> None:
    judge = ChanceJudge(0.25, seed=3, judge_s=0.0)
    chances = [judge.chance(str(number)) for number in range(4000)]
    # The mean of u to the power 3 is 1/4; its deviation is 0.28, over 4000 draws 0.0045.
    assert sum(chances) / 4000 == pytest.approx(0.25, abs=0.02)
    assert judge.chance("7") == chances[7]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_engines": 0}, "--engines 0"),
        ({"num_engines": -2}, "--engines -2"),
        ({"num_learners": 0}, "--learners 0"),
        ({"num_steps": 0}, "--steps 0"),
        ({"trouble": SimulatedTrouble(straggler_frac=1.1)}, "--stragglers 1.1"),
        ({"trouble": SimulatedTrouble(straggler_factor=0.5)}, "--straggler-factor 0.5"),
        ({"trouble": SimulatedTrouble(mean_life_s=-3600.0)}, "--failures -1.0"),
        ({"trouble": SimulatedTrouble(repair_s=0.0)}, "--repair 0.0"),
        ({"solved_frac": 1.0}, "--solved 1.0"),
        ({"reply_sigma": -0.1}, "--sigma -0.1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said} cannot be simulated.*Allowed: .*Next: correct --"):
        SimulationWish(**{"num_engines": 1, **values})


def test_a_run_that_only_imitates_has_nothing_to_simulate(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "task": {"name": "arithmetic"},
            "train": {"terms": "sft"},
            "sft": {"source": "rows.jsonl"},
        }
    )
    work = Work(
        spec=spec, size=SIZE, prompt_tokens_mean=5.0, max_reply_tokens=8, num_eval_examples=0, num_evals=0
    )
    given = SimulationInput(
        work=work,
        speeds=DEVICES,
        wish=SimulationWish(num_engines=1),
        task=build_task(spec.task),
        tokenizer=Tokenizer.load(tiny_model_dir),
    )
    with pytest.raises(ConfigError, match="samples no rollouts"):
        simulate(given)
