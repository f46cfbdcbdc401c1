"""The layers of Llama-like decoders, with everything beside the products fused.

The layers of transformers spend more than a third of a decode step in small operators and in the calls
between them. Here a layer is two norms that also add the residual, two joined products (query, key and
value; gate and up), rotary positions, the attention of the context, and two more products.

The parameters remain those of the module; the parameters of a joined product become neighbours in one
storage, so that both views share their bytes. Recognised by structure: Llama, Qwen2, Qwen3, Mistral, SmolLM
and similar families. `LanguageModel.load` proves the result against the module's forward, and does not use
fused layers where they differ.

Shapes: N positions of the flat row, D hidden width, H query and K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from strop.kernels.calls import LANES, can_run
from strop.policy.attention import PLAIN, AttentionContext, ScoreRule
from strop.policy.layers import add_rms_norm, gate, project, rotate
from strop.policy.lora import AdaptedLinear

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class JoinedLinear:
    """Linear layers that read the same input, multiplied at once."""

    parts: tuple[torch.nn.Linear, ...]
    weight: torch.Tensor
    """The parts' weights one after the other, in one storage with them. Shapes: (sum of outs, D)."""

    @classmethod
    def of(cls, parts: Sequence[torch.nn.Linear]) -> JoinedLinear:
        """Join layers, moving their weights next to each other."""
        if len(parts) == 1:
            return cls(tuple(parts), parts[0].weight.detach())
        joined = torch.cat([part.weight.detach() for part in parts])
        start = 0
        for part in parts:
            part.weight.data = joined[start : start + part.out_features]
            start += part.out_features
        return cls(tuple(parts), joined)

    def bias(self) -> torch.Tensor | None:
        """Return the parts' biases in a row, or None."""
        biases: list[torch.Tensor] = [part.bias for part in self.parts if part.bias is not None]
        return torch.cat(biases) if biases else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, and add the biases."""
        if len(self.parts) == 1:
            return torch.nn.functional.linear(x, self.parts[0].weight, self.parts[0].bias)
        product = project(x, self.weight, tuple(part.weight for part in self.parts))
        bias = self.bias()
        return product if bias is None else product + bias


class Products(Protocol):
    """Another way to multiply by the layers' weights, such as on packed copies."""

    def multiply(self, linear: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return what `linear(x)` returns, up to rounding."""
        ...


class _PlainProducts:
    def multiply(self, linear: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
        return linear(x)


class _AdaptedProducts:
    """Adds the outputs of the layers' adapters to other products."""

    def __init__(self, base: Products) -> None:
        self._base = base

    def multiply(self, linear: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
        output = self._base.multiply(linear, x)
        if not any(isinstance(part, AdaptedLinear) for part in linear.parts):
            return output
        changes = [
            part.adapt(x) if isinstance(part, AdaptedLinear) else x.new_zeros(len(x), part.out_features)
            for part in linear.parts
        ]
        return output + torch.cat(changes, dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One decoder layer, taken apart."""

    input_norm: Any
    query_key_value: JoinedLinear
    head_norms: tuple[Any, Any] | None
    """Norms of query and key heads, in families that have them."""
    output: JoinedLinear
    mlp_norm: Any
    gate_up: JoinedLinear
    down: JoinedLinear
    scaling: float
    num_heads: int
    num_kv_heads: int
    attention: Any
    """The attention module of the layer, which has its window."""

    def rule(self) -> ScoreRule:
        """Return the window of the layer; in some families it is in the config, for all layers."""
        config_window = getattr(self.attention.config, "sliding_window", None)
        window = getattr(self.attention, "sliding_window", config_window)
        return PLAIN if window is None else ScoreRule(window=window)


class FusedTrunk:
    """Embedding, layers and final norm of a decoder that `build_fused_trunk` has recognised."""

    def __init__(self, base: Any, layers: Sequence[_Layer], head: JoinedLinear) -> None:
        self._base = base
        self._layers = layers
        self.head = head
        """The LM head."""
        self.is_adapted = False
        """Whether layers have adapters."""
        self.recomputes = False
        """Whether a backward recomputes the inside of a layer."""

    def linears(self) -> list[JoinedLinear]:
        """Return all products of a forward, the head last."""
        parts = ("query_key_value", "output", "gate_up", "down")
        return [*(getattr(layer, part) for layer in self._layers for part in parts), self.head]

    def forward(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        attention: AttentionContext,
        products: Products | None = None,
    ) -> torch.Tensor:
        """Run all layers and the final norm. Shapes: returns (N, D)."""
        products = products or _PlainProducts()
        if self.is_adapted:
            products = _AdaptedProducts(products)
        # Sparse: a dense gradient would be written and added for the whole vocabulary.
        table = self._base.embed_tokens.weight
        hidden = torch.nn.functional.embedding(token_ids_N, table, sparse=torch.is_grad_enabled())
        cosine, sine = self._base.rotary_emb(hidden[None], position_ids_N[None])
        rotary = (cosine[0].contiguous(), sine[0].contiguous())
        change: torch.Tensor | None = None
        run = _run_layer
        if self.recomputes and torch.is_grad_enabled():
            run = partial(recompute, _run_layer)
        for index, layer in enumerate(self._layers):
            hidden, change = run(layer, index, hidden, change, rotary, attention, products)
        return _norm(self._base.norm, hidden, change)[1]


def recompute(run: Callable[..., T], *inputs: Any, **named: Any) -> T:
    """Call a deterministic function; a backward keeps only its inputs and calls it again.

    Tensors that need gradients must be separate inputs, not parts of others.
    """
    output: T = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **named)
    return output


def _run_layer(
    layer: _Layer,
    index: int,
    hidden: torch.Tensor,
    change: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    attention: AttentionContext,
    products: Products,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer. `hidden` is the residual stream, `change` the last output, not added to it yet."""
    hidden, normed = _norm(layer.input_norm, hidden, change)
    mixed = _attend(layer, products.multiply(layer.query_key_value, normed), rotary, attention, index)
    change = products.multiply(layer.output, mixed)
    hidden, normed = _norm(layer.mlp_norm, hidden, change)
    return hidden, products.multiply(layer.down, gate(products.multiply(layer.gate_up, normed)))


def _norm(norm: Any, x: torch.Tensor, added: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(x, added, norm.weight, norm.variance_epsilon)


def _attend(
    layer: _Layer,
    projected: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    attention: AttentionContext,
    index: int,
) -> torch.Tensor:
    """Rotate and attend. Shapes: projected (N, (H + 2 K) E); returns (N, H E)."""
    num_rotated = layer.num_heads + layer.num_kv_heads
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    heads = projected.view(len(projected), sum(sizes), -1)
    if layer.head_norms is not None:
        query, key, value = torch.split(heads, sizes, dim=1)
        normed = [
            _norm(norm, part.reshape(-1, part.shape[-1]), None)[1].view(part.shape)
            for norm, part in zip(layer.head_norms, (query, key), strict=True)
        ]
        heads = torch.cat([*normed, value], dim=1)
    query, key, value = (
        part.transpose(0, 1) for part in torch.split(rotate(heads, *rotary, num_rotated), sizes, dim=1)
    )
    return attention.attend(index, query, key, value, layer.scaling, layer.rule()).flatten(1)


def build_fused_trunk(module: Any, *, even_plain: bool = False) -> FusedTrunk | None:
    """Build the fused layers of a transformers causal LM; None if it is not built like Llama.

    None also on a CPU without the C kernels, where it would gain nothing, unless `even_plain`.
    """
    base, head = module.base_model, module.get_output_embeddings()
    device = head.weight.device
    if not (even_plain or device.type == "cuda" or can_run(device, head.weight.dtype)):
        return None
    if _children(base) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    if not (type(base.embed_tokens) is torch.nn.Embedding and type(head) is torch.nn.Linear):
        return None
    if not (_is_rms_norm(base.norm) and all(_is_llama_like(layer) for layer in base.layers)):
        return None
    return FusedTrunk(base, [_take_apart(layer) for layer in base.layers], JoinedLinear.of([head]))


def _children(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_rms_norm(norm: Any) -> bool:
    names = {name for name, _ in norm.named_parameters()}
    is_wide = names == {"weight"} and norm.weight.numel() % LANES == 0
    return is_wide and hasattr(norm, "variance_epsilon") and type(norm).__name__.endswith("RMSNorm")


def _is_llama_like(layer: Any) -> bool:
    """Whether a layer is: norm, attention, add, norm, gated SiLU MLP, add."""
    if _children(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    head_norms = _children(attention) - projections
    has_parts = _children(attention) >= projections and head_norms in (set(), {"q_norm", "k_norm"})
    if not (has_parts and _is_gated_mlp(mlp)):
        return False
    linears = [getattr(attention, name) for name in projections]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in head_norms]
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)
        and len({linear.bias is None for linear in (attention.q_proj, attention.k_proj, attention.v_proj)})
        == 1
        and all(_is_rms_norm(norm) for norm in norms)
        and attention.head_dim % LANES == 0
    )


def _is_gated_mlp(mlp: Any) -> bool:
    """Whether a module computes down(silu(gate(x)) * up(x))."""
    if _children(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    # By class name: transformers has another SiLU beside torch's.
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)
        and (mlp.gate_proj.bias is None) == (mlp.up_proj.bias is None)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and mlp.gate_proj.out_features % LANES == 0
    )


def _take_apart(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=layer.input_layernorm,
        query_key_value=JoinedLinear.of([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norms=(attention.q_norm, attention.k_norm) if has_norms else None,
        output=JoinedLinear.of([attention.o_proj]),
        mlp_norm=layer.post_attention_layernorm,
        gate_up=JoinedLinear.of([mlp.gate_proj, mlp.up_proj]),
        down=JoinedLinear.of([mlp.down_proj]),
        scaling=float(attention.scaling),
        num_heads=attention.q_proj.out_features // attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
        attention=attention,
    )
