"""Drawing tokens with exact log-probabilities of the distribution drawn from.

One uniform number per row and position decides the token by inverse CDF, so a reply depends on its
seed alone and not on the batch around it. The CDF has two levels (block sums, then one block), so
the vocabulary is read once.

Shapes: n rows, V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from strop.errors import EngineError
from strop.kernels import calls
from strop.rollout import Sampling

_BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """Tokens drawn for n rows."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


def uniform_stream(seed: int, length: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that decide a reply's tokens, one per position."""
    return np.random.Generator(np.random.Philox(key=seed)).random(length)


def draw(logits_n_V: torch.Tensor, samplings: Sequence[Sampling], uniforms_n: NDArray[np.float64]) -> Draw:
    """Draw one token per row. Greedy rows ignore their uniform and report log-probability at 1.

    Raises: EngineError if a drawn token's log-probability is not finite, as with weights that are not.
    """
    is_truncated = any(sampling.is_truncated and sampling.temperature != 0.0 for sampling in samplings)
    if calls.can_run(logits_n_V.device, logits_n_V.dtype) and not is_truncated:
        temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float32)
        token_ids, logprobs = calls.draw_tokens(
            logits_n_V.contiguous(), torch.from_numpy(uniforms_n), temperatures
        )
        drawn = Draw(token_ids=token_ids.numpy(), logprobs=logprobs.numpy())
    else:
        drawn = draw_plain(logits_n_V, samplings, uniforms_n)
    require_finite(drawn)
    return drawn


def require_finite(drawn: Draw) -> None:
    """Refuse what was drawn from logits that are not finite. Raises: EngineError."""
    if not np.isfinite(drawn.logprobs).all():
        raise EngineError(
            "the logits of a next token are not finite",
            allowed="finite logits, or -inf for tokens that must not be drawn",
            next_step="check the weights; the run resumes from its last checkpoint",
        )


def draw_plain(
    logits_n_V: torch.Tensor, samplings: Sequence[Sampling], uniforms_n: NDArray[np.float64]
) -> Draw:
    """Do what `draw` does, with PyTorch alone: on any device, and for truncated distributions."""
    device = logits_n_V.device
    temperatures = torch.tensor([one.temperature for one in samplings], dtype=torch.float32, device=device)
    is_scaled, has_greedy = temperature_kinds([sampling.temperature for sampling in samplings])
    probs = _probabilities(logits_n_V, temperatures if is_scaled else None)
    for row, sampling in enumerate(samplings):
        if sampling.is_truncated and sampling.temperature != 0.0:
            probs[row] = truncate(probs[row], sampling)
    uniforms = torch.from_numpy(uniforms_n).to(device)
    chosen, logprobs = _choose(probs, uniforms, logits_n_V, temperatures if has_greedy else None)
    return Draw(token_ids=chosen.cpu().numpy(), logprobs=logprobs.cpu().numpy())


def temperature_kinds(temperatures: Sequence[float]) -> tuple[bool, bool]:
    """Return whether logits must be divided at all, and whether a row is greedy."""
    is_scaled = any(temperature not in (0.0, 1.0) for temperature in temperatures)
    return is_scaled, any(temperature == 0.0 for temperature in temperatures)


def draw_on_device(
    logits_n_V: torch.Tensor,
    uniforms_n: torch.Tensor,
    temperatures_n: torch.Tensor,
    kinds: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `draw_plain` does for whole distributions, waiting for nothing. Returns ids and logprobs.

    Shapes: uniforms (n,) fp64, temperatures (n,) fp32; `kinds` are their `temperature_kinds`.
    """
    is_scaled, has_greedy = kinds
    probs = _probabilities(logits_n_V, temperatures_n if is_scaled else None)
    return _choose(probs, uniforms_n, logits_n_V, temperatures_n if has_greedy else None)


def _choose(
    probs_n_V: torch.Tensor,
    uniforms_n: torch.Tensor,
    logits_n_V: torch.Tensor,
    temperatures_n: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drawn ids and their log-probabilities; the likeliest id where a temperature is 0."""
    chosen = inverse_cdf(probs_n_V, uniforms_n)
    if temperatures_n is not None:
        chosen = torch.where(temperatures_n == 0.0, logits_n_V.argmax(dim=-1), chosen)
    return chosen, probs_n_V.gather(1, chosen[:, None]).squeeze(1).log()


def _probabilities(logits_n_V: torch.Tensor, temperatures_n: torch.Tensor | None) -> torch.Tensor:
    """Return the distribution of each row, at 1 for temperatures of 0. Shapes: (n, V), fp32."""
    if temperatures_n is not None:
        scale = torch.where(temperatures_n == 0.0, 1.0, temperatures_n)
        # In fp32, as the divisors are: one pass from bf16.
        logits_n_V = logits_n_V / scale[:, None]
    return torch.softmax(logits_n_V, dim=-1, dtype=torch.float32)


def truncate(probs_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep the top-k, then the top-p tokens, and renormalise. Shapes: (V,) to (V,).

    Ties are broken by token id, so that the support is reproducible. The most probable token always
    stays. Top-p keeps the smallest set whose mass, after top-k renormalisation, reaches `top_p`.
    """
    order = torch.argsort(probs_V, descending=True, stable=True)
    kept = order[: sampling.top_k] if sampling.top_k is not None else order
    mass = probs_V[kept].double()
    mass = mass / mass.sum()
    # A token stays if the mass before it has not yet reached top_p.
    stays = (mass.cumsum(0) - mass) < sampling.top_p
    stays[0] = True
    truncated = torch.zeros_like(probs_V)
    truncated[kept[stays]] = (mass[stays] / mass[stays].sum()).to(probs_V.dtype)
    return truncated


def inverse_cdf(probs_n_V: torch.Tensor, uniforms_n: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulated probability exceeds u times the total.

    Strictly exceeds, so that u = 0 cannot pick a token of probability 0; at the top end rounding is
    caught by the last token with positive probability.
    """
    num_rows, vocab = probs_n_V.shape
    missing = -vocab % _BLOCK
    # Not padded by nothing: that would copy the whole vocabulary for every row.
    padded = torch.nn.functional.pad(probs_n_V, (0, missing)) if missing else probs_n_V
    blocks = padded.view(num_rows, -1, _BLOCK)
    block_mass = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target = uniforms_n[:, None] * block_mass[:, -1:]
    block = _first_above(block_mass, target).clamp(max=block_mass.shape[1] - 1)
    before = torch.where(block > 0, block_mass.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = blocks[torch.arange(num_rows, device=block.device), block].double().cumsum(dim=-1)
    chosen = block * _BLOCK + _first_above(inside, target - before[:, None])
    # Rows of NaN compare with nothing and run over the end; `draw` refuses their log-probabilities.
    return chosen.clamp(max=vocab - 1)


def _first_above(cumulated: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index above target, or the last that still added mass. Shapes: (n, m) to (n,)."""
    above = torch.searchsorted(cumulated, target.clamp(min=0.0).contiguous(), right=True)[:, 0]
    last_with_mass = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())[:, 0]
    return torch.minimum(above, last_with_mass)
