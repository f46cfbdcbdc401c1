"""What a model does between its last hidden states and its logits, found by asking it.

Families divide logits, cap them, or scale hidden states before the matrix, each under names of its own.
Here the module's own forward is run with a ramp in place of the matrix's output: what comes out of it is
the function itself, at small values and at large ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_RAMP = 60.0
"""Largest value on the ramp; caps are at 15 to 50."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative, by rounding."""


class UnknownHead(Exception):
    """The head is more than `Head` can express; says what."""


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
    # Some call the trunk's inside.
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


def _factor(given: torch.Tensor, found: torch.Tensor, tolerance: float) -> float | None:
    """Return c where found = c * given, None where there is none."""
    if given.shape != found.shape:
        return None
    given, found = given.double().flatten(), found.double().flatten()
    factor = float(given @ found / (given @ given))
    is_same = float((found - factor * given).norm()) <= tolerance * float(found.norm())
    if not is_same:
        return None
    return 1.0 if abs(factor - 1.0) < tolerance else factor


def _fit(
    ramp_V: torch.Tensor, logits_V: torch.Tensor, numbers: Sequence[float], tolerance: float
) -> HeadForm:
    """Find the factor, and the cap where there is one: a number of the config."""
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
    """Return the exact number that a measured one is: 1, one of the config's, or its inverse."""
    exact = [1.0, *(form for number in numbers for form in (number, 1.0 / number))]
    near = (number for number in exact if abs(factor / number - 1.0) <= tolerance)
    return min(near, key=lambda number: abs(factor / number - 1.0), default=factor)


def _positive(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, dict):
            yield from _positive(value.values())
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            yield float(value)
