"""Optimizer steps are AdamW on fp32 masters; what is refused changes nothing; state goes on bit-equal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.algorithm import ALGORITHMS
from strop.errors import CorruptRecord, DataError, LearnerError
from strop.policy import optimizer as optimizer_module
from strop.policy.learner import Learner, LossTerm, Term
from strop.policy.objective import ScoredTokens, TokenTerms, TokenTermsFn, lr_at
from strop.policy.optimizer import BETA1, EPS, MOMENTS, NO_VALUES, AdamW, Histogram, StepPlan, StepReport
from strop.policy.packing import PackedGroup, PackedReply, with_logprobs
from strop.spec.train import OptimizerSpec
from tests.policy.worlds import World, build_learner, make_model, reinforce

LR = 3e-3
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")


def signal(seed: int = 0) -> list[PackedGroup]:
    return [World(seed).packed(3, [4, 2]), World(seed + 50).packed(1, [3], advantage=-1.0)]


def take(learner: Learner, groups: list[PackedGroup]) -> StepReport:
    return learner.step(groups, temperature=1.0, token_terms=reinforce)


def state_of(learner: Learner, target: Path) -> Tensors:
    """Return masters and moments by name, as a checkpoint holds them."""
    target.mkdir(exist_ok=True)
    learner.save_state(target)
    # Cloned: a loaded tensor is a view of the file, and tests damage the file.
    return {name: tensor.clone() for name, tensor in load_file(target / "optimizer.safetensors").items()}


def copies_of(learner: Learner) -> Tensors:
    return {name: copy.detach().clone() for name, copy in learner.model.named_parameters()}


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def test_log_5_compute_copies_are_the_rounded_masters(model_dir: Path, tmp_path: Path) -> None:
    learner = build_learner(model_dir, dtype="bfloat16", lr=LR)
    before = copies_of(learner)
    take(learner, signal())
    state, after = state_of(learner, tmp_path), copies_of(learner)
    # Masters and moments.
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    for name, copy in after.items():
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy, state[f"master/{name}"].bfloat16())
        assert not torch.equal(copy, before[name])


def test_gradients_change_nothing(model_dir: Path, tmp_path: Path) -> None:
    learner = build_learner(model_dir, lr=LR)
    take(learner, signal())
    before = state_of(learner, tmp_path / "before")
    learner.gradients(signal(1), temperature=1.0, token_terms=reinforce)
    assert_equal(state_of(learner, tmp_path / "after"), before)
    # Nothing is left behind for the next step either: it is the step of a learner that never asked.
    other = build_learner(model_dir, lr=LR)
    take(other, signal())
    assert take(learner, signal(2)).grad_norm == take(other, signal(2)).grad_norm


def test_an_empty_batch_is_a_step_with_zero_gradient(model_dir: Path, tmp_path: Path) -> None:
    learner = build_learner(model_dir, lr=LR)
    take(learner, signal())
    before = state_of(learner, tmp_path / "before")
    report = take(learner, [])
    after = state_of(learner, tmp_path / "after")
    assert learner.version == 2
    assert (report.loss, report.grad_norm, report.num_positions, report.drift.num_values) == (0, 0, 0, 0)
    assert report.master_changed_frac is None
    for name, moment in before.items():
        decay = {"exp_avg": 0.9, "exp_avg_sq": 0.999}.get(name.split("/")[0])
        if decay is not None:
            torch.testing.assert_close(after[name], decay * moment, rtol=1e-6, atol=0.0)
    name = "master/model.norm.weight"
    # The first moment still pushes: step 2 with m = 0.9 * 0.1 g and v = 0.999 * 0.001 g^2 moves by
    # lr * (0.09 g / (1 - 0.81)) / (|g| sqrt(0.000999 / (1 - 0.998001))) = 0.670 lr.
    moved = (after[name] - before[name]).abs()
    assert float(moved.median()) == pytest.approx(0.670 * LR, rel=0.01)


def test_gradients_are_scaled_down_to_the_bound(model_dir: Path, tmp_path: Path) -> None:
    free = build_learner(model_dir, lr=LR, max_grad_norm=1e9)
    norm = take(free, signal()).grad_norm
    own = free.gradients(signal(), temperature=1.0, token_terms=reinforce)
    assert own.keys() == dict(free.model.named_parameters()).keys()
    bound = norm / 4
    bounded = build_learner(model_dir, lr=LR, max_grad_norm=bound)
    assert take(bounded, signal()).grad_norm == pytest.approx(norm)  # Reported before scaling.
    full, quarter = state_of(free, tmp_path / "free"), state_of(bounded, tmp_path / "bounded")
    for name in own:
        # After one step the first moment is 0.1 g.
        torch.testing.assert_close(quarter[f"exp_avg/{name}"], full[f"exp_avg/{name}"] / 4, rtol=1e-4, atol=0)
    squares = sum(float(quarter[f"exp_avg/{name}"].double().square().sum()) for name in own)
    assert 10 * math.sqrt(squares) == pytest.approx(bound, rel=1e-4)


def test_a_restored_learner_does_not_live_in_the_checkpoint_file(model_dir: Path, tmp_path: Path) -> None:
    first = build_learner(model_dir, lr=LR)
    take(first, signal())
    state_of(first, tmp_path / "kept")
    second = build_learner(model_dir, lr=LR)
    second.load_state(tmp_path / "kept")
    path = tmp_path / "kept" / "optimizer.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    take(first, signal(1))
    take(second, signal(1))
    assert_equal(copies_of(second), copies_of(first))


def _remove(name: str) -> Callable[[Path], None]:
    return lambda state: (state / name).unlink()


def _edit(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    def edit(state: Path) -> None:
        tensors = load_file(state / "optimizer.safetensors")
        change(tensors)
        save_file(tensors, state / "optimizer.safetensors")

    return edit


def _cut(state: Path) -> None:
    path = state / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tensors": (_remove("optimizer.safetensors"), "optimizer.safetensors"),
    "no counters": (_remove("learner.json"), "learner.json"),
    "counters without version": (lambda state: _write(state, "{}"), "version"),
    "torn counters": (lambda state: _write(state, '{"ver'), "JSONDecodeError"),
    "torn tensors": (_cut, "SafetensorError"),
    "a missing master": (_edit(lambda t: _drop(t, f"master/{NORM}")), f"master/{NORM}"),
    # One element would fit every shape if it were broadcast.
    "a short master": (_edit(lambda t: _shorten(t, f"master/{NORM}")), rf"master of {NORM} is .* \(1,\)"),
    "a bf16 moment": (_edit(lambda t: _round(t, f"exp_avg/{NORM}")), f"exp_avg of {NORM} is torch.bfloat16"),
}


def _write(state: Path, text: str) -> None:
    (state / "learner.json").write_text(text)


def _drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def _shorten(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:1].clone()


def _round(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_state_is_refused_and_changes_nothing(
    model_dir: Path, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    learner = build_learner(model_dir, lr=LR)
    take(learner, signal())
    kept = tmp_path / "kept"
    before = state_of(learner, kept)
    damage(kept)
    other = build_learner(model_dir, lr=LR)
    take(other, signal())
    with pytest.raises(CorruptRecord, match=named) as caught:
        other.load_state(kept)
    assert "kept cannot be restored" in str(caught.value)
    assert other.version == 1
    assert_equal(state_of(other, tmp_path / "after"), before)


@pytest.mark.parametrize(
    ("loss", "grad", "message"),
    [
        (0.0, math.inf, r"step 1 has loss .* norm nan\. Allowed: finite values"),
        # Where the value is none, a gradient that looks like one is not its derivative.
        (math.inf, 0.5, r"step 1 has loss (inf|nan) and gradient norm \d+"),
    ],
)
def test_what_is_not_finite_is_refused_and_the_next_step_is_clean(
    model_dir: Path, tmp_path: Path, loss: float, grad: float, message: str
) -> None:
    def broken(tokens: ScoredTokens, /) -> TokenTerms:
        nothing = torch.zeros_like(tokens.logprob_M)
        return TokenTerms(loss_N=nothing + loss, grad_N=nothing + grad)

    learner, other = build_learner(model_dir, lr=LR), build_learner(model_dir, lr=LR)
    with pytest.raises(LearnerError, match=message):
        learner.step(signal(), temperature=1.0, token_terms=broken)
    assert learner.version == 0
    take(learner, signal())
    take(other, signal())
    assert_equal(state_of(learner, tmp_path / "one"), state_of(other, tmp_path / "other"))


def test_log_7_the_report_counts_every_micro_batch(model_dir: Path) -> None:
    groups = [World(seed).packed(3, [4, 2]) for seed in range(4)]
    whole = take(build_learner(model_dir), groups)
    split = take(build_learner(model_dir, max_positions=8), groups)
    # A group feeds 3 + 3 + 1 = 7 positions.
    assert (whole.num_micro_batches, whole.num_positions) == (1, 28)
    assert (split.num_micro_batches, split.num_positions) == (4, 28)
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert_same_values(split.drift, whole.drift, 4 * 6)


def assert_same_values(one: Histogram, other: Histogram, num_values: int) -> None:
    assert one.num_values == other.num_values == num_values
    found, expected = ((each.mean, each.min, each.max) for each in (one, other))
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    for share in (0.01, 0.5, 0.99):
        assert one.quantile(share) == pytest.approx(other.quantile(share), rel=0.18, abs=1e-6)


@pytest.mark.parametrize("num_values", [1, 3, 1000])
@pytest.mark.parametrize("num_parts", [1, 4])
def test_quantiles_are_exact_to_9_percent(num_values: int, num_parts: int) -> None:
    values_M = torch.randn(num_values, generator=torch.Generator().manual_seed(1)) * torch.logspace(
        -6, 0.7, num_values
    )
    values_M[0] = 0.0
    parts = [Histogram.of([part]) for part in values_M.chunk(num_parts)]
    whole = sum(parts, NO_VALUES)
    assert whole.num_values == num_values
    assert whole.mean == pytest.approx(float(values_M.double().mean()), rel=1e-9)
    assert (whole.min, whole.max) == (float(values_M.min()), float(values_M.max()))
    for share in (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
        expected = float(torch.quantile(values_M, share))
        assert whole.quantile(share) == pytest.approx(expected, rel=0.091, abs=1e-8)


def test_a_value_that_is_not_finite_shows() -> None:
    lost = Histogram.of([torch.tensor([1.0, math.nan])]) + Histogram.of([torch.tensor([2.0])])
    assert lost.num_values == 3
    assert math.isnan(lost.mean)
    assert Histogram.of([torch.tensor([-math.inf, 1.0])]).min == -math.inf


def test_streams_of_one_reply_that_differ_in_length_are_refused() -> None:
    reply = World().packed(1, [3]).replies[0]
    with pytest.raises(DataError, match=r"3 tokens, 3 marks, 3 of them scored, and 2 log-probabilities"):
        PackedReply(
            token_ids=reply.token_ids,
            is_scored=reply.is_scored,
            engine_logprobs=reply.engine_logprobs[:2],
            advantage=1.0,
            weight=1.0,
        )


def test_optimizer_steps_of_one_batch_make_one_version(model_dir: Path, tmp_path: Path) -> None:
    learner = build_learner(model_dir, lr=LR)
    for place in range(3):
        learner.step_terms(terms_of(signal(place)), StepPlan(version=1, place=place))
    learner.save_state(tmp_path)
    assert json.loads((tmp_path / "learner.json").read_text()) == {"version": 1, "num_steps": 3}
    other = build_learner(model_dir, lr=LR)
    other.load_state(tmp_path)
    # The moments' bias follows from three steps, whatever the version says.
    one, two = (each.step_terms(terms_of(signal(9)), StepPlan(version=2)) for each in (learner, other))
    assert (one.grad_norm, one.update_ratio) == (two.grad_norm, two.update_ratio)
    assert_equal(state_of(learner, tmp_path / "one"), state_of(other, tmp_path / "two"))


def test_means_over_tokens_are_those_of_any_micro_batch(model_dir: Path) -> None:
    algorithm = replace(ALGORITHMS["grpo"], mode="decoupled", clip_low=0.01, clip_high=0.01)
    groups = [World(seed).packed(3, [4, 2], advantage=1.0 - seed) for seed in range(4)]
    found = []
    for max_positions in (None, 8):
        learner = build_learner(model_dir, max_positions=max_positions, lr=LR)
        sided = with_logprobs(groups, "old", learner.score(groups, 1.0))
        learner.step_terms(terms_of(sided, algorithm))
        found.append(learner.step_terms(terms_of(sided, algorithm)))
    assert found[1].num_micro_batches == 4 * found[0].num_micro_batches
    for name in ("approx_kl_nats", "clip_low_frac", "clip_high_frac"):
        whole, split = (report.totals[name] for report in found)
        assert whole.count == split.count == 24
        assert split.mean == pytest.approx(whole.mean, rel=1e-3)
        assert whole.mean > 0.0
    assert_same_values(found[1].log_ratio, found[0].log_ratio, 24)


def terms_of(groups: Sequence[PackedGroup], rule: TokenTermsFn = reinforce) -> list[Term]:
    return [LossTerm(name="loss", groups=groups, temperature=1.0, token_terms=rule)]


# Masters move as by PyTorch's AdamW, in blocks of any size, and what they moved by is measured.

SHAPES = {"matrix": (37, 11), "vector": (53,), "nothing": (0, 4), "one": (1,)}
SPEC = OptimizerSpec(lr=3e-3, weight_decay=0.1, beta2=0.95)


def draw_masters(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    masters = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    return masters


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_masters_move_as_by_adamw(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setitem(optimizer_module._BLOCKS, "cpu", block)
    masters, others = draw_masters(0), draw_masters(0)
    parts: list[dict[str, Any]] = [
        {"params": [master for master in others.values() if master.dim() > 1]},
        {"params": [master for master in others.values() if master.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(
        parts, lr=SPEC.lr, betas=(BETA1, SPEC.beta2), eps=EPS, weight_decay=SPEC.weight_decay
    )
    own, random = AdamW(masters, SPEC), torch.Generator().manual_seed(1)
    for step in range(4):
        before = {name: master.double() for name, master in masters.items()}
        for name, master in masters.items():
            gradient = torch.randn(master.shape, generator=random)
            assert master.grad is not None
            master.grad.copy_(gradient)
            others[name].grad = gradient
        for part in reference.param_groups:
            part["lr"] = SPEC.lr / (step + 1)
        moved = own.step(SPEC.lr / (step + 1))
        reference.step()
        for name, master in masters.items():
            torch.testing.assert_close(master, others[name], rtol=1e-6, atol=1e-7)
            for key in MOMENTS:
                expected = reference.state[others[name]][key]
                torch.testing.assert_close(own.moments[name][key], expected, rtol=1e-6, atol=1e-7)
        change = sum(float((masters[name].double() - old).square().sum()) for name, old in before.items())
        assert moved[0] == pytest.approx(change, rel=1e-5)
        assert moved[1] == pytest.approx(sum(float(old.square().sum()) for old in before.values()), rel=1e-6)
    assert own.num_steps == 4


def rates(num: int, **settings: object) -> list[float]:
    spec = OptimizerSpec.model_validate({"lr": 1.0, **settings})
    return [lr_at(spec, place, num) for place in range(num)]


def test_learning_rates_by_hand() -> None:
    # Thirds while it warms up, then what is left in quarters of the other four steps.
    assert rates(6, warmup_steps=2, schedule="constant") == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    assert rates(6, warmup_steps=2, schedule="linear") == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])
    # 0.2 + 0.8 x (1, 0.75, 0.5, 0.25)
    linear = rates(4, schedule="linear", final_frac=0.2)
    assert linear == pytest.approx([1.0, 0.8, 0.6, 0.4])
    # (1 + cos(pi x)) / 2 at 0, 1/4, 1/2, 3/4
    half = math.sqrt(0.5) / 2
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.5 + half, 0.5, 0.5 - half])
    assert rates(4, schedule="cosine", final_frac=0.5)[2] == pytest.approx(0.75)


def test_a_step_behind_the_last_has_the_final_rate() -> None:
    for schedule in ("linear", "cosine"):
        spec = OptimizerSpec.model_validate({"lr": 1.0, "schedule": schedule, "final_frac": 0.1})
        assert [lr_at(spec, place, 5) for place in (5, 9)] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rates_are_those_of_transformers(schedule: str) -> None:
    from transformers.optimization import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    make = get_linear_schedule_with_warmup if schedule == "linear" else get_cosine_schedule_with_warmup
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = make(optimizer, num_warmup_steps=0, num_training_steps=7)
    spec = OptimizerSpec.model_validate({"lr": 1.0, "schedule": schedule})
    for place in range(7):
        assert 2.0 * lr_at(spec, place, 7) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
