"""Each kernel against PyTorch: the same numbers, and the gradients that autograd finds."""

from __future__ import annotations

import pytest
import torch

from strop.kernels import calls
from tests.fixtures.kernels import needs_kernels

pytestmark = needs_kernels

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative to the largest entry. bf16 has 8 bits: one rounding is 2^-9, and norms round twice."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES)
ROWS = pytest.mark.parametrize("num_rows", [1, 37, 300])
"""One; a share for no thread to be even; enough work that threads share it."""


def random(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    gap = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert float(gap) <= TOLERANCES[dtype]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as an fp32 leaf for autograd."""
    return tensor.float().clone().requires_grad_()


@DTYPES
@ROWS
@pytest.mark.parametrize("has_added", [True, False])
def test_norm_and_its_gradient(dtype: torch.dtype, num_rows: int, has_added: bool) -> None:
    x, added = random(num_rows, 64, dtype=dtype), random(num_rows, 64, dtype=dtype, seed=1)
    weight = random(64, dtype=dtype, seed=2)
    upstream = [random(num_rows, 64, dtype=dtype, seed=seed) for seed in (3, 4)]
    total, normed, inverse = calls.add_rms_norm(x, added if has_added else None, weight, 1e-5)
    grad_x, grad_weight = calls.add_rms_norm_backward(upstream[0], upstream[1], total, weight, inverse)

    x_leaf, weight_leaf = leaf(x), leaf(weight)
    plain = x_leaf + added.float() if has_added else x_leaf * 1.0
    plain_normed = torch.nn.functional.rms_norm(plain, (64,), weight_leaf, 1e-5)
    torch.autograd.backward((plain_normed, plain), [grad.float() for grad in upstream])
    for actual, expected in ((total, plain), (normed, plain_normed)):
        assert_same(actual, expected.detach(), dtype)
    assert x_leaf.grad is not None
    assert weight_leaf.grad is not None
    assert_same(grad_x, x_leaf.grad, dtype)
    assert_same(grad_weight, weight_leaf.grad, dtype)


@DTYPES
@ROWS
@pytest.mark.parametrize("width", [16, 32, 96])
def test_rotation_and_its_inverse(dtype: torch.dtype, num_rows: int, width: int) -> None:
    """Half a head may be less than one vector, whole vectors, or both."""
    storage = random(num_rows, 5 * width + 3, dtype=dtype)
    heads = storage[:, : 5 * width].view(num_rows, 5, width)  # Rows that are not dense.
    angles = random(num_rows, width // 2, seed=1).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    out = torch.empty(num_rows, 5, width, dtype=dtype)
    calls.rotate(heads, cosine, sine, out, num_rotated=3)

    low, high = heads.float().chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    expected = heads.float() * cosine.float()[:, None] + turned * sine.float()[:, None]
    assert_same(out[:, :3], expected[:, :3], dtype)
    assert torch.equal(out[:, 3:], heads[:, 3:])
    back = torch.empty_like(out)
    calls.rotate(out, cosine, sine, back, num_rotated=3, is_backward=True)
    # cos^2 + sin^2 is 1 up to rounding, so turning back restores the heads.
    torch.testing.assert_close(back, heads, atol=6e-2 if dtype is torch.bfloat16 else 1e-5, rtol=0.0)


@DTYPES
@ROWS
def test_gate_and_its_gradient(dtype: torch.dtype, num_rows: int) -> None:
    gate_up, upstream = random(num_rows, 96, dtype=dtype) * 4, random(num_rows, 48, dtype=dtype, seed=1)
    source = leaf(gate_up)
    expected = torch.nn.functional.silu(source[:, :48]) * source[:, 48:]
    torch.autograd.backward(expected, upstream.float())
    assert source.grad is not None
    assert_same(calls.gated(gate_up), expected.detach(), dtype)
    assert_same(calls.gated_backward(upstream, gate_up), source.grad, dtype)


def test_gate_at_the_ends_of_the_exponential() -> None:
    """silu(-inf side) is 0, silu(large) is itself, and a NaN stays one."""
    gate = torch.tensor([-1000.0, -88.0, 0.0, 88.0, 1000.0, float("nan")]).repeat(8)[:16]
    out = calls.gated(torch.cat([gate, torch.ones(16)])[None])[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), equal_nan=True, atol=1e-30, rtol=1e-6)


@DTYPES
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 8])
def test_decode_attention_over_rows_of_any_length(dtype: torch.dtype, ratio: int) -> None:
    num_kv_heads, width, slots = 2, 32, 48
    lengths = torch.tensor([0, 1, 15, 16, 17, 47])
    num_rows = len(lengths)
    keys, values = (random(num_rows + 1, num_kv_heads, slots, width, dtype=dtype, seed=s) for s in (0, 1))
    projected = random(num_rows, (ratio + 2) * num_kv_heads, width, dtype=dtype, seed=2)
    query, key, value = torch.split(projected, [ratio * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    # Row 3 reads its first tile where row 5 holds the same.
    keys[3, :, :16], values[3, :, :16] = keys[5, :, :16], values[5, :, :16]
    rows = calls.CacheRows(
        lengths=lengths, owners=torch.tensor([0, 1, 2, 5, 4, 5]), shared=torch.tensor([0, 0, 0, 16, 16, 32])
    )
    tiles = keys.view(num_rows + 1, num_kv_heads, slots // 16, 16, width).transpose(3, 4).contiguous()
    stored = values.clone()
    actual = calls.decode_attention(tiles, stored, rows, query, key, value, 0.2)

    for row, length in enumerate(lengths.tolist()):
        seen = [
            torch.cat([old[row, :, :length], new[row][:, None]], dim=1).double()
            for old, new in ((keys, key), (values, value))
        ]
        scores = query[row].view(num_kv_heads, ratio, width).double() @ seen[0].transpose(1, 2) * 0.2
        expected = (torch.softmax(scores, dim=-1) @ seen[1]).flatten(0, 1)
        assert_same(actual[row], expected, dtype)
        assert torch.equal(stored[row, :, length], value[row])
        assert torch.equal(tiles[row, :, length // 16, :, length % 16], key[row])
    assert torch.equal(stored[num_rows], values[num_rows]), "rows that do not live are not written"


@DTYPES
@pytest.mark.parametrize("vocab", [16, 262, 1003])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_sums_and_token_gradients(dtype: torch.dtype, vocab: int, temperature: float) -> None:
    """Rows with no token, one, several, and the same target twice."""
    logits = random(9, vocab, dtype=dtype) * 4
    row = torch.tensor([0, 0, 0, 2, 3, 3, 8])
    target = torch.tensor([5, 5, vocab - 1, 7, 0, 1, 9])
    grads = random(7, seed=1)
    source = leaf(logits)
    log_sums = calls.log_sum_exp(logits, temperature)
    assert_same(log_sums, torch.logsumexp(source.detach() / temperature, dim=-1), torch.float32)
    logprobs = torch.log_softmax(source / temperature, dim=-1)[row, target]
    torch.autograd.backward(logprobs, grads)
    assert source.grad is not None
    calls.token_gradient_(logits, log_sums, row, target, grads, temperature)
    assert_same(logits, source.grad, dtype)


@pytest.mark.parametrize("length", [1, 16, 100_003])
def test_accumulation(length: int) -> None:
    total, addend = random(length), random(length, dtype=torch.bfloat16, seed=1)
    expected = total + addend.float()
    calls.accumulate_(total, addend)
    assert torch.equal(total, expected)
