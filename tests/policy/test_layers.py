"""What GPUs run in place of the C kernels gives the same values and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from strop.policy import layers
from strop.policy.fused_trunk import build_fused_trunk
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.spec.train import OptimizerSpec
from tests.fixtures.tiny_model import tiny_model
from tests.policy.worlds import World, reinforce, relative_error


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_of_plain_passes_are_the_models_own(tmp_path: Path, family: str) -> None:
    """In float64, which the C kernels do not take, so that every pass is a plain one."""
    path = tiny_model(tmp_path, family=family)
    gradients = []
    for is_fused in (True, False):
        model = LanguageModel.load(path, dtype=torch.float32, may_fuse=False)
        model.module.double()
        model = LanguageModel(model.module)
        model.fused = build_fused_trunk(model.module, even_plain=True) if is_fused else None
        assert (model.fused is not None) == is_fused
        learner = Learner(model, OptimizerSpec())
        groups = [World(seed).packed(5, [3, 1, 7]) for seed in range(3)]
        gradients.append(learner.gradients(groups, temperature=0.7, token_terms=reinforce))
    # The head takes softmaxes in fp32 whatever the type.
    assert relative_error(gradients[0], gradients[1]) <= 1e-5


def exact_gradient(logits: torch.Tensor, tokens: Any, temperature: float) -> torch.Tensor:
    wide = logits.double().requires_grad_()
    row, target, grad = tokens
    logp = torch.log_softmax(wide / temperature, dim=-1)[row, target]
    return torch.autograd.grad((logp * grad.double()).sum(), wide)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-4), (torch.bfloat16, 4e-3)])
def test_the_gradient_of_logits(temperature: float, dtype: torch.dtype, limit: float) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=random) * 3
    # Row 2: nearly certain of its token; 1 - p of the gradient is left there, and must not be rounded away.
    logits[2, 7] = 11.0
    logits = logits.to(dtype)
    # Row 0 is asked for two tokens, of which one twice; row 3 for nothing.
    row = torch.tensor([0, 0, 0, 1, 2, 4])
    target = torch.tensor([3, 9, 3, 1, 7, 39])
    grad = torch.tensor([0.5, -1.0, 0.25, 2.0, 1.0, -0.125])
    expected = exact_gradient(logits, (row, target, grad), temperature)
    log_sums = layers.log_sum_exp(logits, temperature)
    torch.testing.assert_close(
        log_sums.double(), torch.logsumexp(logits.double() / temperature, dim=-1), rtol=1e-6, atol=1e-6
    )
    layers.token_gradient_(logits, log_sums, row, target, grad, temperature)
    assert float(expected[2, 7]) == pytest.approx(float(logits[2, 7]), rel=0.01)
    for index in (0, 1, 2, 4):
        error = (logits[index].double() - expected[index]).norm()
        assert float(error / expected[index].norm()) <= limit
    assert not bool(logits[3].any())


def test_what_cannot_be_compiled_runs_as_it_is_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        def fail(*_: object) -> None:
            raise TorchDynamoException("no compiler")

        return fail

    class OnGpu(torch.Tensor):
        """A tensor that says it lies on a GPU."""

        device = torch.device("cuda")

    monkeypatch.setattr(torch, "compile", refuse)
    double = layers._compiled_on_gpus(lambda x: x + x)
    value = torch.ones(2).as_subclass(OnGpu)
    with pytest.warns(RuntimeWarning, match="runs uncompiled .*no compiler"):
        assert double(value).tolist() == [2.0, 2.0]
    assert double(value).tolist() == [2.0, 2.0]
