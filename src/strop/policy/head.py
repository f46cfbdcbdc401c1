"""The LM head over scored positions only, in chunks, never holding all logits.

A head is a matrix, and in some families also a bias, a factor and a soft cap (`Head`), under names that
differ by family. `find_head_form` measures them: it runs the module's forward with a ramp in place of the
matrix's output, and the logits then show the function at small values and at large ones.

For losses that are separable over tokens, the gradient of a logit row needs only that row's own
log-probability, so one pass computes log-probability, loss and gradient (6 FLOP per head parameter
and row instead of 8 with a second pass).

Shapes: U scored positions, M scored tokens, D hidden width, V vocabulary; C rows of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop.kernels import calls
from strop.policy import layers
from strop.policy.footprint import GPU_HEAD_BYTES, HEAD_CHUNK_ROWS
from strop.policy.packing import PackedBatch

_LOGIT_BYTES = 6
"""Bytes per logit: bf16, and fp32 where the passes over it are not fused."""
_MAX_GPU_ROWS = 8192
_MIN_LOGPROB = -1e4
"""Log-probability of tokens that cannot be sampled: 0 times minus infinity would be NaN."""
_RAMP = 60.0
"""Largest value on the ramp; caps are at 15 to 50."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative rounding error."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenGradient:
    """Loss and gradient of scored tokens. Shapes: both (m,)."""

    loss_M: torch.Tensor
    """Weighted loss of each token; their sum over the whole batch is the loss."""
    grad_M: torch.Tensor
    """Derivative of the whole loss with respect to each token's log-probability."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """How hidden states become logits: z = scale * (W h + b), and with a cap, cap * tanh(z / cap)."""

    weight: torch.Tensor
    """Shapes: (V, D)."""
    bias: torch.Tensor | None = None
    """Shapes: (V,)."""
    scale: float = 1.0
    cap: float | None = None

    def __len__(self) -> int:
        """Size of the vocabulary."""
        return len(self.weight)

    def logits(self, hidden_N_D: torch.Tensor) -> torch.Tensor:
        """Project hidden states on the vocabulary. Shapes: returns (N, V) in the compute type."""
        return self.finish(self.project(hidden_N_D))

    def project(self, hidden_N_D: torch.Tensor) -> torch.Tensor:
        """Return W h + b. Shapes: (N, V)."""
        return torch.nn.functional.linear(hidden_N_D, self.weight, self.bias)

    def finish(self, projected_N_V: torch.Tensor) -> torch.Tensor:
        """Return the logits of W h + b. Shapes: both (N, V)."""
        if self.cap is not None:
            return torch.tanh(projected_N_V * (self.scale / self.cap)) * self.cap
        return projected_N_V if self.scale == 1.0 else projected_N_V * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class HeadGradients:
    """Buffers in fp32 to which the head's gradients are added; None where a part is frozen or missing."""

    weight: torch.Tensor | None = None
    """Shapes: (V, D)."""
    bias: torch.Tensor | None = None
    """Shapes: (V,)."""

    def add(self, grad_C_V: torch.Tensor, hidden_C_D: torch.Tensor) -> None:
        """Add the gradients of W and b, from the gradient of W h + b."""
        if self.weight is not None:
            add_into(self.weight, grad_C_V.t() @ hidden_C_D)
        if self.bias is not None:
            self.bias.add_(grad_C_V.sum(dim=0, dtype=torch.float32))


TokenRule = Callable[[torch.Tensor, slice], TokenGradient]
"""Maps the log-probabilities of the tokens `slice` of a batch to their losses and gradients."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadResult:
    """Result of one pass over the head."""

    logprob_M: torch.Tensor
    loss: torch.Tensor
    """A scalar in fp64, on the device: reading it synchronises."""
    grad_hidden_U_D: torch.Tensor
    entropy_M: torch.Tensor | None = None
    """Entropy of the distribution at each scored token (nats); only with a bonus."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntropyBonus:
    """Subtracts from the loss `factor` times the entropy at every scored token, weighed like the token."""

    factor: float
    term_weight: float = 1.0
    """Weight of the term that the bonus is part of; it scales gradients, not the returned loss."""


def choose_chunk_rows(device: torch.device, dtype: torch.dtype, vocab_size: int) -> int:
    """Return how many rows of logits to hold at once."""
    if device.type == "cuda":
        rows = GPU_HEAD_BYTES // (_LOGIT_BYTES * vocab_size)
        return min(max(rows // 128 * 128, HEAD_CHUNK_ROWS), _MAX_GPU_ROWS)
    stays_bf16 = dtype is torch.bfloat16 and calls.can_run(device, dtype)
    return HEAD_CHUNK_ROWS * (2 if stays_bf16 else 1)


def head_chunks(
    batch: PackedBatch, hidden_U_D: torch.Tensor, vocab_size: int, chunk_rows: int | None
) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, tokens) slices that cover the batch; tokens are sorted by row."""
    num_rows = len(hidden_U_D)
    if chunk_rows is None:
        chunk_rows = choose_chunk_rows(hidden_U_D.device, hidden_U_D.dtype, vocab_size)
    starts = np.arange(0, num_rows + chunk_rows, chunk_rows).clip(max=num_rows)
    bounds, cuts = starts.tolist(), np.searchsorted(batch.host_row_M, starts).tolist()
    for index in range(len(bounds) - 1):
        if bounds[index] < bounds[index + 1]:
            yield slice(bounds[index], bounds[index + 1]), slice(cuts[index], cuts[index + 1])


class _PlainRows:
    """Log-probabilities, entropies and gradients of some rows of logits, in plain PyTorch."""

    def __init__(self, logits: torch.Tensor, temperature: float) -> None:
        self._dtype = logits.dtype
        self._temperature = temperature
        if temperature != 1.0:
            logits = logits.float() / temperature
        self._all_logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        self._entropy: tuple[torch.Tensor, torch.Tensor] | None = None

    def logprobs(self, row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of tokens. Shapes: both (m) to (m), fp32."""
        return self._all_logprobs[row, target]

    def entropies(self) -> torch.Tensor:
        """Return the entropy (nats) of every row. Shapes: (C), fp32."""
        return -torch.einsum("cv,cv->c", self._all_logprobs.exp(), self._all_logprobs.clamp(min=_MIN_LOGPROB))

    def take_entropy(self, entropy_C: torch.Tensor, weight_C: torch.Tensor) -> None:
        """Subtract `weight_C` times the entropies of the rows from the loss, in the next gradient."""
        self._entropy = (entropy_C, weight_C)

    def into_gradient(self, row: torch.Tensor, target: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits, from that of tokens' log-probabilities. Consumes this object.

        Shapes: row ascending, target, grad (m) to (C, V).
        """
        # d logprob / d logits = (onehot - p) / temperature, summed over the tokens of a row.
        grad = grad / self._temperature
        per_row = torch.zeros(len(self._all_logprobs), device=grad.device).index_add_(0, row, grad)
        if self._entropy is None:
            grad_logits = self._all_logprobs.exp_().mul_(-per_row[:, None])
        else:
            # d entropy / d logits = -p (log p + entropy) / temperature
            entropy_C, weight_C = self._entropy
            probs = self._all_logprobs.exp()
            grad_logits = self._all_logprobs.clamp_(min=_MIN_LOGPROB).add_(entropy_C[:, None])
            grad_logits.mul_((weight_C / self._temperature)[:, None]).sub_(per_row[:, None]).mul_(probs)
        return grad_logits.index_put_((row, target), grad, accumulate=True).to(self._dtype)


class _FusedRows:
    """The same in fused passes: logits keep their type and become their gradient in place."""

    def __init__(self, logits: torch.Tensor, temperature: float) -> None:
        self._logits = logits
        self._temperature = temperature
        self._passes: Any = calls if logits.device.type == "cpu" else layers
        self._log_sums = self._passes.log_sum_exp(self._logits, temperature)

    def logprobs(self, row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logprobs: torch.Tensor = self._logits[row, target].float() / self._temperature - self._log_sums[row]
        return logprobs

    def into_gradient(self, row: torch.Tensor, target: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        self._passes.token_gradient_(self._logits, self._log_sums, row, target, grad, self._temperature)
        return self._logits


class _CappedRows:
    """Rows of capped logits, with the derivative of the cap."""

    def __init__(self, logits: torch.Tensor, head: Head, temperature: float, *, may_fuse: bool) -> None:
        assert head.cap is not None
        # d cap * tanh(x) / dx, with tanh(x) = logits / cap.
        self._slopes = (logits / head.cap).square_().neg_().add_(1.0).mul_(head.scale)
        self._rows = _choose_rows(logits, may_fuse=may_fuse)(logits, temperature)

    def logprobs(self, row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._rows.logprobs(row, target)

    def into_gradient(self, row: torch.Tensor, target: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return self._rows.into_gradient(row, target, grad).mul_(self._slopes)

    def entropies(self) -> torch.Tensor:
        assert isinstance(self._rows, _PlainRows)
        return self._rows.entropies()

    def take_entropy(self, entropy_C: torch.Tensor, weight_C: torch.Tensor) -> None:
        assert isinstance(self._rows, _PlainRows)
        self._rows.take_entropy(entropy_C, weight_C)


def _choose_rows(logits: torch.Tensor, *, may_fuse: bool) -> type[_PlainRows | _FusedRows]:
    is_fused = may_fuse and (logits.device.type == "cuda" or calls.can_run(logits.device, logits.dtype))
    return _FusedRows if is_fused else _PlainRows


def _rows(
    hidden: torch.Tensor, head: Head, temperature: float, *, may_fuse: bool = True
) -> _PlainRows | _FusedRows | _CappedRows:
    """Return rows of logits. Only those that are not fused have entropies."""
    projected = head.project(hidden)
    if head.cap is not None:
        return _CappedRows(head.finish(projected), head, temperature, may_fuse=may_fuse)
    # A factor acts as a temperature: no further pass, and the gradient is that of W h + b.
    return _choose_rows(projected, may_fuse=may_fuse)(projected, temperature / head.scale)


@torch.no_grad()
def token_logprobs(
    hidden_U_D: torch.Tensor,
    head: Head,
    batch: PackedBatch,
    temperature: float,
    *,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Return the log-probability (nats) of every scored token. Shapes: (M,), fp32."""
    logprob_M = torch.empty(batch.target_M.numel(), dtype=torch.float32, device=hidden_U_D.device)
    for rows, tokens in head_chunks(batch, hidden_U_D, len(head), chunk_rows):
        logits = _rows(hidden_U_D[rows], head, temperature)
        logprob_M[tokens] = logits.logprobs(batch.row_M[tokens] - rows.start, batch.target_M[tokens])
        del logits
    return logprob_M


@torch.no_grad()
def loss_and_gradients(
    hidden_U_D: torch.Tensor,
    head: Head,
    batch: PackedBatch,
    *,
    temperature: float,
    rule: TokenRule,
    into: HeadGradients,
    bonus: EntropyBonus | None = None,
    chunk_rows: int | None = None,
) -> HeadResult:
    """Compute loss and gradients of the scored tokens; add the head's own to buffers.

    Shapes: hidden (U, D) without graph.
    """
    logprob_M = torch.empty(batch.target_M.numel(), dtype=torch.float32, device=hidden_U_D.device)
    grad_hidden = torch.empty_like(hidden_U_D)
    loss = torch.zeros((), dtype=torch.float64, device=hidden_U_D.device)
    entropy_M = None if bonus is None else torch.empty_like(logprob_M)
    if chunk_rows is None and bonus is not None:
        # A second fp32 tensor of a chunk's size: the probabilities beside their logarithms.
        chunk_rows = choose_chunk_rows(hidden_U_D.device, hidden_U_D.dtype, len(head)) // 2
    for rows, tokens in head_chunks(batch, hidden_U_D, len(head), chunk_rows):
        hidden = hidden_U_D[rows]
        logits = _rows(hidden, head, temperature, may_fuse=bonus is None)
        row, target = batch.row_M[tokens] - rows.start, batch.target_M[tokens]
        logprob_M[tokens] = logits.logprobs(row, target)
        token_gradient = rule(logprob_M[tokens], tokens)
        loss += token_gradient.loss_M.sum(dtype=torch.float64)
        if bonus is not None and entropy_M is not None:
            assert not isinstance(logits, _FusedRows)
            entropy_C = logits.entropies()
            entropy_M[tokens] = entropy_C[row]
            weight_C = torch.zeros_like(entropy_C).index_add_(0, row, bonus.factor * batch.weight_M[tokens])
            loss -= (weight_C * entropy_C).sum(dtype=torch.float64)
            logits.take_entropy(entropy_C, bonus.term_weight * weight_C)
        grad_logits = logits.into_gradient(row, target, token_gradient.grad_M)
        grad_hidden[rows] = grad_logits @ head.weight
        into.add(grad_logits, hidden)
        # Freed before the next chunk allocates its own.
        del logits, grad_logits
    return HeadResult(logprob_M=logprob_M, loss=loss, grad_hidden_U_D=grad_hidden, entropy_M=entropy_M)


def add_into(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient of the compute type to an fp32 sum of the same shape. It may be sparse in rows."""
    if gradient.is_sparse:
        total.index_add_(0, gradient._indices()[0], gradient._values().to(total.dtype))
        return
    is_bf16_to_fp32 = gradient.dtype is torch.bfloat16 and total.dtype is torch.float32
    is_dense = gradient.is_contiguous() and total.is_contiguous()
    if is_bf16_to_fp32 and is_dense and calls.can_run(gradient.device, gradient.dtype):
        calls.accumulate_(total, gradient)
    else:
        total.add_(gradient)


class UnknownHead(Exception):
    """The head is more than `Head` can express; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadForm:
    """The factor and the cap of a `Head`."""

    scale: float = 1.0
    cap: float | None = None


@torch.no_grad()
def find_head_form(module: Any, trunk: Any, token_ids_T: torch.Tensor) -> HeadForm:
    """Run a few tokens through a transformers causal LM and its trunk. Raises: UnknownHead."""
    seen: dict[str, torch.Tensor] = {}
    linear = module.get_output_embeddings()

    def keep_input(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        seen["input"] = inputs[0].detach()

    def ramp(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        values = torch.linspace(-_RAMP, _RAMP, output.shape[-1], dtype=output.dtype, device=output.device)
        seen["ramp"] = values.expand(output.shape)
        return seen["ramp"].clone()

    def keep_hidden(_: Any, __: Any, output: Any) -> None:
        seen["hidden"] = output[0].detach()

    hooks = [linear.register_forward_pre_hook(keep_input), linear.register_forward_hook(ramp)]
    hooks.append(trunk.register_forward_hook(keep_hidden))
    try:
        logits = module(input_ids=token_ids_T[None], use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if "ramp" not in seen:
        raise UnknownHead("its logits do not come from its output embeddings")
    # Some modules call the inside of the trunk.
    if "hidden" not in seen:
        seen["hidden"] = trunk(input_ids=token_ids_T[None], use_cache=False)[0]
    tolerance = _TOLERANCE.get(logits.dtype, 1e-2)
    before = _factor(seen["hidden"], seen["input"], tolerance)
    if before is None:
        raise UnknownHead("its head is more than a matrix")
    if before != 1.0 and getattr(linear, "bias", None) is not None:
        raise UnknownHead("its head scales before a bias")
    if logits.shape != seen["ramp"].shape:
        raise UnknownHead("its logits are fewer than its head's rows")
    ramp_V, logits_V = seen["ramp"][0, 0].double(), logits[0, 0].double()
    if before == _factor(ramp_V, logits_V, tolerance) == 1.0:
        return HeadForm()
    numbers = sorted(set(_positive(module.config.to_dict().values())))
    form = _fit(ramp_V, logits_V, numbers, tolerance)
    return HeadForm(scale=_snap(form.scale * before, numbers, tolerance), cap=form.cap)


def _factor(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> float | None:
    """Return c where y = c * x, None where there is none."""
    if x.shape != y.shape:
        return None
    x, y = x.double().flatten(), y.double().flatten()
    factor = float(x @ y / (x @ x))
    if not float((y - factor * x).norm()) <= tolerance * float(y.norm()):
        return None
    return 1.0 if abs(factor - 1.0) < tolerance else factor


def _fit(
    ramp_V: torch.Tensor, logits_V: torch.Tensor, numbers: Sequence[float], tolerance: float
) -> HeadForm:
    """Find the factor, and the cap if there is one, among the numbers of the config."""
    factor = _factor(ramp_V, logits_V, tolerance)
    if factor is not None:
        return HeadForm(scale=factor)
    top, place = float(logits_V.abs().max()), int((ramp_V - 1.0).abs().argmin())
    value, logit = float(ramp_V[place]), float(logits_V[place])
    for cap in numbers:
        if cap < top or abs(logit) >= cap:
            continue
        scale = _snap(cap * math.atanh(logit / cap) / value, numbers, tolerance)
        gap = float((cap * torch.tanh(ramp_V * scale / cap) - logits_V).abs().max())
        if gap <= tolerance * top:
            return HeadForm(scale=scale, cap=cap)
    raise UnknownHead("its head bends logits in a way of its own")


def _snap(factor: float, numbers: Sequence[float], tolerance: float) -> float:
    """Return the exact number near a measured one: 1, a number of the config, or its inverse."""
    exact = [1.0, *(form for number in numbers for form in (number, 1.0 / number))]
    near = (number for number in exact if abs(factor / number - 1.0) <= tolerance)
    return min(near, key=lambda number: abs(factor / number - 1.0), default=factor)


def _positive(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, dict):
            yield from _positive(value.values())
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            yield float(value)
