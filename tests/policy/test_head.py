"""The chunked head gives the losses and gradients of full logits, and never holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strop.policy.head import (
    EntropyBonus,
    Head,
    HeadGradients,
    TokenGradient,
    TokenRule,
    loss_and_gradients,
    token_logprobs,
)
from strop.policy.packing import PackedBatch, PackedLayout

pytestmark = pytest.mark.usefixtures("either_path")


def head_batch(rows: list[int], targets: list[int], *, seed: int = 0) -> PackedBatch:
    """Build a batch of which only the head's columns matter. Rows ascend."""
    random = np.random.default_rng(seed)
    num_rows, num_tokens = max(rows) + 1, len(rows)

    def draw(low: float, high: float) -> torch.Tensor:
        return torch.from_numpy(random.uniform(low, high, num_tokens).astype(np.float32))

    return PackedBatch(
        layout=PackedLayout.of_prompts([num_rows]),
        token_ids_N=torch.zeros(num_rows, dtype=torch.int64),
        position_ids_N=torch.arange(num_rows),
        scored_positions_U=torch.arange(num_rows),
        row_M=torch.tensor(rows),
        target_M=torch.tensor(targets),
        engine_logprob_M=draw(-5.0, -1.0),
        advantage_M=draw(-1.0, 1.0),
        weight_M=draw(0.01, 0.1),
        reply_M=np.zeros(num_tokens, dtype=np.int64),
        host_row_M=np.array(rows),
    )


def ratio_rule(batch: PackedBatch) -> TokenRule:
    """Weigh -A exp(logp - engine logp), whose gradient depends on the log-probability itself."""

    def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
        ratio = (logprob - batch.engine_logprob_M[tokens]).exp()
        value = -batch.weight_M[tokens] * batch.advantage_M[tokens] * ratio
        return TokenGradient(loss_M=value, grad_M=value)

    return rule


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        # logits 2, 1, 0, -1: log-sum-exp 2.440190 (algorithms.md P1).
        (1.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
        # Logits 4, 2, 0, -2: log-sum-exp 4.145078.
        (0.5, [-0.145078, -2.145078, -4.145078, -6.145078]),
        # Logits 1, 0.5, 0, -0.5: log-sum-exp 1.787339.
        (2.0, [-0.787339, -1.287339, -1.787339, -2.287339]),
    ],
)
def test_log_probabilities_by_hand(temperature: float, expected: list[float]) -> None:
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0], [-1.0]])
    batch = head_batch([0, 0, 0, 0], [0, 1, 2, 3])
    actual = token_logprobs(hidden, Head(weight), batch, temperature)
    assert actual.tolist() == pytest.approx(expected, abs=2e-6)


def test_the_gradient_of_one_token_by_hand() -> None:
    # Loss -logp of token 0, so d loss / d logits = p - onehot = [0.643914 - 1, 0.236883, ...] (P3).
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0], [-1.0]])
    grad_weight = torch.zeros(4, 1)

    def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
        return TokenGradient(loss_M=-logprob, grad_M=-torch.ones_like(logprob))

    result = loss_and_gradients(
        hidden,
        Head(weight),
        head_batch([0], [0]),
        temperature=1.0,
        rule=rule,
        into=HeadGradients(grad_weight),
    )
    assert float(result.loss) == pytest.approx(0.440190, abs=1e-6)
    logits_grad = [-0.356086, 0.236883, 0.087144, 0.032059]
    assert grad_weight[:, 0].tolist() == pytest.approx(logits_grad, abs=1e-6)
    # Times the weights: -0.712172 + 0.236883 + 0 - 0.032059.
    assert result.grad_hidden_U_D.item() == pytest.approx(-0.507348, abs=1e-6)


ROWS = [0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 5, 5, 6, 7, 8, 8]
"""Nine rows: some with one target, some with several."""


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 4, 8, 9, 10, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("scale", "cap", "has_bias"),
    [(1.0, None, False), (0.25, None, True), (1.0, 2.0, True), (0.5, 1.5, False)],
)
@pytest.mark.parametrize("term_weight", [None, 1.0, 0.25])
def test_losses_and_gradients_are_those_of_full_logits(
    chunk_rows: int,
    temperature: float,
    scale: float,
    cap: float | None,
    has_bias: bool,
    term_weight: float | None,
) -> None:
    """With an entropy bonus the loss is less by 0.3 x weight x entropy of every token.

    The term's weight scales the bonus's gradients alone.
    """
    random = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 6, generator=random), torch.randn(50, 6, generator=random)
    bias = torch.randn(50, generator=random) * has_bias
    targets = torch.randint(0, 50, (len(ROWS),), generator=random).tolist()
    targets[1] = targets[0]  # Two replies may begin with the same token.
    batch = head_batch(ROWS, targets)
    own = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = scale * (own[0] @ own[1].t() + own[2])
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    all_logprobs = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)[batch.row_M]
    logp = all_logprobs[batch.row_M, batch.target_M]
    policy = (-batch.weight_M * batch.advantage_M * (logp - batch.engine_logprob_M).exp()).sum()
    bonus = (0.0 if term_weight is None else 0.3) * (batch.weight_M * entropy).sum()
    expected = torch.autograd.grad(policy - (term_weight or 0.0) * bonus, own)

    head = Head(weight, bias if has_bias else None, scale, cap)
    torch.testing.assert_close(head.logits(hidden).double(), logits.detach(), rtol=1e-5, atol=1e-5)
    # The head adds to what is there.
    into = HeadGradients(torch.ones(50, 6), torch.ones(50) if has_bias else None)
    result = loss_and_gradients(
        hidden,
        head,
        batch,
        temperature=temperature,
        rule=ratio_rule(batch),
        into=into,
        bonus=None if term_weight is None else EntropyBonus(factor=0.3, term_weight=term_weight),
        chunk_rows=chunk_rows,
    )
    assert float(result.loss) == pytest.approx(float((policy - bonus).detach()), rel=1e-5)
    torch.testing.assert_close(result.logprob_M.double(), logp.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.grad_hidden_U_D.double(), expected[0], rtol=1e-4, atol=1e-6)
    for actual, gradient in zip((into.weight, into.bias), expected[1:], strict=True):
        if actual is not None:
            torch.testing.assert_close(actual.double() - 1.0, gradient, rtol=1e-4, atol=1e-6)
    if term_weight is None:
        scored = token_logprobs(hidden, head, batch, temperature, chunk_rows=chunk_rows)
        assert torch.equal(scored, result.logprob_M)
    else:
        assert result.entropy_M is not None
        torch.testing.assert_close(result.entropy_M.double(), entropy.detach(), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_sampled_adds_nothing_to_an_entropy() -> None:
    """0 x log 0 is 0: two tokens of equal chance have ln 2, whatever is impossible beside them."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [3.0], [-1e30], [-torch.inf]])
    grad_weight = torch.zeros(4, 1)

    def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
        nothing = torch.zeros_like(logprob)
        return TokenGradient(loss_M=nothing, grad_M=nothing)

    batch = head_batch([0], [0])
    result = loss_and_gradients(
        hidden,
        Head(weight),
        batch,
        temperature=1.0,
        rule=rule,
        into=HeadGradients(grad_weight),
        bonus=EntropyBonus(factor=1.0),
    )
    assert float(result.loss) == pytest.approx(-float(batch.weight_M[0]) * np.log(2))
    # At the highest entropy of the two nothing is to be gained.
    assert grad_weight[:, 0].tolist() == pytest.approx([0.0] * 4, abs=1e-7)


def test_a_micro_batch_without_scored_tokens_has_no_loss() -> None:
    batch = head_batch([0], [0])
    names = ["scored_positions_U", "row_M", "target_M", "engine_logprob_M", "advantage_M", "weight_M"]
    names += ["reply_M", "host_row_M"]
    empty = replace(batch, **{name: getattr(batch, name)[:0] for name in names})
    grad_weight = torch.zeros(50, 6)
    result = loss_and_gradients(
        torch.zeros(0, 6),
        Head(torch.ones(50, 6)),
        empty,
        temperature=1.0,
        rule=ratio_rule(empty),
        into=HeadGradients(grad_weight),
    )
    assert (float(result.loss), result.logprob_M.numel(), float(grad_weight.abs().sum())) == (0, 0, 0)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many elements the largest tensor has that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_no_tensor_holds_all_logits() -> None:
    num_rows, vocab, width, chunk_rows = 96, 1000, 8, 16
    hidden, weight = torch.randn(num_rows, width), torch.randn(vocab, width)
    batch = head_batch(list(range(num_rows)), [row % vocab for row in range(num_rows)])
    with LargestTensor() as largest:
        loss_and_gradients(
            hidden,
            Head(weight),
            batch,
            temperature=1.0,
            rule=ratio_rule(batch),
            into=HeadGradients(torch.zeros(vocab, width)),
            chunk_rows=chunk_rows,
        )
        token_logprobs(hidden, Head(weight), batch, 1.0, chunk_rows=chunk_rows)
    assert largest.num_elements == chunk_rows * vocab
