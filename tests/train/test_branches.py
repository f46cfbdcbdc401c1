"""What is trained of rollouts that share turns: each token once, beside what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.algorithm import build_algorithm
from strop.environments.worlds import BuiltInWorld
from strop.errors import ConfigError
from strop.policy.packing import PackedGroup
from strop.record.rollouts import read_rollouts, write_rollouts
from strop.rollout import RESTART, Branch, Group, Outcome, Rollout
from strop.spec import AlgorithmSpec
from strop.spec.train import TrainSpec
from strop.train.batch import build_batch, pack_reply
from strop.train.generation import GroupStatus, find_staleness, sort_by_status
from strop.train.step import rl_term
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec
from tests.policy.worlds import build_learner, make_model, plain, relative_error
from tests.train.test_batch import EXAMPLE, ids, prompt, rollout, said, scored
from tests.train.test_turns import Letters, LettersSpec

CENTERED = build_algorithm(AlgorithmSpec(name="dr_grpo"))
PROMPT, TOLD = prompt(1, 2, 3), prompt(4, 5)


def tree(of: int, shared: int, rewards: Sequence[float | None]) -> list[Rollout]:
    """Return rollouts that share a reply of so many tokens, and reply once more."""
    trunk = (PROMPT, said(ids(*range(10, 10 + shared))), TOLD)
    return [
        replace(
            rollout(
                Outcome(parts={"toy": reward}) if reward is None else scored(reward),
                *trunk,
                said(ids(*range(30 + of, 31 + of + number))),
                index=of + number,
            ),
            branch=Branch(of=of, num_turns=3),
        )
        for number, reward in enumerate(rewards)
    ]


def group_of(*members: Rollout) -> Group:
    return Group(example=EXAMPLE, rollouts=members)


def test_each_token_is_trained_once_and_compared_with_its_like() -> None:
    batch = build_batch(CENTERED, [group_of(*tree(0, 4, [1.0, 0.0]), *tree(2, 2, [0.0, 0.0]))], 100)
    trunks, first = batch.groups
    # The shared replies earn 0.5 and 0; what followed the second ones differs in nothing.
    assert trunks.prompt_ids.tolist() == [1, 2, 3]
    assert [one.token_ids.tolist() for one in trunks.replies] == [[10, 11, 12, 13], [10, 11]]
    assert [one.advantage for one in trunks.replies] == [0.25, -0.25]
    assert first.prompt_ids.tolist() == [1, 2, 3, 10, 11, 12, 13, 4, 5]
    assert [one.token_ids.tolist() for one in first.replies] == [[30], [30, 31]]
    assert [one.advantage for one in first.replies] == [0.5, -0.5]
    assert all(reply.is_scored.all() for group in batch.groups for reply in group.replies)
    assert batch.places == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert batch.group_of_P == (0, 0, 0)
    # 4 + 2 shared tokens, then 1 + 2 and 1 + 2: each counts once.
    assert batch.credit.num_counted_tokens == 12
    assert sum(rollout.num_new_tokens for rollout in tree(0, 4, [1.0, 0.0])) == 7


def test_a_lost_branch_is_left_out_of_what_was_shared() -> None:
    lost = tree(0, 4, [1.0, None, 0.5, None])
    batch = build_batch(CENTERED, [group_of(*lost, *tree(4, 2, [0.25, 0.25]))], 100)
    assert [one.advantage for one in batch.groups[0].replies] == [0.25, -0.25]
    assert [one.advantage for one in batch.groups[1].replies] == [0.25, -0.25]
    assert batch.credit.num_unscored == 2
    # Of a tree of which less than half is scored nobody knows what the shared turns are worth.
    worse = build_batch(CENTERED, [group_of(*tree(0, 4, [1.0, None, None]), *tree(3, 2, [0.0, 0.0]))], 100)
    assert worse.groups == ()
    assert sort_by_status([group_of(*tree(0, 4, [1.0, None, None]))], worse) == [GroupStatus.FAILED]


def test_equal_rewards_are_no_difference_however_many_were_scored() -> None:
    """The mean of three tenths is not a tenth in floating point."""
    members = group_of(*tree(0, 4, [0.1, 0.1, 0.1, None]), *tree(4, 2, [0.1, 0.1, 0.1, 0.1]))
    batch = build_batch(CENTERED, [members], 100)
    assert batch.groups == ()
    assert sort_by_status([members], batch) == [GroupStatus.SKIPPED]


def test_an_attempt_of_its_own_stands_beside_what_others_share() -> None:
    alone = rollout(scored(1.0), PROMPT, said(ids(7)), index=2)
    batch = build_batch(CENTERED, [group_of(*tree(0, 2, [0.0, 1.0]), alone)], 100)
    trunks, followed = batch.groups
    assert [one.token_ids.tolist() for one in trunks.replies] == [[10, 11], [7]]
    assert [one.advantage for one in trunks.replies] == [-0.25, 0.25]
    assert [one.advantage for one in followed.replies] == [-0.5, 0.5]


def test_history_that_was_rendered_anew_is_cut_there() -> None:
    """Before the branch, and behind it: what is fed is what the policy saw."""
    anew = replace(prompt(8, 9), role=RESTART)
    members = [
        replace(
            rollout(scored(reward), PROMPT, said(ids(10)), anew, said(ids(11)), TOLD, *behind, index=index),
            branch=Branch(of=0, num_turns=5),
        )
        for index, (reward, behind) in enumerate(
            [(1.0, (said(ids(12)), anew, said(ids(13)))), (0.0, (said(ids(14)),))]
        )
    ]
    batch = build_batch(
        CENTERED, [group_of(*members, rollout(scored(0.0), PROMPT, said(ids(15)), index=2))], 9
    )
    found = [
        (group.prompt_ids.tolist(), [one.token_ids.tolist() for one in group.replies])
        for group in batch.groups
    ]
    assert found == [
        ([1, 2, 3], [[10], [15]]),
        ([8, 9], [[11]]),
        ([8, 9, 11, 4, 5], [[12], [14]]),
        ([8, 9], [[13]]),
    ]


def test_a_token_is_as_old_as_the_weights_that_sampled_it() -> None:
    members = [
        replace(one, turns=(*one.turns[:3], replace(one.turns[3], policy_version=3)))
        for one in tree(0, 2, [1.0, 0.0])
    ]
    assert find_staleness([group_of(*members)], 4) == 4


def test_records_keep_what_is_shared(tmp_path: Path) -> None:
    members = tree(0, 4, [1.0, None])
    write_rollouts(tmp_path / "rollouts.parquet", members)
    found = read_rollouts(tmp_path / "rollouts.parquet")
    assert [one.branch for one in found] == [Branch(of=0, num_turns=3)] * 2
    assert [one.num_new_tokens for one in found] == [5, 2]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"branches": 2}}, "there are no turns to share"),
        ({"train": {"shared_turns": 2}}, "no rollouts share turns"),
        (
            {"task": {"name": "guess-number"}, "train": {"branches": 3, "group_size": 8}},
            "compared with those",
        ),
        (
            {"task": {"name": "guess-number"}, "train": {"branches": 8, "group_size": 8}},
            "compared with those",
        ),
        (
            {
                "task": {"name": "guess-number"},
                "train": {"branches": 2, "group_size": 4},
                "algorithm": {"credit": "turn"},
            },
            "both say what a turn is compared with",
        ),
    ],
)
def test_what_has_no_effect_or_no_comparison_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        tiny_spec(**sections)


def test_rewards_by_length_are_refused_beside_shared_turns() -> None:
    with pytest.raises(ConfigError, match="lose reward by the lengths"):
        build_algorithm(AlgorithmSpec(name="dapo"), train=TrainSpec(branches=2))


def run_of(root: Path, model_dir: Path, **train: Any) -> Composition:
    spec = tiny_spec(
        task={"name": "guess-number"},
        train={
            "steps": 2,
            "prompts_per_step": 2,
            "group_size": 4,
            "branches": 2,
            "checkpoint_every": 1,
            **train,
        },
    )
    made = Composition(
        spec=spec, model_dir=model_dir, run_dir=new_run(root), task=BuiltInWorld(LettersSpec(), Letters)
    )
    made.run()
    return made


def test_a_run_trains_on_shared_turns_once_and_records_them(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = run_of(tmp_path, tiny_model_dir)
    line = made.notes.steps[0]
    rollouts = read_rollouts(made.run_dir.rollouts_files()[0])
    assert len(rollouts) == 8
    branched = [one for one in rollouts if one.branch is not None]
    assert line["branched_frac"] == len(branched) / 8 > 0
    assert line["num_scored_tokens"] == sum(one.num_new_tokens for one in rollouts)
    assert made.notes.causes("tripwire") == []
    for one in branched:
        assert one.branch is not None
        (first,) = (
            other
            for other in rollouts
            if other.example == one.example and other.sample_index == one.branch.of
        )
        for mine, others in zip(one.turns[: one.branch.num_turns], first.turns, strict=False):
            np.testing.assert_array_equal(mine.token_ids, others.token_ids)


def test_the_gradient_of_a_tree_is_that_of_its_attempts_in_full(tmp_path: Path) -> None:
    """Every attempt by itself, its shared tokens with a share of their advantage."""
    path = make_model(tmp_path)
    algorithm = plain("dr_grpo")
    group = group_of(*tree(0, 4, [1.0, 0.0, 0.25]), *tree(3, 2, [0.0, 0.5, 0.75]))
    batch = build_batch(algorithm, [group], 100)
    rewards = np.array([one.outcome.reward for one in group.rollouts]).reshape(2, 3)
    shared_T = rewards.mean(axis=1) - rewards.mean()
    own_T_B = rewards - rewards.mean(axis=1, keepdims=True)
    alone = []
    for index, one in enumerate(group.rollouts):
        tree_index, branch_index = divmod(index, 3)
        of_turns = [shared_T[tree_index] / 3, own_T_B[tree_index, branch_index]]
        reply = pack_reply(one.turns, 0.0, 1.0 / (8 * 100), of_turns)
        alone.append(PackedGroup(prompt_ids=PROMPT.token_ids, replies=(reply,)))
    # Two shared rows and six others, each token 1 / (8 x 100).
    assert {reply.weight for packed in batch.groups for reply in packed.replies} == {1.0 / (8 * 100)}
    learner = build_learner(path)
    found = learner.term_gradients(rl_term(algorithm, batch.groups, 1.0))
    expected = learner.term_gradients(rl_term(algorithm, alone, 1.0))
    assert relative_error(found, expected) <= 1e-5
