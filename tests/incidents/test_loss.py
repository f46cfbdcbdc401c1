"""Incidents of the loss group, as far as credit and token losses can cause or prevent them.

The toy policy is a linear map from three features to the logits of four tokens, in float64.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algorithm import ALGORITHMS, Aggregation, Algorithm, Credit, assign_credit
from strop.algorithm.losses import TokenLoss
from strop.errors import DataError, RunStopped
from strop.io import verify_directory
from strop.record import RunDir
from strop.rollout import Example, Outcome
from strop.spec.train import TripwireSpec
from strop.train.watch.tripwires import find_alarms
from tests.fixtures.demonstrations import make_framing, read, write_rows
from tests.fixtures.losses import LOSSES
from tests.fixtures.spell import PaysAlways, SpellTask
from tests.fixtures.tiny_run import Composition, learner_of, new_run, tiny_spec

# Shapes: P groups, G rollouts (ragged), T tokens of a rollout (ragged), 3 features, V = 4 tokens.
REWARDS_P_G: list[list[float | None]] = [[1, 0, 0, 1], [1, 1, 1], [0.5, 0], [0, 0, 0, 0, 0]]
NUM_SCORED_P_G = [[3, 1, 5, 2], [4, 4, 1], [2, 7], [1, 2, 3, 4, 5]]
TRUNCATED_P_G = [[False] * len(rewards_G) for rewards_G in REWARDS_P_G]
ROLLOUTS = [(p, g) for p, counts in enumerate(NUM_SCORED_P_G) for g in range(len(counts))]


def gradient_of(algorithm: Algorithm, credit: Credit, rollouts: list[tuple[int, int]]) -> Tensor:
    """Sum the gradient over some rollouts, as one micro-batch does."""
    weights = torch.linspace(-0.5, 0.5, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for p, g in rollouts:
        stream = torch.Generator().manual_seed(100 * p + g)
        num_tokens = NUM_SCORED_P_G[p][g]
        features = torch.randn(num_tokens, 3, dtype=torch.float64, generator=stream)
        token_ids = torch.randint(0, 4, (num_tokens, 1), generator=stream)
        drift_nats = 0.3 * torch.randn(num_tokens, dtype=torch.float64, generator=stream)
        logp_T = torch.log_softmax(features @ weights, dim=-1).gather(1, token_ids)[:, 0]
        advantage_T = torch.full((num_tokens,), float(credit.advantage_P_G[p][g]), dtype=torch.float64)
        old_T = logp_T.detach() + drift_nats
        clip = (algorithm.clip_low, algorithm.clip_high)
        loss_T = algorithm.loss.value(logp_T, old_T, advantage_T, *clip)
        total = total + float(credit.weight_P_G[p][g]) * loss_T.sum()
    (gradient,) = torch.autograd.grad(total, weights)
    return gradient


def credit_all(algorithm: Algorithm) -> Credit:
    return assign_credit(algorithm, REWARDS_P_G, NUM_SCORED_P_G, TRUNCATED_P_G, 8)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_opt_1_every_loss_moves_towards_the_better_token(loss: TokenLoss) -> None:
    """Incident: a sign was reversed in all losses, and the blow-ups were blamed on warm-up.

    Symptom: training made the rewarded behavior rarer while every logged value looked plausible.
    """
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    slope = loss.grad(logp, logp, torch.tensor([1.0, -1.0], dtype=torch.float64), 0.2, 0.2)
    # Descent subtracts the gradient: it must raise the good token and lower the bad one.
    assert slope.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, len(ROLLOUTS)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_opt_2_gradient_does_not_depend_on_the_split(
    aggregation: Aggregation, micro_batch_size: int, num_ranks: int
) -> None:
    """Incident: micro-batches were weighted equally, so their size changed the loss.

    Symptom: a token mean gave other curves on other hardware.
    """
    algorithm = replace(ALGORITHMS["dapo"], aggregation=aggregation)
    credit = credit_all(algorithm)
    whole = gradient_of(algorithm, credit, ROLLOUTS)
    order = np.random.default_rng(7).permutation(len(ROLLOUTS))
    parts = torch.zeros_like(whole)
    for rank in range(num_ranks):
        mine = [ROLLOUTS[index] for index in order[rank::num_ranks]]
        for start in range(0, len(mine), micro_batch_size):
            parts += gradient_of(algorithm, credit, mine[start : start + micro_batch_size])
    assert float(whole.abs().max()) > 1e-3
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-15)


def test_opt_2_a_batch_without_group_boundaries_is_refused() -> None:
    """Incident: group sizes were not passed on, so a mean per group became one over everything."""
    flat: Any = [1.0, 0.0, 1.0]
    with pytest.raises(DataError, match=r"batch are not divided into groups\. Allowed: .*Next: "):
        assign_credit(ALGORITHMS["grpo"], flat, [[1, 1, 1]], [[False] * 3], 8)


def test_opt_3_the_constant_normaliser_is_the_reply_limit() -> None:
    """Incident: an unexplained constant between 100 and 2,048 set the size of every update."""
    credit = assign_credit(ALGORITHMS["dr_grpo"], [[1, 0]], [[2, 3]], [[False, False]], 10)
    # Two rollouts with a limit of 10 tokens: 1 / 20, however long the replies are.
    assert credit.weight_P_G[0].tolist() == [1 / 20, 1 / 20]


@pytest.mark.parametrize(("large", "small"), [("sft", "rl"), ("rl", "sft")])
def test_opt_3_a_term_that_drowns_another_is_named(large: str, small: str) -> None:
    """Incident: a fine-tuning term about 1,000 times larger drowned the reinforcement beside it.

    Symptom: rewards stood still while the summed loss fell.
    """
    norms = {f"grad_norm_{large}": 5.0, f"grad_norm_{small}": 0.005}
    (alarm,) = find_alarms(TripwireSpec(), 3, norms)
    # 5 / 0.005 = 1000, ten times the bound.
    assert (alarm.cause, alarm.kind.value, alarm.step) == ("term_dominates", "tripwire", 3)
    assert f"grad_norm_{large}=5 is 1000 times grad_norm_{small}=0.005" in alarm.detail
    assert f"{'lower' if large == 'sft' else 'raise'} sft.weight" in alarm.detail
    # At the bound there is no alarm, nor where one says nothing at all.
    assert find_alarms(TripwireSpec(), 3, {"grad_norm_rl": 0.05, "grad_norm_sft": 5.0}) == []
    assert find_alarms(TripwireSpec(), 3, {"grad_norm_rl": 0.0, "grad_norm_sft": 5.0}) == []


def test_opt_3_weight_1_beside_a_tiny_reward_loss_raises_the_alarm(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: as above, in a run whose rewards hardly differ."""
    rows = [{"prompt": f"#{n}", "completion": "Q7Z"} for n in range(4)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    spec = tiny_spec(
        train={"terms": "rl+sft", "steps": 1},
        sft={"source": str(path), "rows_per_step": 2},
        algorithm={"name": "rloo"},
    )
    made = Composition(
        spec,
        tiny_model_dir,
        new_run(tmp_path / "runs"),
        task=TinyReward(),
        demonstrations=read(path, make_framing(tiny_model_dir, SpellTask())),
    )
    made.run()
    assert "term_dominates" in made.notes.causes("tripwire")


class TinyReward(SpellTask):
    """Pays a ten thousandth of what others pay."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        earned = outcome.parts["spelled"] or 0.0
        return replace(outcome, parts={"spelled": earned if outcome.is_correct else 1e-4 * earned})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_opt_5_the_only_loser_keeps_its_advantage(name: str) -> None:
    """Incident: a filter on the spread of the others dropped the only loser of a group."""
    credit = assign_credit(ALGORITHMS[name], [[1, 1, 1, 0]], [[1] * 4], [[False] * 4], 8)
    assert credit.advantage_P_G[0][3] == min(credit.advantage_P_G[0]) < 0
    assert credit.is_forwarded_P_G[0].all()


def test_opt_5_a_failed_member_is_excluded_from_the_mean_and_counted() -> None:
    """Incident: failed members were removed, leaving groups of unknown size."""
    credit = assign_credit(ALGORITHMS["dr_grpo"], [[1, None, 0, 0]], [[1] * 4], [[False] * 4], 8)
    assert credit.advantage_P_G[0].tolist() == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert credit.is_forwarded_P_G[0].tolist() == [True, False, True, True]
    assert (credit.num_unscored, credit.num_rollouts) == (1, 4)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("is_masked", [True, False])
def test_log_6_a_far_away_log_probability_stays_finite(name: str, is_masked: bool) -> None:
    """Incident: trainer -2 against engine -91 gave an infinite ratio, and 0 times it a NaN.

    Symptom: one masked token turned the gradient of the whole batch into NaN.
    """
    algorithm = ALGORITHMS[name]
    logp = torch.tensor([-2.0], requires_grad=True)
    engine = torch.tensor([-91.0])
    advantage = torch.tensor([0.0 if is_masked else 1.0])
    for old in (None, engine):
        terms = algorithm.token_terms(logp, engine, advantage, old)
        assert bool(torch.isfinite(terms.loss_N).all())
        assert bool(torch.isfinite(terms.grad_N).all())
    value = algorithm.loss.value(logp, engine, advantage, algorithm.clip_low, algorithm.clip_high)
    selected = value.where(torch.tensor([not is_masked]), 0.0).sum()
    (gradient,) = torch.autograd.grad(selected, logp)
    assert bool(torch.isfinite(gradient).all())


def test_opt_2_a_whole_run_does_not_depend_on_the_micro_batch_size(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: micro-batches weighted equally; other hardware, other curves."""
    lines = []
    for limit in (None, 150, 80):
        spec = tiny_spec(train={"steps": 1, "micro_batch_tokens": limit})
        made = Composition(spec, tiny_model_dir, new_run(tmp_path / str(limit)))
        roles = made.run()
        first = next(parameter for _, parameter in learner_of(roles).model.named_parameters())
        lines.append((made.notes.steps[0]["grad_norm"], first.detach().clone()))
    whole_norm, whole_weights = lines[0]
    for norm, weights in lines[1:]:
        assert norm == pytest.approx(whole_norm, rel=1e-5)
        # Adam divides by the gradient's size: where that is tiny, rounding shows.
        assert float((weights - whole_weights).abs().mean()) < 1e-5


def test_opt_4_a_constant_reward_raises_an_alarm_in_step_1(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: 58 % of the groups had one same reward, and two weeks went by."""
    made = Composition(tiny_spec(train={"steps": 1}), tiny_model_dir, new_run(tmp_path), task=PaysAlways())
    made.run()
    (alarm,) = [event for event in made.run_dir.events.read() if event.kind == "tripwire"]
    assert (alarm.step, alarm.cause) == (1, "zero_variance")
    assert "make the task harder or easier, or raise temperature" in alarm.detail


def test_opt_6_a_collapse_is_named_and_the_checkpoint_before_it_offered(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: entropy fell to 0.008 and reward from 0.88 to 0.09; nothing stopped the runs."""
    # The learning rate climbs to 1, by 0.0025 a step.
    spec = tiny_spec(
        optimizer={"lr": 1.0, "warmup_steps": 399},
        train={"steps": 400, "checkpoint_every": 5},
        tripwires={"on_alarm": "stop"},
    )
    made = Composition(spec, tiny_model_dir, new_run(tmp_path))
    with pytest.raises(RunStopped) as caught:
        made.run()
    lines = made.notes.steps
    (alarm, *_) = made.notes.causes("tripwire")
    assert alarm in {"truncation", "entropy_collapse", "duplicate_completions", "zero_variance"}
    assert alarm in str(caught.value)
    kept = made.run_dir.checkpoint_steps()[-1]
    assert f"the same command goes on from checkpoint step-{kept:06d}" in str(caught.value)
    verify_directory(made.run_dir.checkpoint_path(kept))
    # What is offered is a policy that still says many things: it sampled the step after its own.
    assert kept < len(lines) < 60
    assert lines[kept]["entropy_nats"] > 1.0 > lines[-1]["entropy_nats"]


def test_opt_6_a_learning_rate_of_1_is_named_in_two_steps_and_the_checkpoint_before_it_offered(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: answers shrank to a quarter, KL reached 9,748, and nothing stopped the runs."""
    sizes = {"checkpoint_every": 1, "keep_checkpoints": 9, "steps": 3}
    calm = Composition(tiny_spec(train=sizes), tiny_model_dir, new_run(tmp_path))
    calm.run()
    run_dir = RunDir.open(calm.run_dir.path)
    run_dir.acquire()
    # The next update, step 4's, destroys the policy; step 5 is the first to sample from it. What it says
    # then hangs on roundings, and with it which alarm is first, at step 5 or soon after.
    spec = tiny_spec(optimizer={"lr": 1.0}, train={**sizes, "steps": 20}, tripwires={"on_alarm": "stop"})
    made = Composition(spec, tiny_model_dir, run_dir)
    with pytest.raises(RunStopped, match=r"step [5-7] raised ") as caught:
        made.run()
    path, (before, last) = run_dir.checkpoints_path, run_dir.checkpoint_steps()[-2:]
    assert 4 <= last <= 6
    assert (
        f"goes on from checkpoint step-{last:06d}, whose weights raised this alarm; remove "
        f"{path}/step-{last:06d} to go on from step-{before:06d} before it"
    ) in str(caught.value)
    verify_directory(path / "step-000003")
    # Back at the last step before the collapse, the run goes on as if nothing had been.
    for step in range(4, last + 1):
        shutil.rmtree(path / f"step-{step:06d}")
    run_dir = RunDir.open(run_dir.path)
    run_dir.acquire()
    Composition(tiny_spec(train={**sizes, "steps": 4}), tiny_model_dir, run_dir).run()
    lengths = [line["reply_tokens_mean"] for line in run_dir.metrics.read()]
    assert len(lengths) == 4
    assert max(lengths) < 4 * min(lengths)
