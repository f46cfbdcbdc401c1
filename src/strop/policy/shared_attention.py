"""Which attention computes a packed row here: FlexAttention on GPUs, PyTorch's fused one elsewhere.

On a GPU the compiled kernel is first tried on a small row with the model's own heads, gradients
included. Where it cannot be compiled or gives other values, a warning says so once, and the path of
CPUs computes instead.

Shapes: H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

import functools
import subprocess
import warnings

import torch

from strop.policy.attention import PLAIN, AttentionContext, ScoreRule
from strop.policy.flex_attention import FlexKernel, FlexSharedAttention, run_flex
from strop.policy.packing import PackedLayout
from strop.policy.plain_layers import compile_for_any_length
from strop.policy.prefix_attention import PrefixSharedAttention

_PROBE = PackedLayout(prompt_lens_P=(70, 90), reply_lens_S=(130, 0, 75, 160), group_of_S=(0, 0, 1, 1))
_PROBE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
"""Of outputs and gradients, relative to their norm. fp32 products may run in TF32 inside the kernel."""


def build_shared_attention(layout: PackedLayout, device: torch.device) -> AttentionContext:
    """Return the attention of a forward over a packed row."""
    # Prompts alone are few and short, and compiling for them would take longer than all of them.
    if device.type == "cuda" and layout.reply_lens_S:
        return _ProvenAttention(layout, device)
    return PrefixSharedAttention(layout, device)


class _ProvenAttention:
    """FlexAttention for plain layers, if it is right for these heads; the path of CPUs for all others."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._flex: FlexSharedAttention | None = None
        self._padded: PrefixSharedAttention | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Compute one layer's attention. Shapes: see `AttentionContext.attend`."""
        attention: AttentionContext
        sizes = (query.shape[0], key.shape[0], query.shape[2])
        is_plain = rule.is_linear and rule.window is None and key.shape[2] == value.shape[2]
        if is_plain and _compiled_flaw(sizes, query.dtype, self._device) is None:
            self._flex = self._flex or FlexSharedAttention(self._layout, self._device, compiled_kernel())
            attention = self._flex
        else:
            self._padded = self._padded or PrefixSharedAttention(self._layout, self._device)
            attention = self._padded
        return attention.attend(layer, query, key, value, scaling, rule)


@functools.cache
def compiled_kernel() -> FlexKernel:
    """Return FlexAttention compiled for rows of any length."""
    return compile_for_any_length(run_flex)


@functools.cache
def _compiled_flaw(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why the compiled kernel cannot be used for heads of these sizes (H, K, E), and warn of it."""
    flaw = find_flex_flaw(compiled_kernel(), sizes, dtype, device)
    if flaw is not None:
        warnings.warn(
            f"FlexAttention is not used for {sizes[0]} query and {sizes[1]} key-value heads of {sizes[2]} in "
            f"{dtype} on {device} ({flaw}); padded attention is, which takes more memory and time",
            RuntimeWarning,
            stacklevel=2,
        )
    return flaw


def find_flex_flaw(
    kernel: FlexKernel, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare a kernel with padded attention on a small row; return what is wrong with it, or None."""
    # The caller may be scoring; what is proven here is that gradients are right too.
    with torch.inference_mode(mode=False), torch.enable_grad():
        inputs = _probe_inputs(sizes, dtype, device)
        try:
            actual = _run_probe(FlexSharedAttention(_PROBE, device, kernel), inputs)
        except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
            lines = str(error).strip().splitlines() or [""]
            return f"it does not run: {type(error).__name__}: {lines[0]}"
        expected = _run_probe(PrefixSharedAttention(_PROBE, device), inputs)
        gaps = [float((one - two).norm() / two.norm()) for one, two in zip(actual, expected, strict=True)]
    tolerance = _PROBE_TOLERANCE.get(dtype, 1e-6)
    if all(gap <= tolerance for gap in gaps):
        return None
    return f"its output and gradients differ by {', '.join(f'{gap:.2g}' for gap in gaps)}"


def _probe_inputs(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return query, key and value, and an upstream gradient."""
    num_heads, num_kv_heads, width = sizes
    generator = torch.Generator().manual_seed(0)
    query, key, value, upstream = (
        torch.randn(heads, _PROBE.num_positions, width, generator=generator).to(device, dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    return [part.requires_grad_() for part in (query, key, value)], upstream.transpose(0, 1)


def _run_probe(
    attention: AttentionContext, inputs: tuple[list[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return output and gradients of query, key and value, in fp32."""
    parts, upstream = inputs
    output = attention.attend(0, parts[0], parts[1], parts[2], parts[0].shape[-1] ** -0.5)
    gradients = torch.autograd.grad(output, parts, upstream)
    return [part.detach().float() for part in (output, *gradients)]
