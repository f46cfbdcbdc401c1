"""From judged groups to packed rows and to the numbers of a step, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithm import ALGORITHMS, build_algorithm
from strop.algorithm.corrections import CORRECTION_SQUARE
from strop.errors import DataError
from strop.policy.optimizer import Histogram, StepReport, Total
from strop.rollout import Example, FailureOwner, Group, Outcome, Rollout, Turn, make_example
from strop.spec import AlgorithmSpec
from strop.train.batch import ExampleSchedule, build_batch
from strop.train.measure import measure_batch, measure_rollouts, measure_update
from strop.train.step import Update
from tests.fixtures.builders import rollout_of, spoken_turn
from tests.policy.worlds import REPLY_LIMIT, World, ragged_groups

EXAMPLE = make_example("toy", {"n": 1}, "1")


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def said(token_ids: np.ndarray, logprob: float = -0.5) -> Turn:
    return spoken_turn("", token_ids, logprob=logprob)


def prompt(*values: int) -> Turn:
    return Turn(role="prompt", text="", token_ids=ids(*values))


def rollout(outcome: Outcome, *turns: Turn, index: int = 0) -> Rollout:
    return rollout_of(EXAMPLE, turns, outcome, sample_index=index, seconds={"generate": 1.0, "verify": 0.25})


def scored(reward: float) -> Outcome:
    return Outcome(parts={"toy": reward}, is_correct=reward == 1.0, format_ok=True)


LOST = Outcome.lost(FailureOwner.TASK, "TypeError")
# Group 0 has a difference, a lost member and 2 + 3 scored tokens; group 1 has none, and 1 + 1 tokens.
GROUPS = [
    Group(
        example=EXAMPLE,
        rollouts=(
            rollout(scored(1.0), prompt(1, 2, 3), said(ids(7, 260), -1.0)),
            rollout(scored(0.0), prompt(1, 2, 3), said(ids(7, 8, 9), -2.0), index=1),
            rollout(LOST, prompt(1, 2, 3), said(ids(5, 5), -0.5), index=2),
        ),
    ),
    Group(
        example=EXAMPLE,
        rollouts=(
            rollout(scored(1.0), prompt(4), said(ids(9), -3.0)),
            rollout(scored(1.0), prompt(4), said(ids(9), -3.0), index=1),
        ),
    ),
]


def test_a_batch_by_hand() -> None:
    batch = build_batch(build_algorithm(AlgorithmSpec(name="rloo")), GROUPS, 10)
    # The group without difference and the lost rollout are not forwarded.
    (group,) = batch.groups
    assert group.prompt_ids.tolist() == [1, 2, 3]
    assert [reply.token_ids.tolist() for reply in group.replies] == [[7, 260], [7, 8, 9]]
    assert all(bool(reply.is_scored.all()) for reply in group.replies)
    assert [reply.engine_logprobs.tolist() for reply in group.replies] == [[-1, -1], [-2, -2, -2]]
    # Rewards 1 and 0 (the lost one is in no mean): 0.5 over a spread of about 0.5 or 0.7.
    high, low = (reply.advantage for reply in group.replies)
    assert high == -low > 0
    # A token mean over all that count: 2 + 3 + 1 + 1 tokens.
    assert [reply.weight for reply in group.replies] == pytest.approx([1 / 7, 1 / 7])
    assert batch.credit.num_counted_tokens == 7


def test_the_numbers_of_rollouts_by_hand() -> None:
    metrics = measure_rollouts(GROUPS)
    # 5 rollouts, 1 lost; replies of 2, 3, 2, 1, 1 tokens, the last a repeat; 3 have one before them.
    assert metrics == pytest.approx(
        {
            "failed_frac": 1 / 5,
            "prompt_too_long_frac": 0.0,
            "duplicate_frac": 1 / 3,
            "reward_mean": 3 / 4,
            "truncated_frac": 0.0,
            "timed_out_frac": 0.0,
            "accuracy": 3 / 4,
            # The wrong reply earned nothing.
            "unearned_reward_mean": 0.0,
            "format_ok_frac": 1.0,
            "reply_tokens_mean": 9 / 5,
            # (2 * 1 + 3 * 2 + 2 * 0.5 + 3 + 3) / 9
            "entropy_nats": 15 / 9,
        }
    )


def test_log_7_what_nobody_knows_is_absent_and_not_0() -> None:
    lost = [Group(example=EXAMPLE, rollouts=(rollout(LOST, prompt(1)), rollout(LOST, prompt(1), index=1)))]
    assert measure_rollouts(lost) == {"failed_frac": 1.0, "prompt_too_long_frac": 0.0, "duplicate_frac": 0.0}
    silent = Outcome(parts={"toy": 0.5})
    known = measure_rollouts([Group(example=EXAMPLE, rollouts=(rollout(silent, prompt(1), said(ids(2))),))])
    assert known.keys() & {"accuracy", "format_ok_frac"} == set()
    assert known["reward_mean"] == 0.5


def test_the_numbers_of_a_batch_by_hand() -> None:
    metrics = measure_batch(build_batch(build_algorithm(AlgorithmSpec()), GROUPS, 10))
    assert metrics == {
        "zero_variance_frac": 0.5,
        "num_scored_tokens": 7.0,
        "num_signal_tokens": 5.0,
        "num_forwarded": 2.0,
    }


def report(drift: list[float]) -> StepReport:
    return StepReport(
        loss=0.5,
        grad_norm=2.0,
        lr=1e-5,
        changed_frac=0.25,
        master_changed_frac=None,
        drift=Histogram.of([torch.tensor(drift)]),
        num_positions=40,
        num_micro_batches=2,
    )


def test_the_numbers_of_an_update_by_hand() -> None:
    metrics = measure_update(Update(steps=(report([0.0, 0.0, 0.0, 0.25]),)))
    assert (metrics["loss"], metrics["grad_norm"], metrics["num_positions"]) == (0.5, 2.0, 40.0)
    assert (metrics["drift_mean_nats"], metrics["drift_max_nats"]) == (0.0625, 0.25)
    # The 99 % quantile of 4 values lies at position 2.97: 0.97 of the way from 0 to 0.25.
    assert metrics["drift_p99_nats"] == pytest.approx(0.2425)
    silent = measure_update(Update(steps=(report([]),)))
    assert not [name for name in silent if name.startswith(("drift", "ratio", "num_refused"))]


def test_the_numbers_of_several_optimizer_steps_by_hand() -> None:
    first = replace(
        report([0.25, 0.75]),
        update_ratio=1e-3,
        log_ratio=Histogram.of([torch.tensor([1.0, 1.0]).log()]),
        totals={"approx_kl_nats": Total(sum=0.0, count=2), "clip_high_frac": Total(sum=0.0, count=2)},
    )
    second = replace(
        report([9.0]),
        loss=1.5,
        grad_norm=6.0,
        lr=5e-6,
        changed_frac=0.75,
        master_changed_frac=0.5,
        update_ratio=3e-3,
        log_ratio=Histogram.of([torch.tensor([0.5, 1.5, 2.0]).log()]),
        totals={
            "approx_kl_nats": Total(sum=0.6, count=3),
            "clip_high_frac": Total(sum=2.0, count=3),
            # Corrections of 2, 0.4 and 2: 4.4^2 / (3 x 8.16).
            "correction_mean": Total(sum=4.4, count=3),
            CORRECTION_SQUARE: Total(sum=8.16, count=3),
        },
    )
    found = measure_update(Update(steps=(first, second), num_refused=2))
    assert found["num_optimizer_steps"] == 2.0
    assert found["num_refused_steps"] == 2.0
    # Means over the two gradients, the largest of their norms, the last learning rate.
    assert found["loss"] == pytest.approx(1.0)
    assert (found["grad_norm"], found["lr"], found["num_positions"]) == (6.0, 5e-6, 80.0)
    assert (found["changed_frac"], found["update_ratio"]) == pytest.approx((0.5, 2e-3))
    assert found["master_changed_frac"] == 0.5
    # 0.6 over 5 tokens and 2 of 5, not the means of 0 and 0.2, or of 0 and 2 thirds.
    assert found["approx_kl_nats"] == pytest.approx(0.12)
    assert found["clip_high_frac"] == pytest.approx(0.4)
    assert found["effective_sample_frac"] == pytest.approx(0.790850, abs=1e-6)
    assert CORRECTION_SQUARE not in found
    # Of all ratios [0.5, 1, 1, 1.5, 2] the middle; the ends lie at 0.04 and 3.96 of the way through them.
    # Logarithms are exact to 9 %.
    assert found["ratio_p50"] == pytest.approx(1.0)
    assert found["ratio_p01"] == pytest.approx(0.52, rel=0.02)
    assert found["ratio_p99"] == pytest.approx(1.98, rel=0.02)
    # Engine against trainer: of the first step, before anything has moved.
    assert (found["drift_mean_nats"], found["drift_max_nats"]) == (0.5, 0.75)
    nothing = measure_update(Update(num_refused=4))
    assert nothing == {"num_refused_steps": 4.0}


def test_rew_6_a_judge_that_gave_no_score_is_counted_and_no_wrong_answer() -> None:
    unread = replace(LOST, metrics={"reply_chars": 2.0, "judge_unparsable": 1.0})
    right = Outcome(parts={"toy": 1.0}, metrics={"reply_chars": 2.0})
    rollouts = [rollout(one, prompt(1), said(ids(2)), index=i) for i, one in enumerate((unread, right))]
    metrics = measure_rollouts([Group(example=EXAMPLE, rollouts=tuple(rollouts))])
    names = ("judge_unparsable_frac", "failed_frac", "reward_mean")
    assert [metrics[name] for name in names] == [0.5, 0.5, 1.0]


# The example schedule: every epoch a permutation, nothing dropped, no state.

MAX_EXAMPLES = 12
EXAMPLES = [make_example("count", {"n": n}, str(n)) for n in range(MAX_EXAMPLES)]


@st.composite
def geometries(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw a number of examples, a number per step that they can fill, and a seed."""
    num_examples = draw(st.integers(1, MAX_EXAMPLES))
    return num_examples, draw(st.integers(1, num_examples)), draw(st.integers(0, 2**63 - 1))


def make_schedule(geometry: tuple[int, int, int]) -> ExampleSchedule[Example]:
    num_examples, per_step, seed = geometry
    return ExampleSchedule(EXAMPLES[:num_examples], seed=seed, prompts_per_step=per_step)


def numbers(examples: list[Example]) -> list[int]:
    return [int(example.fields["n"]) for example in examples]


@given(geometries())
@settings(max_examples=100, deadline=None)
def test_dat_4_every_epoch_is_a_permutation(geometry: tuple[int, int, int]) -> None:
    num_examples, per_step, _ = geometry
    schedule = make_schedule(geometry)
    steps = [numbers(schedule.examples(step)) for step in range(2 * num_examples)]
    assert {(len(step), len(set(step))) for step in steps} == {(per_step, per_step)}
    served = [n for step in steps for n in step]
    for start in range(0, len(served), num_examples):
        assert sorted(served[start : start + num_examples]) == list(range(num_examples))


@given(geometries(), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_a_number_names_the_example_of_its_place_whatever_was_asked_before(
    geometry: tuple[int, int, int], number: int
) -> None:
    step, place = divmod(number, geometry[1])
    asked = make_schedule(geometry)
    found = [asked.examples(one) for one in (step + 7, 0, step)][-1]
    assert found == make_schedule(geometry).examples(step)
    assert make_schedule(geometry).numbered(number) == found[place]


def test_finding_one_example_makes_no_other() -> None:
    """Incident: a simulated step of 2,000 groups made four million sums, for minutes."""

    class Made(list[Example]):
        num_made = 0

        def __getitem__(self, index: Any) -> Any:
            self.num_made += 1
            return super().__getitem__(index)

    made = Made(EXAMPLES)
    schedule = ExampleSchedule(made, seed=0, prompts_per_step=MAX_EXAMPLES)
    for number in range(MAX_EXAMPLES):
        schedule.numbered(number)
    assert made.num_made == MAX_EXAMPLES


@pytest.mark.parametrize("num_examples", [0, 3])
def test_too_few_examples_for_a_step_are_refused(num_examples: int) -> None:
    with pytest.raises(DataError, match=rf"has {num_examples} training examples and a step asks for 4\. "):
        make_schedule((num_examples, 4, 0))


# From judged groups to packed ones: who is forwarded, with which prompt, weight and advantage.


def test_a_member_that_never_began_does_not_hide_the_prompt() -> None:
    group = World().group(4, [[1], [2], [3]], [0.0, 1.0, 0.0])
    lost = replace(group.rollouts[0], turns=(), outcome=Outcome.lost(FailureOwner.INFRA, "OSError"))
    batch = build_batch(ALGORITHMS["grpo"], [replace(group, rollouts=(lost, *group.rollouts[1:]))], 8)
    (packed,) = batch.groups
    assert packed.prompt_ids.tolist() == group.rollouts[1].turns[0].token_ids.tolist()
    assert [len(reply.token_ids) for reply in packed.replies] == [2, 3]


def test_members_that_saw_other_prompts_do_not_share_one() -> None:
    world = World()
    group = world.group(4, [[1], [2], [3]], [0.0, 1.0, 0.0])
    other = world.told(world.ids(6))
    changed = replace(group.rollouts[1], turns=(other, *group.rollouts[1].turns[1:]))
    members = (group.rollouts[0], changed, group.rollouts[2])
    batch = build_batch(ALGORITHMS["grpo"], [replace(group, rollouts=members)], 8)
    assert [len(packed.prompt_ids) for packed in batch.groups] == [4, 6]
    assert [[len(reply.token_ids) for reply in packed.replies] for packed in batch.groups] == [[1, 3], [2]]


def test_no_token_is_lost_or_made_up() -> None:
    groups = ragged_groups()
    batch = build_batch(replace(ALGORITHMS["grpo"], zero_variance="keep"), groups, REPLY_LIMIT)
    num_scored = sum(int(reply.is_scored.sum()) for group in batch.groups for reply in group.replies)
    assert num_scored == batch.credit.num_forwarded_tokens == batch.credit.num_counted_tokens
    # Groups of 1 + 2, 7 + 1, 2 + 7 + 4 + 0 + 9, 3 + 6 + 1, 7 + 3 sampled tokens; three of group 4's turns
    # were told, and the last group has one scored member only.
    assert num_scored == 3 + 8 + 22 + 10 + (7 + 3)
