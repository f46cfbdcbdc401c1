"""What is derived from timings, by hand; and one real measurement of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rivals import settled_dtype
from strop.hardware import describe_machine, read_calibration
from strop.hardware.efficiency import read_efficiency
from strop.run.measuring import (
    FEW_ROWS,
    MANY_ROWS,
    PROMPT_TOKENS,
    REPLY_TOKENS,
    Timings,
    derive_efficiency,
    make_groups,
    measure_machine,
    shortest_s,
)
from strop.spec import RunSpec
from tests.plan.test_estimate import SIZE


def derive(timings: Timings) -> tuple[float, float, float, float]:
    found = derive_efficiency(
        timings,
        SIZE,
        dtype="bfloat16",
        gflops=1e-3,
        copy_gb_per_s=1e-6,
        cpu_name="c",
        source="by hand",
    )
    assert (found.cpu_name, found.source, found.is_measured) == ("c", "by hand", True)
    return found.learn_frac, found.decode_frac, found.decode_layer_s, found.update_frac


def test_shares_follow_from_the_difference_of_two_sizes() -> None:
    # A product does 1e6 operations a second. A reply of 24 tokens costs 2 x 2000 x 24 = 96,000: at half the
    # speed 0.192 s. Prefill of 16 tokens: 2 x 1000 x 16 = 32,000, 0.032 s. Overhead: 24 steps of 0.1 s.
    few_s, many_s = (2.4 + 0.032 + rows * 0.192 for rows in (FEW_ROWS, MANY_ROWS))
    # 100 positions and as many scores: 6 x 2000 x 100 = 1.2e6; at a quarter of the speed 4.8 s.
    # The optimizer moves 2000 x 18 bytes at half of 1000 a second: 72 s.
    timings = Timings(
        few_rows_s=few_s,
        many_rows_s=many_s,
        small_step_s=72 + 4.8,
        large_step_s=72 + 48.0,
        num_small=100,
        num_large=1000,
    )
    learn, decode, layer_s, update = derive(timings)
    assert (PROMPT_TOKENS, REPLY_TOKENS) == (16, 24)
    assert learn == pytest.approx(0.25)
    assert decode == pytest.approx(0.5)
    # SIZE has one layer.
    assert layer_s == pytest.approx(0.1)
    assert update == pytest.approx(0.5)


def test_timings_of_a_busy_machine_give_shares_all_the_same() -> None:
    # Many rows faster than few, a large step faster than a small one.
    timings = Timings(
        few_rows_s=2.0, many_rows_s=1.0, small_step_s=2.0, large_step_s=1.0, num_small=100, num_large=1000
    )
    learn, decode, layer_s, update = derive(timings)
    assert (learn, decode) == (1.0, 1.0)
    assert layer_s >= 0.0
    assert 0.0 < update <= 1.0


def test_the_shortest_try_counts_and_the_first_does_not() -> None:
    calls: list[int] = []
    assert shortest_s(lambda: calls.append(0), 3) >= 0.0
    assert len(calls) == 4


def test_nearly_all_positions_of_a_measured_step_are_scored() -> None:
    groups = make_groups(3, 50)
    assert len(groups) == 3
    # One prompt token and eight replies, whose last tokens are not fed: 1 + 8 x 23 = 185.
    assert groups[0].num_positions == 185
    assert sum(reply.weight * 24 for group in groups for reply in group.replies) == pytest.approx(1.0)


def test_a_machine_is_measured_once_and_remembered(tiny_model_dir: Path, tmp_path: Path) -> None:
    spec = RunSpec.model_validate(
        {"name": "x", "task": {"name": "arithmetic"}, "train": {"micro_batch_tokens": 400}}
    )
    found = measure_machine(spec, tiny_model_dir, cache_dir=tmp_path, time_limit_s=0.01)
    assert found == read_efficiency(tmp_path)
    assert found.is_measured
    assert found.cpu_name == describe_machine().cpu_name
    model = f"HuggingFaceTB/SmolLM2-135M-Instruct in {settled_dtype()}"
    assert found.source.startswith(f"measured here with {model}")
    assert read_calibration(tmp_path) is not None
