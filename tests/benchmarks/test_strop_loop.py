"""What strop's arm gives to the real training loop."""

from __future__ import annotations

import pytest

from benchmarks.arms.strop_loop import BenchmarkSchedule, BenchmarkTask, build_spec
from benchmarks.cases import CASES, GRPO_CASES, Case
from benchmarks.prompts import make_prompts
from strop.rollout import Split


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
