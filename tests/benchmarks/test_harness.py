"""The harness: ratios by hand, two dummy arms in real processes, and arms that compute the same work."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.arms.strop_loop import BenchmarkSchedule, BenchmarkTask
from benchmarks.busy import busy_loop
from benchmarks.cases import CASES
from benchmarks.harness import Arm, ArmFailed, ArmProcess, Protocol, measure_pairs, pair_order, write_result
from benchmarks.machine import AVX2, machine_facts
from benchmarks.prompts import make_prompts, write_prompts
from benchmarks.ratio import summarize_ratios
from benchmarks.rivals import rival_arm, strop_arm
from benchmarks.verifier import forced_rewards, last_number_reward, signal_tokens, zero_variance_frac
from strop.rollout import Split
from tests.fixtures.git_tree import commit_files
from tests.fixtures.judging import verdict

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


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without bfloat16, and rivals whose environments need not be made."""
    for name, value in AVX2.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("benchmarks.rivals.ensure_environment", lambda environment, say: Path("python"))


@pytest.mark.usefixtures("limited")
def test_rivals_compute_in_the_format_that_strop_takes_here() -> None:
    """Incident: strop's arm did not start where the format was left open, and TRL's emulated bfloat16."""
    assert strop_arm().settings["dtype"] == "float32"
    assert rival_arm("trl", 2).settings["autocast"] is False
    assert rival_arm("vllm-eager", 2).settings["dtype"] == "float32"


@pytest.mark.usefixtures("limited")
def test_a_result_says_to_which_instructions_it_was_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tree"
    commit = commit_files(root, {"src/one.py": ""})
    monkeypatch.setattr(harness, "ROOT", root)
    monkeypatch.setattr(harness, "RESULTS_DIR", tmp_path / "results")
    path = write_result("demo", {"machine": machine_facts()})
    assert json.loads(path.read_bytes())["git_rev"] == commit
    assert path.name.startswith("demo-avx2-2")
    assert set(json.loads(path.read_bytes())["machine"]["limited_to"]) == set(AVX2)
    for name in AVX2:
        monkeypatch.delenv(name)
    assert write_result("demo", {}).name.startswith("demo-2")


def test_the_busy_loop_runs_as_long_as_its_block() -> None:
    """Incident: the loop of a benchmark that was killed kept a core busy under the next one."""
    with busy_loop() as pid:
        # A child that was told to end with its parent.
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_each_step_gets_the_prompts_that_the_rival_gets() -> None:
    case = CASES["grpo-32-natural"]
    prompts = make_prompts(case, 2)
    task = BenchmarkTask(case, prompts)
    examples = BenchmarkSchedule(case, task, prompts).examples(1)
    assert [task.render(example)[0].text for example in examples] == [
        prompt.messages[0]["content"] for prompt in prompts[8:16]
    ]
    assert len(task.examples(Split.TRAIN)) == 16


def test_forced_rewards_differ_in_every_group_and_natural_ones_come_from_the_text() -> None:
    case = CASES["grpo-32-forced"]
    prompts = make_prompts(case, 1)
    task = BenchmarkTask(case, prompts)
    example = task.step_examples(prompts)[0]
    # Before a step forces anything, as in the gate's self-test of the verifier.
    assert verdict(task, example, prompts[0].answer).reward == 1.0
    assert verdict(task, example, "no number").reward == 0.0
    for member in BenchmarkSchedule(case, task, prompts).examples(0):
        rewards = [verdict(task, member, "no number").reward for _ in range(case.group_size)]
        assert sorted(reward or 0.0 for reward in rewards) == [0.0] * 4 + [1.0] * 4
