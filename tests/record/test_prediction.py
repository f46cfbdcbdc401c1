"""Planned and measured numbers side by side, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CorruptRecord
from strop.record.prediction import (
    PRICE_VARIABLE,
    Prediction,
    compare_prediction,
    read_prediction,
    read_usd_per_hour,
    scale_to_work,
    write_prediction,
)

PLANNED = Prediction(
    hardware="abacus",
    basis="measured by hand",
    is_measured=True,
    is_overlapped=False,
    seconds={"generate": 2.0, "verify": 0.5, "learn": 4.0, "sync": 0.0},
    step_s=6.5,
    scored_tokens_per_s=100.0,
    num_reply_tokens=640.0,
    num_positions=700.0,
    memory_bytes=4e9,
    bottleneck="learn",
)


def step(generate_s: float, learn_s: float) -> dict[str, float]:
    return {
        "seconds_generate": generate_s,
        "seconds_learn": learn_s,
        "seconds_sync": 0.0,
        "seconds_step": generate_s + learn_s,
        "peak_memory_bytes": 1e9 * learn_s,
    }


def test_a_prediction_is_kept_and_read_again(tmp_path: Path) -> None:
    assert read_prediction(tmp_path) is None
    write_prediction(tmp_path, PLANNED)
    assert read_prediction(tmp_path) == PLANNED
    (tmp_path / "plan.json").write_text('{"hardware": "abacus"}')
    with pytest.raises(CorruptRecord, match=r"plan\.json is no prediction"):
        read_prediction(tmp_path)


def test_medians_behind_the_first_step_are_compared() -> None:
    # The first step is no measure: 90 s of compiling.
    steps = [step(90.0, 90.0), step(1.0, 3.0), step(3.0, 5.0), step(2.0, 7.0)]
    found = {one.name: one for one in compare_prediction(PLANNED, steps)}
    assert (found["generate"].measured, found["generate"].ratio) == (2.0, 1.0)
    assert (found["learn"].measured, found["learn"].ratio) == (5.0, 1.25)
    # Steps of 4, 8 and 9 s.
    assert found["step"].measured == 8.0
    # The highest of all, 7 GB.
    assert (found["memory peak"].measured, found["memory peak"].planned) == (7e9, 4e9)
    # Nothing was planned for publishing, so there is no ratio; judging was not measured.
    assert found["sync"].ratio is None
    assert "verify" not in found
    assert compare_prediction(PLANNED, steps[:1]) == []


def test_a_price_by_the_hour_prices_a_step() -> None:
    priced = replace(PLANNED, usd_per_hour=36.0)
    found = {one.name: one for one in compare_prediction(priced, [step(9.0, 9.0), step(3.0, 5.0)])}
    # 36 USD an hour are a cent a second.
    assert found["price of a step"].unit == "USD"
    assert found["price of a step"].planned == pytest.approx(0.065)
    assert found["price of a step"].measured == pytest.approx(0.08)
    assert "price of a step" not in {one.name for one in compare_prediction(PLANNED, [step(1.0, 1.0)] * 2)}


@pytest.mark.parametrize(
    ("said", "expected"),
    [("20", 20.0), ("0.5", 0.5), ("", None), ("much", None), ("nan", None), ("-1", None), (None, None)],
)
def test_only_a_price_is_a_price(said: str | None, expected: float | None) -> None:
    assert read_usd_per_hour({} if said is None else {PRICE_VARIABLE: said}) == expected


def test_of_stages_that_overlap_the_wait_is_compared() -> None:
    ahead = replace(PLANNED, is_overlapped=True, step_s=4.5)
    found = compare_prediction(ahead, [step(9.0, 9.0), step(0.25, 4.0)])
    # 4.5 s a step, of which 4 s learn and 0.5 s judge: nothing is waited for.
    (wait,) = (one for one in found if one.name == "wait for rollouts")
    assert (wait.planned, wait.measured) == (0.0, 0.25)
    # On an accelerator the process's own memory says nothing.
    without = replace(ahead, memory_bytes=0.0)
    assert all(one.name != "memory peak" for one in compare_prediction(without, [step(9.0, 9.0)] * 2))


def test_longer_replies_take_longer_and_shorter_ones_no_less() -> None:
    assert scale_to_work(PLANNED, {"num_scored_tokens": 1280.0, "num_positions": 350.0}) == {
        # Twice the tokens; half the positions.
        "generate": 4.0,
        "verify": 0.5,
        "learn": 4.0,
        "sync": 0.0,
    }
    assert scale_to_work(replace(PLANNED, num_positions=0.0), {})["learn"] == 4.0
