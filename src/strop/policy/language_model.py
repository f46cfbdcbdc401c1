"""Loads a causal language model, and runs its trunk over rollouts.

Layers that carry a state from token to token, or implement attention themselves, do not support rows that
hold several sequences. They get a batch with one row per prompt and reply, padded at the end (`read_alone`).
Padding changes no earlier token, as the proof at loading tests. In training a prompt is then computed once
per reply.

Shapes: N positions of the flat row, U scored positions, D hidden width, V vocabulary; R padded rows of T
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from strop.errors import ConfigError
from strop.policy.attention import ATTENTION_NAME, AttentionContext
from strop.policy.families import Layout, read_max_positions
from strop.policy.fused_trunk import FusedTrunk, Products, recompute
from strop.policy.head import Head, HeadForm
from strop.policy.lora import adapt_linears
from strop.policy.packing import PackedBatch, PackedLayout, to_device
from strop.policy.shared_attention import build_shared_attention
from strop.spec.model import LoraSpec

# The code of an architecture may raise anything for a config that it does not expect.
_LOADING_ERRORS = (
    *(OSError, ValueError, RuntimeError, ImportError),
    *(TypeError, LookupError, AttributeError, AssertionError),
)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that determine memory and caches, and how sequences are laid out."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    """Of queries and keys."""
    value_width: int
    hidden_width: int
    vocab_size: int
    max_positions: int
    has_plain_scores: bool = True
    """Whether values are as wide as keys, and scores are neither capped nor joined by sinks."""
    alone_because: str | None = None
    """Why each sequence is computed by itself; None where rows are packed."""

    @property
    def layout(self) -> Layout:
        """How sequences are laid out for a forward."""
        return Layout.PACKED if self.alone_because is None else Layout.ALONE


class LanguageModel:
    """A transformers causal LM, run over packed rows with strop's attention, or sequence by sequence.

    The parameters held here are the compute copies: what generation and training read.
    """

    def __init__(self, module: Any, *, shape: ModelShape | None = None, form: HeadForm | None = None) -> None:
        """Wrap a module without proof (see `load`). `form` is that of its head."""
        self.module = module
        self.module.eval()
        self.shape = shape or read_shape(module)
        self.dtype: torch.dtype = module.get_output_embeddings().weight.dtype
        """The compute type."""
        if not self.is_alone:
            self.module.set_attn_implementation(ATTENTION_NAME)
        self.fused: FusedTrunk | None = None
        """The layers for this processor, if the family is known and the kernels run here."""
        self.keeps_states = True
        """Whether generation continues from states, or recomputes every sequence at each token."""
        self.adapters: LoraSpec | None = None
        """The adapters that are trained beside frozen weights; None where the weights are trained."""
        self.recomputes = False
        """Whether only the inputs of layers are kept for a backward."""
        self.form = form or HeadForm()
        """Of the head."""
        self._trunk: Callable[..., Any] = find_trunk(module)

    @classmethod
    def load(
        cls, path: Path, *, dtype: torch.dtype, device: str = "cpu", may_fuse: bool = True
    ) -> LanguageModel:
        """Load a Hugging Face model directory and prove strop's forwards on it.

        Without `may_fuse`, or where the fused layers do not fit, the layers are those of transformers.

        Raises: ConfigError if files are missing or weights do not match the architecture, or if the
        architecture needs something that strop does not support.
        """
        # Here, because `proof` imports this module.
        from strop.policy.proof import prove

        return prove(cls, load_module(path, dtype).to(device), str(path), may_fuse=may_fuse)

    @property
    def is_alone(self) -> bool:
        """Whether each sequence is computed by itself, instead of in packed rows that share prompts."""
        return self.shape.layout is Layout.ALONE

    @property
    def device(self) -> torch.device:
        """The device of the compute copies."""
        return self.head_weight.device

    @property
    def head_weight(self) -> torch.nn.Parameter:
        """The LM head's matrix. Shapes: (V, D); the input embedding itself where it is tied."""
        weight = self.module.get_output_embeddings().weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight

    @property
    def head(self) -> Head:
        """The LM head, over the current parameters: sharding replaces them."""
        linear = self.module.get_output_embeddings()
        return Head(linear.weight, getattr(linear, "bias", None), self.form.scale, self.form.cap)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield every weight once, tied ones under their first name."""
        yield from self.module.named_parameters()

    def trained_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the weights that are not frozen."""
        yield from (pair for pair in self.named_parameters() if pair[1].requires_grad)

    def adapt(self, spec: LoraSpec, *, seed: int) -> None:
        """Freeze all weights and train adapters instead. `seed` determines their initial values.

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
        for layer in decoder_layers(self.module):
            # `forward` and not `__call__`: FSDP's hooks around a call run once.
            layer.forward = partial(_forward_recomputed, layer.forward)

    def route(self, trunk: Callable[..., Any]) -> None:
        """Run all layers through `trunk`, a wrapper of the module's trunk."""
        self._trunk = trunk

    def read(self, batch: PackedBatch) -> torch.Tensor:
        """Run all layers and the final norm over a batch. Shapes: returns (U, D), scored positions alone."""
        if self.is_alone:
            # Some modules keep the residual stream in float32.
            return read_alone(self.run, batch).to(self.dtype)
        attention = build_shared_attention(batch.layout, self.device)
        hidden = self.trunk(batch.token_ids_N, batch.position_ids_N, attention)
        return hidden.index_select(0, batch.scored_positions_U).to(self.dtype)

    def trunk(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        attention: AttentionContext,
        products: Products | None = None,
    ) -> torch.Tensor:
        """Run all layers and the final norm over a packed row. Shapes: returns (N, D).

        `products` replaces the multiplications of fused layers; transformers' layers ignore it.
        """
        if self.fused is not None:
            return self.fused.forward(token_ids_N, position_ids_N, attention, products)
        output = self.run(
            input_ids=token_ids_N.unsqueeze(0),
            position_ids=position_ids_N.unsqueeze(0),
            use_cache=False,
            attention_context=attention,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]

    def run(self, **inputs: Any) -> Any:
        """Call the module's trunk; returns the output of transformers."""
        return self._trunk(**inputs)

    def logits(self, hidden_N_D: torch.Tensor, products: Products | None = None) -> torch.Tensor:
        """Project hidden states on the vocabulary. Shapes: returns (N, V) in the compute type."""
        if self.fused is not None and products is not None:
            return self.head.finish(products.multiply(self.fused.head, hidden_N_D))
        return self.head.logits(hidden_N_D.to(self.dtype))


def _forward_recomputed(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return recompute(forward, *inputs, **named) if torch.is_grad_enabled() else forward(*inputs, **named)


def load_module(path: Path, dtype: torch.dtype | Literal["auto"], *, is_empty: bool = False) -> Any:
    """Load with transformers, and refuse a directory whose tensors do not fill the model exactly.

    "auto" keeps the types that are stored. `is_empty`: parameters on the meta device, which has no memory.
    """
    previous = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            attn_implementation="eager",
            device_map="meta" if is_empty else None,
            output_loading_info=True,
            # Listed instead of raised, so that the refusal below can name the tensors.
            ignore_mismatched_sizes=True,
        )
    except _LOADING_ERRORS as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"{path} cannot be loaded as a causal language model ({line})",
            allowed="a Hugging Face model directory with config.json and *.safetensors",
            next_step="fetch it anew with `strop model get URI`",
        ) from error
    finally:
        transformers_logging.set_verbosity(previous)
    module, info = loaded
    # Unexpected tensors count too: a bias that the config forgot would be left out silently.
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    flaws = {kind: sorted(info[kind]) for kind in kinds if info.get(kind)}
    if flaws:
        raise ConfigError(
            f"the weights in {path} do not fill the model: {flaws}",
            allowed="one stored tensor of the right shape for every parameter",
            next_step="fetch the model anew with `strop model get URI`; nothing was trained",
        )
    # transformers would keep the pad id's embedding from learning; it is often the terminator's id too, which
    # is in every chat. Padding here is never attended to.
    embeddings = module.get_input_embeddings()
    if embeddings is not None:
        embeddings.padding_idx = None
    for part in module.modules() if is_empty else ():
        if part._buffers:
            # As transformers computes what no file holds, such as the frequencies of rotary embeddings.
            part._buffers |= {name: torch.empty_like(b, device="cpu") for name, b in part._buffers.items()}
            module._init_weights(part)
    return module


def read_alone(run: Callable[..., Any], batch: PackedBatch) -> torch.Tensor:
    """Run a trunk over a batch, a row per sequence. Shapes: returns (U, D), scored positions alone."""
    source_R_T, place_N = spread_rows(batch.layout)
    device = batch.token_ids_N.device
    token_ids = batch.token_ids_N[to_device(source_R_T, device)]
    hidden = run(input_ids=token_ids, use_cache=False).last_hidden_state
    places = to_device(place_N, device)[batch.scored_positions_U]
    scored: torch.Tensor = hidden.flatten(0, 1).index_select(0, places)
    return scored


def spread_rows(layout: PackedLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the packed position at each place of padded rows, and the place of each packed position.

    A prompt's place is in the first row of its group. Shapes: (R, T) and (N,).
    """
    prompt_starts, reply_starts = layout.prompt_starts_P.tolist(), layout.reply_starts_S.tolist()
    fed = [reply for reply, length in enumerate(layout.reply_lens_S) if length > 0]
    groups = [layout.group_of_S[reply] for reply in fed]
    # The prompt alone for a group whose replies feed nothing.
    rows: list[tuple[int, int | None]] = list(zip(groups, fed, strict=True))
    rows += [(group, None) for group in sorted(set(range(len(layout.prompt_lens_P))) - set(groups))]
    lens = [layout.prompt_lens_P[g] + (0 if r is None else layout.reply_lens_S[r]) for g, r in rows]
    width = max(lens)
    source_R_T = np.zeros((len(rows), width), dtype=np.int64)
    place_N = np.zeros(layout.num_positions, dtype=np.int64)
    for row, (group, reply) in reversed(list(enumerate(rows))):
        length, start = layout.prompt_lens_P[group], prompt_starts[group]
        source_R_T[row, :length] = np.arange(start, start + length)
        place_N[start : start + length] = row * width + np.arange(length)
        if reply is not None:
            own = slice(reply_starts[reply], reply_starts[reply] + layout.reply_lens_S[reply])
            source_R_T[row, length : lens[row]] = np.arange(own.start, own.stop)
            place_N[own] = row * width + np.arange(length, lens[row])
    return source_R_T, place_N


def read_shape(module: Any) -> ModelShape:
    """Read the sizes of a model from its head and the text part of its config."""
    text = module.config.get_text_config()
    vocab_size, hidden_width = module.get_output_embeddings().weight.shape
    num_heads = _read_size(text, "num_attention_heads") or 1
    width = _read_size(text, "head_dim") or hidden_width // num_heads
    return ModelShape(
        num_layers=_read_size(text, "num_hidden_layers") or len(decoder_layers(module)),
        num_heads=num_heads,
        num_kv_heads=_read_size(text, "num_key_value_heads") or num_heads,
        head_width=width,
        value_width=width,
        hidden_width=int(hidden_width),
        vocab_size=int(vocab_size),
        max_positions=read_max_positions(text.to_dict()),
    )


def _read_size(config: Any, name: str) -> int | None:
    """Return a size of a config; None if it has none, or different ones by layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        return None
    return int(value) if isinstance(value, int) else None


def find_trunk(module: Any) -> Any:
    """Return the part of a causal LM without its head, None where there is none."""
    trunk = module.base_model
    return trunk if trunk is not module else getattr(module, "model", None)


def decoder_layers(module: Any) -> list[torch.nn.Module]:
    """Return the layers of a decoder: the list of modules that holds most of its weights."""
    parts: list[torch.nn.Module] = list(find_trunk(module).modules())
    lists: list[Any] = [part for part in parts if isinstance(part, torch.nn.ModuleList)]
    largest: Any = max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()))
    return list(largest)
