"""Algorithms of the user's own: an advantage function, or an `Algorithm` with a loss of its own.

    # mine.py, named as algorithm.name = "mine.py:rank"
    def rank(rewards_G):
        return rewards_G.argsort().argsort() - (len(rewards_G) - 1) / 2

Its code runs in the training process. A loss that says its gradient itself is held against autograd first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.algorithm.advantages import AdvantageFn
from strop.algorithm.losses import TokenFn, TokenLoss
from strop.errors import ConfigError, explain_refusal
from strop.user_code import CodeRef, blaming, inspect_import, load_code

if TYPE_CHECKING:
    from torch import Tensor

    from strop.algorithm.catalog import Algorithm

_REWARDS = np.array([0.0, 0.5, 1.0, 1.0])
_NUM_TOKENS = 64
_TOLERANCE = 1e-4


def differentiate(value: TokenFn) -> TokenFn:
    """Return the gradient of a loss by autograd, for losses without a closed form."""

    def grad(
        logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
    ) -> Tensor:
        import torch

        with torch.enable_grad():
            current_N = logp_N.detach().requires_grad_()
            loss_N = value(current_N, old_logp_N.detach(), advantage_N, clip_low, clip_high)
            (found_N,) = torch.autograd.grad(loss_N.sum(), current_N)
        return found_N.detach()

    return grad


def load_algorithm(ref: CodeRef, base: Algorithm) -> Algorithm:
    """Return the algorithm that the user's code names; an advantage function takes the place of `base`'s.

    Raises: ConfigError if it cannot be imported, is neither, or gives wrong numbers.
    """
    inspect_import(ref)
    found = load_code(ref)
    if isinstance(found, type(base)):
        own = replace(found, name=ref.name)
    elif callable(found) and not isinstance(found, type):
        own = replace(base, name=ref.name, advantage=found)
    else:
        raise _refuse(ref, f"is a {type(found).__name__}", "an Algorithm, or a function of rewards")
    _check_advantage(ref, own.advantage)
    _check_loss(ref, own.loss, own.clip_low, own.clip_high)
    return own


def _check_advantage(ref: CodeRef, advantage: AdvantageFn) -> None:
    """Refuse what is no number for each member of a group. Raises: ConfigError."""
    with blaming(ref, f"compare rewards {_REWARDS.tolist()}"):
        found: Any = np.asarray(advantage(_REWARDS.copy()), dtype=float)
    if found.shape != _REWARDS.shape or not np.isfinite(found).all():
        raise _refuse(
            ref, f"makes {found.tolist()} of {_REWARDS.tolist()}", "one finite number for each reward"
        )


def _check_loss(ref: CodeRef, loss: TokenLoss, clip_low: float, clip_high: float) -> None:
    """Refuse a gradient that is not that of the value. Raises: ConfigError naming both."""
    import torch

    generator = torch.Generator().manual_seed(0)
    logp_N, old_N, advantage_N = torch.randn(3, _NUM_TOKENS, generator=generator, dtype=torch.float64)
    given = (logp_N - 2.0, old_N - 2.0, advantage_N, clip_low, clip_high)
    with blaming(ref, "compute its loss"):
        said_N, true_N = loss.grad(*given), differentiate(loss.value)(*given)
    gap = float((said_N - true_N).abs().max()) if said_N.shape == true_N.shape else float("inf")
    if not gap <= _TOLERANCE:
        raise _refuse(
            ref,
            f"has a loss whose gradient is not that of its value: they differ by up to {gap:.2g}",
            "TokenLoss(value=f, grad=differentiate(f)), or the derivative in closed form",
        )


def _refuse(ref: CodeRef, what: str, allowed: str) -> ConfigError:
    return ConfigError(explain_refusal(f"{ref} {what}", allowed=allowed, next_step=f"correct {ref.place}"))
