"""The harness: ratios by hand, and two dummy arms in real processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.cases import CASES
from benchmarks.harness import Arm, ArmFailed, ArmProcess, Protocol, measure_pairs, pair_order
from benchmarks.prompts import make_prompts, write_prompts
from benchmarks.ratio import summarize_ratios
from benchmarks.verifier import forced_rewards, last_number_reward, signal_tokens, zero_variance_frac

CASE = CASES["grpo-32-forced"]


def dummy(name: str, **settings: float) -> Arm:
    fields = {"scored_tok": 100, **settings}
    return Arm(name=name, python=Path(sys.executable), module="tests.benchmarks.dummy_arm", settings=fields)


def test_pairs_alternate_which_arm_goes_first() -> None:
    # A B, B A, A B: read in one line that is A B B A A B.
    assert pair_order(3) == [(0, 1), (1, 0), (0, 1)]


def test_both_arms_get_the_same_prompts_and_keep_their_own_figures(tmp_path: Path) -> None:
    arms = (dummy("strop", step_s=2.0), dummy("rival", step_s=10.0))
    protocol = Protocol(model_dir=tmp_path, num_pairs=3, num_warm_ups=1)
    turns = measure_pairs(CASE, arms, protocol)
    assert len(turns.warm_ups) == 2
    assert [pair["strop"]["step"] for pair in turns.pairs] == [1, 2, 3]
    for pair in turns.pairs:
        assert pair["strop"]["answers"] == pair["rival"]["answers"]
        assert len(pair["strop"]["answers"]) == CASE.num_prompts
        assert pair["rival"]["step_s"] / pair["strop"]["step_s"] == 5.0
    assert turns.ready["rival"]["t_start"] > 0


def test_an_arm_that_ends_early_is_named_with_its_last_words(tmp_path: Path) -> None:
    arms = (dummy("strop", step_s=2.0), dummy("rival", step_s=1.0, fails_at=1))
    with pytest.raises(ArmFailed, match=r"(?s)arm rival ended with code 1:.*as ordered"):
        measure_pairs(CASE, arms, Protocol(model_dir=tmp_path, num_pairs=3, num_warm_ups=1))


def test_nothing_that_a_worker_started_outlives_it(tmp_path: Path) -> None:
    """Incident: a rival's engine processes kept both cores busy after its worker had ended."""
    write_prompts(tmp_path / "prompts.json", make_prompts(CASE, 1))
    arm = dummy("strop", step_s=1.0, helper_s=600)
    worker = ArmProcess(arm, CASE, Protocol(model_dir=tmp_path), tmp_path)
    helper_pid = int(worker.wait_until_ready()["helper_pid"])
    assert Path(f"/proc/{helper_pid}").exists()
    worker.close()
    deadline = time.monotonic() + 60
    while is_running(helper_pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(helper_pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # An ended orphan may wait a moment for its new parent.


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    summary = summarize_ratios([8.0] * 6)
    assert (summary.median, summary.low, summary.high, summary.num_pairs) == (8.0, 8.0, 8.0, 6)


def test_the_interval_holds_the_median_and_stays_within_the_pairs() -> None:
    # Sorted: 5, 7, 8, 9, 10, 40. Median (8 + 9) / 2; one outlier does not move it.
    summary = summarize_ratios([8.0, 40.0, 7.0, 9.0, 5.0, 10.0])
    assert summary.median == 8.5
    assert 5.0 <= summary.low < 8.5 < summary.high <= 40.0


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs were measured"):
        summarize_ratios([])


@pytest.mark.parametrize(
    ("text", "reward"),
    [("2 + 3 = 5", 1.0), ("5, no: 6", 0.0), ("", 0.0), ("none", 0.0), ("It is 5.", 1.0), ("-5", 0.0)],
)
def test_the_last_number_decides(text: str, reward: float) -> None:
    assert last_number_reward(text, "5") == reward


def test_forced_rewards_give_every_group_variance_and_differ_by_step() -> None:
    rewards = forced_rewards(8, 8, seed=3)
    assert zero_variance_frac(rewards, 8) == 0.0
    assert sum(rewards) == 32.0
    assert rewards != forced_rewards(8, 8, seed=4)


def test_only_tokens_of_groups_with_variance_count_as_signal() -> None:
    # Group 0: all 1, no signal. Group 1: 1, 0 with mean 1/2: both rows, 3 + 4 tokens.
    # Group 2 of rewards 0, 0: no signal. So 7 tokens and 2 of 3 groups without variance.
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert signal_tokens(rewards, [1, 2, 3, 4, 5, 6], 2) == 7
    assert zero_variance_frac(rewards, 2) == pytest.approx(2 / 3)
