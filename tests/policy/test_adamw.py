"""Masters move as by PyTorch's AdamW, in blocks of any size, and what they moved by is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from strop.policy import optimizer as optimizer_module
from strop.policy.objective import lr_at
from strop.policy.optimizer import BETA1, EPS, MOMENTS, AdamW
from strop.spec.train import OptimizerSpec

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
        assert moved.change == pytest.approx(change, rel=1e-5)
        assert moved.weights == pytest.approx(
            sum(float(old.square().sum()) for old in before.values()), rel=1e-6
        )
    assert own.num_steps == 4


def test_nothing_to_move_is_nothing_moved() -> None:
    moved = AdamW({}, SPEC).step(1.0)
    assert (moved.change, moved.weights) == (0.0, 0.0)


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
