"""Estimates by hand, on a model whose sizes are small round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strop.hardware import Calibration, Machine
from strop.launch.estimate import (
    Speeds,
    Work,
    choose_speeds,
    count_rows,
    estimate_time,
    list_assumptions,
    list_disk_parts,
    split_memory,
)
from strop.policy.footprint import (
    DEFAULT_MICRO_BATCH_POSITIONS,
    ModelSize,
    activation_bytes,
    cache_bytes,
    state_bytes,
)
from strop.spec import RunSpec

# Body: 1 layer x (2 x 10x10 + 2 x 10x10 + 3 x 10x20) = 1000 parameters; head and embedding: 100 x 10, tied.
SIZE = ModelSize(
    num_layers=1,
    hidden_width=10,
    mlp_width=20,
    num_heads=1,
    num_kv_heads=1,
    head_width=10,
    vocab_size=100,
    max_positions=64,
    is_tied=True,
)
MACHINE = Machine(
    host="h",
    platform="p",
    python="3",
    cpu_name="c",
    num_physical_cores=4,
    num_logical_cpus=8,
    memory_bytes=None,
    free_memory_bytes=None,
    load_average=None,
    cpu_flags=("avx512_bf16",),
    gpus=(),
)
MEASURED = Calibration(
    measured_at=0.0,
    cpu_name="c",
    num_threads=4,
    torch_version="2",
    gemm_fp32_gflops=50.0,
    gemm_bf16_gflops=200.0,
    copy_gb_per_s=8.0,
)


def make_spec(**sections: Any) -> RunSpec:
    base: dict[str, Any] = {
        "name": "x",
        "task": {"name": "arithmetic", "max_reply_tokens": 8},
        "train": {"prompts_per_step": 4, "rollouts_per_prompt": 4, "steps": 10},
    }
    return RunSpec.model_validate(base | sections)


def test_the_sizes_are_as_the_comment_says() -> None:
    assert (SIZE.body_params, SIZE.head_params, SIZE.num_params) == (1000, 1000, 2000)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_parts_of_memory_add_up_to_what_the_gate_counts(dtype: str) -> None:
    spec = make_spec(model={"dtype": dtype})
    parts = split_memory(spec, SIZE, 8)
    # 16 rows, each with 8 slots for its reply and its share of the 1,280 positions: 80.
    expected = (
        state_bytes(SIZE, dtype)
        + activation_bytes(SIZE, dtype, DEFAULT_MICRO_BATCH_POSITIONS)
        + cache_bytes(SIZE, dtype, 16, 88)
    )
    assert sum(part.amount for part in parts) == expected


def test_masters_gradients_and_moments_by_hand() -> None:
    amounts = {part.name: part.amount for part in split_memory(make_spec(), SIZE, 8)}
    # 2000 parameters: 4 bytes, 2 bytes, 4 bytes and twice 4 bytes each.
    assert amounts["weights (fp32 masters)"] == 8000
    assert amounts["compute copies"] == 4000
    assert amounts["gradients (fp32)"] == 8000
    assert amounts["moments (fp32)"] == 16000


def test_a_step_smaller_than_a_micro_batch_needs_less() -> None:
    # 4 prompts of 10 tokens, each with 4 replies of at most 8: 4 x (10 + 32) = 168 positions.
    names = [part.name for part in split_memory(make_spec(), SIZE, 8, 10)]
    assert "activations (168 positions)" in names


def test_an_engine_apart_holds_the_weights_once_more() -> None:
    apart = split_memory(make_spec(placement={"kind": "process"}), SIZE, 8)
    assert apart[-1].amount == 4000


def test_rows_and_disk() -> None:
    assert count_rows(make_spec()) == 16
    assert count_rows(make_spec(engine={"max_rows": 5})) == 5
    assert count_rows(make_spec(train={"prompts_per_step": 200, "rollouts_per_prompt": 4})) == 64
    # Two kept and one being written, each 2000 x (2 + 4 + 8) bytes.
    here = list_disk_parts(make_spec(), SIZE, is_mirrored=False)
    assert [part.amount for part in here] == [3 * 2000 * 14]
    # And the one that the mirror holds: 2 + 1 + 1.
    mirrored = list_disk_parts(make_spec(), SIZE, is_mirrored=True)
    assert sum(part.amount for part in mirrored) == 4 * 2000 * 14


def test_one_step_by_hand() -> None:
    speeds = Speeds(gflops=1e-3, copy_gb_per_s=1e9, source="", is_measured=True)
    work = Work(
        spec=make_spec(eval={"num_samples": None}),
        size=SIZE,
        prompt_tokens_mean=5.0,
        max_reply_tokens=8,
        num_eval_examples=2,
        num_evals=3,
    )
    found = estimate_time(work, speeds)
    seconds = {part.name: part.amount for part in found.step_parts}
    # Half of 1e6 operations a second: 5e5. 16 replies of 6 tokens (three quarters of 8) are 96 tokens.
    # Prefill 2 x 1000 x 4 x 5 = 40,000; decode 2 x 2000 x 96 = 384,000.
    assert seconds["generate"] == pytest.approx(424_000 / 5e5)
    # Half of the groups: 6 x (1000 x (20 + 96) / 2 + 1000 x 96 / 2) = 636,000.
    assert seconds["learn"] == pytest.approx(636_000 / 5e5)
    # Two examples, one reply each: 2 x 1000 x 10 + 2 x 2000 x 12 = 68,000.
    assert found.eval_s == pytest.approx(68_000 / 5e5)
    assert found.step_s == pytest.approx(1.06e6 / 5e5)
    assert found.total_s == pytest.approx(10 * 1.06e6 / 5e5 + 3 * 68_000 / 5e5)
    assert found.bottleneck == "learn (every step), bound by arithmetic"


def test_slow_memory_binds_generation() -> None:
    speeds = Speeds(gflops=1e9, copy_gb_per_s=1e-6, source="", is_measured=True)
    work = Work(
        spec=make_spec(),
        size=SIZE,
        prompt_tokens_mean=5.0,
        max_reply_tokens=80,
        num_eval_examples=0,
        num_evals=2,
    )
    found = estimate_time(work, speeds)
    # 60 tokens of all rows at once, each reading 2000 parameters of 2 bytes: 240,000 bytes at 1000 a second.
    assert found.step_parts[0].amount == pytest.approx(240.0)
    assert found.bottleneck == "generate (every step), bound by memory bandwidth"


def test_measured_speeds_are_those_of_the_number_format() -> None:
    fast = choose_speeds(make_spec(), MACHINE, MEASURED)
    slow = choose_speeds(make_spec(model={"dtype": "float32"}), MACHINE, MEASURED)
    assert (fast.gflops, slow.gflops, fast.is_measured) == (200.0, 50.0, True)


def test_speeds_that_nobody_measured_are_marked_and_say_how_to_measure() -> None:
    assumed = choose_speeds(make_spec(), MACHINE, None)
    assert (assumed.gflops, assumed.is_measured) == (240.0, False)
    assert assumed.source == "assumed: 60 GFLOP/s for each of 4 cores; `strop doctor` measures"
    plain = choose_speeds(make_spec(placement={"threads": 2}), replace(MACHINE, cpu_flags=()), None)
    assert plain.gflops == 50.0


def test_every_assumption_has_its_reason() -> None:
    assumptions = list_assumptions(8)
    assert [one.value for one in assumptions] == [6.0, 0.5, 0.5]
    assert all(one.why for one in assumptions)
