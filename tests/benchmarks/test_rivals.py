"""Both arms of a pair compute the same work in the same number format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.arms.strop_loop import BenchmarkSchedule, BenchmarkTask, build_spec
from benchmarks.busy import ALONE, BESIDE, DEFAULT, build_arms, busy_loop
from benchmarks.cases import CASES, GRPO_CASES, Case
from benchmarks.harness import write_result
from benchmarks.machine import AVX2, machine_facts
from benchmarks.prompts import make_prompts
from benchmarks.rivals import rival_arm, strop_arm
from strop.rollout import Split
from tests.fixtures.git_tree import commit_files


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


def test_arms_of_busy_differ_in_their_spinning_alone() -> None:
    arms = build_arms()
    assert arms[ALONE].environment == arms[BESIDE].environment
    bounded = arms[ALONE].environment["GOMP_SPINCOUNT"]
    assert 0 < int(bounded) < int(arms[DEFAULT].environment["GOMP_SPINCOUNT"])
    assert {**arms[DEFAULT].environment, "GOMP_SPINCOUNT": bounded} == arms[ALONE].environment


def test_the_busy_loop_runs_as_long_as_its_block() -> None:
    """Incident: the loop of a benchmark that was killed kept a core busy under the next one."""
    with busy_loop() as pid:
        # A child that was told to end with its parent.
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("case", GRPO_CASES, ids=lambda case: case.name)
def test_every_case_is_a_run_that_the_spec_accepts(case: Case) -> None:
    spec = build_spec(case)
    assert spec.train.prompts_per_step * spec.train.group_size == case.num_rows
    assert spec.task.max_reply_tokens == case.max_new_tokens


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
    assert task.verify(example, prompts[0].answer).reward == 1.0
    assert task.verify(example, "no number").reward == 0.0
    for member in BenchmarkSchedule(case, task, prompts).examples(0):
        rewards = [task.verify(member, "no number").reward for _ in range(case.group_size)]
        assert sorted(reward or 0.0 for reward in rewards) == [0.0] * 4 + [1.0] * 4
