"""Micro-batches of ranks: nothing is lost, groups stay whole where they can, rounds are even and executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.policy.balancing import PositionCost, plan_micro_batches, restore_order
from strop.policy.footprint import ModelSize, read_model_size
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner, LossTerm
from strop.policy.optimizer import Ranks
from strop.policy.packing import Load, PackedBatch, PackedGroup
from strop.spec.train import OptimizerSpec
from tests.policy.worlds import World, make_model, reinforce, relative_error

Plan = list[list[list[PackedGroup]]]


def test_costs_follow_from_the_sizes_of_a_model() -> None:
    size = ModelSize(
        num_layers=2,
        hidden_width=8,
        mlp_width=16,
        num_heads=2,
        num_kv_heads=1,
        head_width=4,
        vocab_size=100,
        max_positions=64,
        is_tied=True,
    )
    # Per layer: query and output 2 * 8*8, key and value 2 * 8*4, MLP 3 * 8*16 = 576; two layers 1,152.
    assert size.body_params == 1152
    cost = PositionCost.of_model(size)
    # 12 * 2 layers * 8 channels / (6 * 1,152); 800 head parameters / 1,152.
    assert cost.per_pair == pytest.approx(192 / 6912)
    assert cost.per_scored == pytest.approx(800 / 1152)
    # 6 positions; pairs 6*6/2.
    assert cost.of_prompt(6) == pytest.approx(6 + 18 * cost.per_pair)
    # 4 positions behind 6, 3 of them scored: pairs 4*6 + 4*4/2.
    assert cost.of_reply(4, 3, 6) == pytest.approx(4 + 32 * cost.per_pair + 3 * cost.per_scored)


def plan(groups: list[PackedGroup], num_ranks: int, *, max_positions: int = 64, **form: Any) -> Plan:
    return plan_micro_batches(groups, num_ranks, max_positions=max_positions, cost=PositionCost(), **form)


def replies_of(planned: Plan) -> list[list[int]]:
    """Return the identities of each rank's replies."""
    return [[id(r) for batch in rank for group in batch for r in group.replies] for rank in planned]


def positions_of(planned: Plan) -> list[list[int]]:
    return [[sum(group.num_positions for group in batch) for batch in rank] for rank in planned]


def lock_step(planned: Plan, cost: Callable[[list[PackedGroup]], float]) -> float:
    """Return the cost of a step of ranks that wait for the costliest of each round."""
    return sum(max(map(cost, batches)) for batches in zip(*planned, strict=True))


def test_groups_stay_whole_where_that_is_even() -> None:
    groups = [World(seed).packed(3, [10, 10, 10]) for seed in range(8)]
    planned = plan(groups, 4)
    assert sorted(len(group.replies) for rank in planned for batch in rank for group in batch) == [3] * 8
    assert positions_of(planned) == [[60]] * 4


def test_a_group_is_cut_where_ranks_would_idle() -> None:
    groups = [World(0).packed(2, [20] * 8), World(1).packed(2, [20])]
    planned = plan(groups, 3)
    # 9 replies of 19 positions over 3 ranks, and a prompt of 2 for each piece.
    assert max(map(sum, positions_of(planned))) <= 3 * 19 + 2 * 2
    # A pair of replies, whose loss needs both, stays together.
    kept = plan([World(9).packed(2, [4, 4, 4])], 2, keeps_groups=True)
    assert positions_of(kept) == [[11], [1]]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), max_size=8),
    num_ranks=st.integers(1, 5),
    keeps_groups=st.booleans(),
    is_alone=st.booleans(),
    max_positions=st.sampled_from([30, 100]),
)
def test_every_reply_is_trained_once(
    sizes: list[list[int]], num_ranks: int, keeps_groups: bool, is_alone: bool, max_positions: int
) -> None:
    groups = [World(seed).packed(2, replies) for seed, replies in enumerate(sizes)]
    form = {"max_positions": max_positions, "keeps_groups": keeps_groups, "is_alone": is_alone}
    planned = plan(groups, num_ranks, **form)
    # As many micro-batches on each rank.
    assert len(planned) == num_ranks
    assert len(set(map(len, planned))) == 1
    assert sorted(chain(*replies_of(planned))) == sorted(id(r) for group in groups for r in group.replies)
    # The same groups are split the same way.
    assert replies_of(plan(groups, num_ranks, **form)) == replies_of(planned)
    for batch in (batch for rank in planned for batch in rank):
        load = reduce(Load.plus, batch, Load(is_alone=is_alone))
        num_replies = [len(group.replies) for group in batch]
        assert load.num_positions <= max_positions or num_replies == [1] or (keeps_groups and len(batch) == 1)
    assert not keeps_groups or sum(bool(g.replies) for r in planned for b in r for g in b) == len(groups)


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(8, 1), (8, 3), (4, 7), (8, 7)])
@pytest.mark.parametrize("is_alone", [False, True])
def test_rounds_of_ranks_cost_the_same(num_ranks: int, num_rounds: int, is_alone: bool) -> None:
    """Each rank once cut its own share anew, and ranks waited for each other for 12 to 30 % of a step."""
    random = np.random.default_rng(num_ranks * 10 + num_rounds)
    lengths = np.exp(random.normal(4.2, 0.8, (64, 8))).clip(2, 600).astype(int).tolist()
    groups = [World(seed).packed(20, each) for seed, each in enumerate(lengths)]
    cost = PositionCost(per_pair=1e-3, per_scored=0.1)
    measure = padded_positions if is_alone else cost.of_groups
    # Sequences alone share no prompt.
    ideal = sum(20 + n - 1 for each in lengths for n in each) if is_alone else cost.of_groups(groups)
    num_positions = ideal if is_alone else sum(group.num_positions for group in groups)
    planned = plan_micro_batches(
        groups,
        num_ranks,
        max_positions=int(num_positions / (num_ranks * num_rounds) / 0.93),
        cost=cost,
        is_alone=is_alone,
    )
    bound = 1.2 if is_alone else 1.05
    assert lock_step(planned, measure) * num_ranks / ideal <= bound
    assert num_rounds <= len(planned[0]) <= num_rounds + 2


def padded_positions(batch: list[PackedGroup]) -> float:
    return float(reduce(Load.plus, batch, Load(is_alone=True)).num_positions)


def test_ranks_execute_the_micro_batches_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks execute what one plan says, and their gradients add up to that of one process."""
    model_dir = make_model(tmp_path / "model")
    lengths = np.random.default_rng(5).integers(2, 20, (12, 3)).tolist()
    groups = [World(seed).packed(4, each, advantage=1.0 - 0.2 * seed) for seed, each in enumerate(lengths)]
    term = LossTerm(name="loss", groups=groups, temperature=1.0, token_terms=reinforce)
    executed: list[list[list[list[int]]]] = []
    read = LanguageModel.read

    def note(model: LanguageModel, batch: PackedBatch) -> torch.Tensor:
        bounds = np.concatenate(([0], np.cumsum(batch.layout.prompt_lens_P + batch.layout.reply_lens_S)))
        rows = np.split(batch.token_ids_N.numpy(), bounds[1:-1])
        executed[-1].append([row.tolist() for row in rows])
        return read(model, batch)

    monkeypatch.setattr(LanguageModel, "read", note)
    gradients = []
    for rank in range(8):
        executed.append([])
        model = LanguageModel.load(model_dir, dtype=torch.float32)
        learner = Learner(
            model, OptimizerSpec(), micro_batch_positions=50, ranks=SomeRank(index=rank, num_ranks=8)
        )
        executed[-1] = []
        gradients.append(learner.term_gradients(term))
    cost = PositionCost.of_model(read_model_size(model_dir))
    planned = plan_micro_batches(groups, 8, max_positions=50, cost=cost)
    assert len(planned[0]) > 1
    assert executed == [
        [
            [g.prompt_ids.tolist() for g in batch]
            + [r.token_ids[:-1].tolist() for g in batch for r in g.replies]
            for batch in rank
        ]
        for rank in planned
    ]
    alone = Learner(LanguageModel.load(model_dir, dtype=torch.float32), OptimizerSpec())
    executed.append([])
    whole = alone.term_gradients(term)
    summed = {name: sum((part[name] for part in gradients), torch.zeros(())) for name in whole}
    assert relative_error(summed, whole) <= 1e-5


@dataclass
class SomeRank(Ranks):
    """One of many ranks, which hears nothing of the others."""

    index: int
    num_ranks: int


def test_what_ranks_find_comes_back_in_order() -> None:
    groups = [World(seed).packed(2, [3, 1 + seed, 2]) for seed in range(5)]
    planned = plan(groups, 3, max_positions=8)
    found = [[r.token_ids.tolist() for b in rank for group in b for r in group.replies] for rank in planned]
    expected = [reply.token_ids.tolist() for group in groups for reply in group.replies]
    assert restore_order(groups, planned, found) == expected
