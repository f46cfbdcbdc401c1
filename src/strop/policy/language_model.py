"""Loading a causal language model, and running its trunk over a flat row of tokens.

Shapes: N tokens of the flat row, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from strop.errors import ConfigError, explain_refusal
from strop.policy.attention import ATTENTION_NAME, AttentionContext
from strop.policy.fused_trunk import FusedTrunk, Products, build_fused_trunk, recompute
from strop.policy.lora import adapt_linears
from strop.policy.packing import PackedLayout
from strop.policy.prefix_attention import PrefixSharedAttention
from strop.spec.lora import LoraSpec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_PROBE_TOKENS = 12
# Eager and strop attention round differently; a missing feature moves logits by far more.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that memory and caches are computed from."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    hidden_width: int
    vocab_size: int
    max_positions: int


class LanguageModel:
    """A transformers causal LM whose attention is strop's.

    The parameters held here are the compute copies: what generation and training read.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.module.eval()
        self.shape = _read_shape(module.config)
        self.dtype: torch.dtype = module.get_output_embeddings().weight.dtype
        """Type that is computed with."""
        self.module.set_attn_implementation(ATTENTION_NAME)
        self.fused: FusedTrunk | None = None
        """The layers for this processor, if the family is known and the kernels run here."""
        self.adapters: LoraSpec | None = None
        """What is trained beside frozen weights, None where the weights are trained."""
        self.recomputes = False
        """Whether only the inputs of layers are kept for a backward."""
        self._trunk: Callable[..., Any] = module.base_model

    @classmethod
    def load(
        cls, path: Path, *, dtype: torch.dtype, device: str = "cpu", may_fuse: bool = True
    ) -> LanguageModel:
        """Load a Hugging Face model directory and prove strop's forward on it.

        Without `may_fuse`, or where the fused layers do not fit, the layers are transformers' own.

        Raises: ConfigError if files are missing or weights do not match the architecture, or if the
        architecture needs something that strop's attention does not compute.
        """
        module = _load_module(path, dtype).to(device)
        probe = _eager_probe(module)
        model = cls(module)
        model.fused = build_fused_trunk(module) if may_fuse else None
        if model.fused is not None and model._gap_to(probe) > _PROBE_TOLERANCE[dtype]:
            model.fused = None
        model._require_same(path, probe)
        return model

    @property
    def device(self) -> torch.device:
        """Where the compute copies live."""
        return self.head_weight.device

    @property
    def head_weight(self) -> torch.nn.Parameter:
        """The LM head's matrix. Shapes: (V, D); the input embedding itself where it is tied."""
        weight = self.module.get_output_embeddings().weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield every weight once, tied ones under their first name."""
        yield from self.module.named_parameters()

    def trained_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the weights that are not frozen."""
        yield from (pair for pair in self.named_parameters() if pair[1].requires_grad)

    def adapt(self, spec: LoraSpec, *, seed: int) -> None:
        """Freeze all weights and train adapters instead. `seed` decides how they start.

        Raises: ConfigError if the model has no layer of a target's name.
        """
        adapt_linears(self.module, spec, seed=seed)
        self.adapters = spec
        if self.fused is not None:
            self.fused.is_adapted = True

    def recompute_activations(self) -> None:
        """Keep only the inputs of layers from now on: a backward computes the rest again."""
        self.recomputes = True
        if self.fused is not None:
            self.fused.recomputes = True
            return
        for layer in self.module.base_model.layers:
            # The function and not the call: what FSDP does around a call is done once.
            layer.forward = partial(_forward_again, layer.forward)

    def route(self, trunk: Callable[..., Any]) -> None:
        """Run all layers through `trunk`, which calls the module's own after what it has to do."""
        self._trunk = trunk

    def trunk(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        attention: AttentionContext,
        products: Products | None = None,
    ) -> torch.Tensor:
        """Run all layers and the final norm. Shapes: returns (N, D).

        `products` replaces the multiplications of fused layers; transformers' own ignore it.
        """
        if self.fused is not None:
            return self.fused.forward(token_ids_N, position_ids_N, attention, products)
        output = self._trunk(
            input_ids=token_ids_N.unsqueeze(0),
            position_ids=position_ids_N.unsqueeze(0),
            use_cache=False,
            attention_context=attention,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]

    def logits(self, hidden_N_D: torch.Tensor, products: Products | None = None) -> torch.Tensor:
        """Project hidden states on the vocabulary. Shapes: returns (N, V) in the compute type."""
        if self.fused is not None and products is not None:
            return products.multiply(self.fused.head, hidden_N_D)
        logits: torch.Tensor = self.module.get_output_embeddings()(hidden_N_D)
        return logits

    @torch.no_grad()
    def _gap_to(self, expected_N_V: torch.Tensor) -> float:
        """Return how far the logits of a few tokens are from the expected, relative to the largest."""
        token_ids = _probe_token_ids(self.module.config.vocab_size, self.device)
        layout = PackedLayout.of_prompts([token_ids.numel()])
        positions = torch.arange(token_ids.numel(), device=self.device)
        hidden = self.trunk(token_ids, positions, PrefixSharedAttention(layout, self.device))
        gap = (self.logits(hidden).float() - expected_N_V).abs().max() / expected_N_V.abs().max()
        return float(gap.nan_to_num(nan=float("inf")))

    def _require_same(self, path: Path, expected_N_V: torch.Tensor) -> None:
        """Compare strop's path with the model's own eager forward on a few tokens."""
        gap = self._gap_to(expected_N_V)
        if gap > _PROBE_TOLERANCE[self.dtype]:
            raise ConfigError(
                explain_refusal(
                    f"the logits of {path} computed by strop differ from the model's own by {gap:.3g}",
                    allowed="decoders with full causal attention, rotary positions, a plain linear head",
                    next_step="choose another model family, or report this architecture",
                )
            )


def _forward_again(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return recompute(forward, *inputs, **named) if torch.is_grad_enabled() else forward(*inputs, **named)


def _load_module(path: Path, dtype: torch.dtype) -> Any:
    """Load with transformers, and refuse a directory whose tensors do not fill the model exactly."""
    previous = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            attn_implementation="eager",
            output_loading_info=True,
            # Listed instead of raised, so that the refusal below can name the tensors.
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            explain_refusal(
                f"{path} cannot be loaded as a causal language model ({error})",
                allowed="a Hugging Face model directory with config.json and *.safetensors",
                next_step="fetch it anew with `strop model get URI`",
            )
        ) from error
    finally:
        transformers_logging.set_verbosity(previous)
    module, info = loaded
    # Tensors without a place count too: a bias that the config forgot would be left out silently.
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    flaws = {kind: sorted(info[kind]) for kind in kinds if info.get(kind)}
    if flaws:
        raise ConfigError(
            explain_refusal(
                f"the weights in {path} do not fill the model: {flaws}",
                allowed="one stored tensor of the right shape for every parameter",
                next_step="fetch the model anew with `strop model get URI`; nothing was trained",
            )
        )
    # transformers would keep the pad id's embedding from learning; it is often the terminator's id too,
    # which stands in every chat, and nothing is ever padded here.
    module.get_input_embeddings().padding_idx = None
    return module


def _read_shape(config: Any) -> ModelShape:
    """Read the sizes out of a transformers config, text part first where it has several."""
    text = config.get_text_config()
    num_heads = int(text.num_attention_heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return ModelShape(
        num_layers=int(text.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
        head_width=int(width),
        hidden_width=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        max_positions=int(text.max_position_embeddings),
    )


def _probe_token_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return a few fixed, spread token ids."""
    return (torch.arange(_PROBE_TOKENS, device=device) * 7919 + 17) % vocab_size


def _eager_probe(module: Any) -> torch.Tensor:
    """Return the model's own logits for the probe tokens. Shapes: (N, V), fp32."""
    module.eval()
    token_ids = _probe_token_ids(module.config.vocab_size, module.device)
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=token_ids.unsqueeze(0), use_cache=False).logits
    return logits[0].float()
