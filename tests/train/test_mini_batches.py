"""Several optimizer steps per batch: against plain PyTorch, over a resume, and where one of them fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.algorithm import build_algorithm
from strop.algorithm.advantages import Aggregation
from strop.cluster import Roles
from strop.policy import optimizer as optimizer_module
from strop.policy.learner import Term
from strop.policy.optimizer import BETA1, StepPlan, StepReport
from strop.policy.packing import PackedGroup, with_logprobs
from strop.record import RunDir
from strop.record.rollouts import read_rollouts
from strop.rollout import Rollout
from strop.spec import RunSpec
from strop.spec.algorithm import AlgorithmSpec
from strop.spec.model import ReferenceSpec
from strop.spec.train import TrainSpec
from strop.train.batch import build_batch, cut_batch, penalize_rewards
from tests.fixtures.tiny_run import Composition, learner_of, new_run, read_curve, take_up, tiny_spec
from tests.policy.naive import padded_logprobs, sampled_places
from tests.policy.worlds import REPLY_LIMIT, World, ragged_groups

FOUR = {"steps": 1, "prompts_per_step": 4, "group_size": 4, "mini_batches": 4, "checkpoint_every": 1}
CLIPPED = {
    "name": "dapo",
    "zero_variance": "keep",
    "overlong": "keep",
    "correction": "none",
    "clip_low": 0.03,
    "clip_high": 0.05,
}


def train(root: Path, model_dir: Path, spec: RunSpec, change: Any = None) -> Composition:
    made = Composition(spec, model_dir, new_run(root))
    made.run(change)
    return made


def exported(run: RunDir) -> dict[str, torch.Tensor]:
    latest = run.latest_checkpoint()
    assert latest is not None
    return load_file(latest[1] / "model" / "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """What plain PyTorch finds in one mini-batch."""

    loss: float
    grad_norm: float
    log_ratios: list[float]
    num_low: int
    num_high: int


def plain_update(
    module: Any, groups: Sequence[list[Rollout]], order: Sequence[Sequence[int]], spec: RunSpec
) -> list[PlainStep]:
    """Train on mini-batches as verl defines it, with autograd and PyTorch's AdamW.

    Old log-probabilities once, under the weights that the batch began with; then for every mini-batch the
    clipped objective, its mean over the tokens of that mini-batch, clipping of the norm, one step.
    """
    chosen, settings = spec.algorithm, spec.optimizer
    rows = [rollout for group in groups for rollout in group]
    starts = np.cumsum([0, *(len(group) for group in groups)])
    with torch.no_grad():
        old_S_T = padded_logprobs(module, rows, spec.sampling.temperature)
    assert chosen.clip_low is not None
    assert chosen.clip_high is not None
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=settings.lr,
        betas=(BETA1, settings.beta2),
        eps=optimizer_module.EPS,
        weight_decay=0.0,
    )
    steps = []
    for part in order:
        optimizer.zero_grad()
        logp_S_T = padded_logprobs(module, rows, spec.sampling.temperature)
        losses, gaps, num_low, num_high = [], [], 0, 0
        for index in part:
            rewards = torch.tensor([rollout.outcome.reward or 0.0 for rollout in groups[index]]).double()
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for member, rollout in enumerate(groups[index]):
                row, advantage = int(starts[index]) + member, float(advantages[member])
                for place, _ in sampled_places(rollout):
                    gap = logp_S_T[row, place - 1] - old_S_T[row, place - 1]
                    bounded = gap.exp().clamp(1 - chosen.clip_low, 1 + chosen.clip_high)
                    losses.append(-torch.minimum(gap.exp() * advantage, bounded * advantage))
                    gaps.append(float(gap.detach()))
                    num_low += advantage < 0 and math.exp(gaps[-1]) < 1 - chosen.clip_low
                    num_high += advantage > 0 and math.exp(gaps[-1]) > 1 + chosen.clip_high
        loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), settings.max_grad_norm)
        optimizer.step()
        steps.append(
            PlainStep(
                loss=float(loss.detach()),
                grad_norm=float(norm),
                log_ratios=gaps,
                num_low=num_low,
                num_high=num_high,
            )
        )
    return steps


def drawn_order(spec: RunSpec, step: int = 0, epoch: int = 0) -> list[list[int]]:
    """Return the order that seed and step name, cut into equal parts."""
    stream = np.random.Philox(key=[spec.seed, 2**32], counter=[0, 0, epoch, step])
    order = np.random.Generator(stream).permutation(spec.train.prompts_per_step).tolist()
    size = len(order) // spec.train.mini_batches
    return [order[start : start + size] for start in range(0, len(order), size)]


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_epoch_of_four_mini_batches_is_verls_own(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    # With the usual eps the rounding of gradients near 0, not their formula, would decide where they lead.
    monkeypatch.setattr(optimizer_module, "EPS", 1e-5)
    ranges = {"clip_low": 0.006, "clip_high": 0.01}
    spec = tiny_spec(train=FOUR | {"epochs": epochs}, algorithm=CLIPPED | ranges, optimizer={"lr": 2e-4})
    made = train(tmp_path, tiny_model_dir, spec)
    rollouts = read_rollouts(made.run_dir.rollouts_path(1))
    groups = [rollouts[start : start + 4] for start in range(0, len(rollouts), 4)]
    assert any(len({one.outcome.reward for one in group}) > 1 for group in groups)
    module: Any = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir, dtype=torch.float64, attn_implementation="eager"
    )
    module.eval()
    # The pad token is the terminator here, and is trained.
    module.get_input_embeddings().padding_idx = None
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    order = [part for epoch in range(epochs) for part in drawn_order(spec, epoch=epoch)]
    steps = plain_update(module, groups, order, spec)
    found, expected = exported(made.run_dir), dict(module.named_parameters())
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].detach(), rtol=0.0, atol=1e-6)
    moved = max(float((found[name] - before[name]).abs().max()) for name in found)
    assert moved > 5e-4, "the weights hardly moved, so the comparison would say little"

    # Clipping really acted, and the numbers of the step are those of plain PyTorch.
    num_low, num_high = sum(step.num_low for step in steps), sum(step.num_high for step in steps)
    assert num_low > 0
    assert num_high > 0
    (line,) = made.run_dir.metrics.read()
    gaps = np.array([gap for step in steps for gap in step.log_ratios])
    assert line["num_optimizer_steps"] == 4 * epochs
    assert line["clip_low_frac"] == pytest.approx(num_low / len(gaps))
    assert line["clip_high_frac"] == pytest.approx(num_high / len(gaps))
    assert line["approx_kl_nats"] == pytest.approx(float((np.expm1(gaps) - gaps).mean()), rel=1e-3)
    # Logarithms of ratios are exact to 9 %.
    told = [math.log(line[f"ratio_p{name}"]) for name in ("01", "50", "99")]
    assert told == pytest.approx(np.quantile(gaps, (0.01, 0.5, 0.99)).tolist(), rel=0.09, abs=1e-5)
    assert line["loss"] == pytest.approx(float(np.mean([step.loss for step in steps])), abs=1e-6)
    assert line["grad_norm"] == pytest.approx(max(step.grad_norm for step in steps), rel=1e-4)
    # One version, however many optimizer steps.
    assert line["policy_version"] == 1


def test_the_change_of_a_step_over_the_weights_is_measured(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = train(tmp_path, tiny_model_dir, tiny_spec(train={"steps": 1, "checkpoint_every": 1}))
    before = load_file(tiny_model_dir / "model.safetensors")
    after = exported(made.run_dir)
    change = math.sqrt(
        sum(float((after[name].double() - before[name].double()).square().sum()) for name in after)
    )
    weights = math.sqrt(sum(float(before[name].double().square().sum()) for name in after))
    (line,) = made.run_dir.metrics.read()
    assert line["update_ratio"] == pytest.approx(change / weights, rel=1e-4)


SEVERAL = {"steps": 4, "prompts_per_step": 4, "mini_batches": 2, "epochs": 2, "checkpoint_every": 2}


def test_a_resumed_run_draws_the_same_mini_batches(tmp_path: Path, tiny_model_dir: Path) -> None:
    optimizer = {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 3, "final_frac": 0.1}
    spec = tiny_spec(train=SEVERAL, optimizer=optimizer, algorithm={"entropy_weight": 0.01})
    whole = train(tmp_path / "whole", tiny_model_dir, spec)
    made = Composition(spec, tiny_model_dir, new_run(tmp_path / "cut"))

    def die(roles: Roles) -> Roles:
        """Die in the middle of the third batch."""
        learner = learner_of(roles)
        right = learner.step_terms

        def step_terms(terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
            if plan is not None and plan.place == 9:
                raise RuntimeError("killed")
            return right(terms, plan)

        learner.step_terms = step_terms  # type: ignore[method-assign]
        return roles

    with pytest.raises(RuntimeError, match="killed"):
        made.run(die)
    again = take_up(made)
    again.run()
    assert read_curve(again.run_dir.path) == read_curve(whole.run_dir.path)
    lines = again.run_dir.metrics.read()
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["lr"] <= 3e-3 for line in lines)
    assert lines[-1]["lr"] < lines[1]["lr"]


def test_the_rate_reaches_its_end_with_the_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train=SEVERAL, optimizer={"lr": 1e-3, "schedule": "linear", "final_frac": 0.5})
    lines = train(tmp_path, tiny_model_dir, spec).run_dir.metrics.read()
    # The last of 4, 8, 12 and 16 optimizer steps has 3, 7, 11 and 15 before it: 1 - 0.5 x place / 16.
    expected = [1e-3 * (1 - 0.5 * place / 16) for place in (3, 7, 11, 15)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)


def poison(*places: int) -> Callable[[Roles], Roles]:
    """Give some optimizer steps what nobody knows."""

    def change(roles: Roles) -> Roles:
        learner = learner_of(roles)
        right = learner.step_terms

        def step_terms(terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
            assert plan is not None
            if plan.place in places:
                nothing = [
                    np.full(len(reply.engine_logprobs), np.nan, dtype=np.float32)
                    for group in terms[0].groups
                    for reply in group.replies
                ]
                terms = [replace(terms[0], groups=with_logprobs(terms[0].groups, "old", nothing))]
            return right(terms, plan)

        learner.step_terms = step_terms  # type: ignore[method-assign]
        return roles

    return change


def test_a_mini_batch_that_is_not_finite_is_refused_and_the_others_go_on(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    spec = tiny_spec(train={**FOUR, "steps": 2}, algorithm={"zero_variance": "keep"})
    made = train(tmp_path, tiny_model_dir, spec, poison(1))
    first, second = made.run_dir.metrics.read()
    assert (first["num_optimizer_steps"], first["num_refused_steps"]) == (3.0, 1.0)
    assert second["num_optimizer_steps"] == 4.0
    assert "num_refused_steps" not in second
    assert [line["policy_version"] for line in (first, second)] == [1, 2]
    assert made.notes.causes("tripwire").count("non_finite") == 1
    assert math.isfinite(first["loss"])
    assert all(bool(value.isfinite().all()) for value in exported(made.run_dir).values())


TRAIN = TrainSpec(prompts_per_step=6, mini_batches=3, epochs=2)


def replies_of(groups: Sequence[PackedGroup]) -> list[bytes]:
    return [reply.token_ids.tobytes() for group in groups for reply in group.replies]


def test_every_epoch_takes_every_reply_once_in_an_order_of_its_own() -> None:
    algorithm = replace(build_algorithm(AlgorithmSpec()), zero_variance="keep")
    batch = build_batch(algorithm, ragged_groups(), REPLY_LIMIT)
    steps = cut_batch(algorithm, batch, TRAIN, seed=5, step=7)
    assert len(steps) == 6
    epochs = [steps[:3], steps[3:]]
    for epoch in epochs:
        assert sorted(reply for part in epoch for reply in replies_of(part)) == sorted(
            replies_of(batch.groups)
        )
    found = [[replies_of(part) for part in epoch] for epoch in epochs]
    assert found[0] != found[1]
    again = cut_batch(algorithm, batch, TRAIN, seed=5, step=7)
    assert [replies_of(part) for part in again] == [replies_of(part) for part in steps]
    others = [cut_batch(algorithm, batch, TRAIN, seed=seed, step=step) for seed, step in ((5, 8), (6, 7))]
    assert all(
        [replies_of(part) for part in other] != [replies_of(part) for part in steps] for other in others
    )


@pytest.mark.parametrize("aggregation", Aggregation)
def test_a_mini_batch_is_weighed_as_a_batch_of_its_groups_alone(aggregation: Aggregation) -> None:
    algorithm = replace(build_algorithm(AlgorithmSpec()), zero_variance="skip", aggregation=aggregation)
    groups = ragged_groups()
    batch = build_batch(algorithm, groups, REPLY_LIMIT)
    steps = cut_batch(algorithm, batch, TRAIN, seed=5, step=0)
    # Groups that are not forwarded count with their mini-batch.
    for part, chosen in zip(steps, drawn(batch_size=5, parts=3), strict=True):
        alone = build_batch(algorithm, [groups[index] for index in sorted(chosen)], REPLY_LIMIT)
        found = [reply.weight for group in part for reply in group.replies]
        assert found == pytest.approx([reply.weight for group in alone.groups for reply in group.replies])
        assert replies_of(part) == replies_of(alone.groups)


def drawn(*, batch_size: int, parts: int) -> list[list[int]]:
    """Return both epochs' parts of seed 5 and step 0; the last of the six groups counts nowhere."""
    found: list[list[int]] = []
    for epoch in range(2):
        stream = np.random.Philox(key=[5, 2**32], counter=[0, 0, epoch, 0])
        order = np.random.Generator(stream).permutation(batch_size)
        found += [part.tolist() for part in np.array_split(order, parts)]
    return found


def test_groups_that_do_not_count_are_in_no_mini_batch() -> None:
    algorithm = replace(build_algorithm(AlgorithmSpec()), zero_variance="drop")
    groups = [World(seed).group(2, [[2], [3]], [1.0, float(seed % 2)]) for seed in range(4)]
    batch = build_batch(algorithm, groups, REPLY_LIMIT)
    steps = cut_batch(algorithm, batch, TrainSpec(mini_batches=4), seed=0, step=0)
    # Two of four have a difference: two mini-batches of one group each, of weight 1.
    assert [len(part) for part in steps] == [1, 1]
    assert [sum(len(r.engine_logprobs) * r.weight for r in part[0].replies) for part in steps] == [1.0, 1.0]


def test_penalties_in_the_reward_by_hand() -> None:
    """Log-ratios [0.5, -0.2] and [1.0], beta 0.1: a token pays for itself and for all that come later."""
    algorithm = build_algorithm(
        AlgorithmSpec(name="reinforce_pp"), ReferenceSpec(kl_beta=0.1), TrainSpec(mini_batches=2)
    )
    group = World().packed(3, [2, 1])
    rewards = (1.0, 0.0)
    group = replace(
        group,
        replies=tuple(
            replace(reply, advantage=reward) for reply, reward in zip(group.replies, rewards, strict=True)
        ),
    )
    old = [np.array([-1.0, -2.0], np.float32), np.array([-1.0], np.float32)]
    reference = [np.array([-1.5, -1.8], np.float32), np.array([-2.0], np.float32)]
    sided = with_logprobs(with_logprobs([group], "old", old), "reference", reference)
    # 1 - 0.1 x 0.3, 1 + 0.1 x 0.2, 0 - 0.1 x 1
    plain = penalize_rewards(replace(algorithm, over_batch="none"), sided)
    found = [reply.token_advantages for reply in plain[0].replies]
    assert np.concatenate([one for one in found if one is not None]) == pytest.approx([0.97, 1.02, -0.1])
    # Mean 0.63, spread sqrt((0.34^2 + 0.39^2 + 0.73^2) / 3) = 0.516592
    whitened = penalize_rewards(algorithm, sided)
    found = [reply.token_advantages for reply in whitened[0].replies]
    joined = np.concatenate([one for one in found if one is not None])
    assert joined == pytest.approx([0.658160, 0.754948, -1.413108], abs=1e-5)


def test_a_penalty_in_the_reward_pulls_to_the_reference(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(
        train={**FOUR, "steps": 2}, algorithm={"name": "reinforce_pp"}, reference={"kl_beta": 0.5}
    )
    made = train(tmp_path, tiny_model_dir, spec)
    first, second = made.run_dir.metrics.read()
    assert first["reference_kl_nats"] > 0.0
    assert [line["num_optimizer_steps"] for line in (first, second)] == [4.0, 4.0]
    unpenalized = spec.model_copy(update={"reference": ReferenceSpec()})
    other = train(tmp_path / "other", tiny_model_dir, unpenalized)
    assert "reference_kl_nats" not in other.run_dir.metrics.read()[0]
    found, expected = exported(made.run_dir), exported(other.run_dir)
    assert any(not torch.equal(found[name], expected[name]) for name in found)
