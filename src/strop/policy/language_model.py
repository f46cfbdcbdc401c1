"""Loading a causal language model, and running its trunk over rollouts.

Shapes: N tokens of the flat row, U scored positions, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from strop.errors import ConfigError, explain_refusal
from strop.policy.alone import read_alone
from strop.policy.attention import ATTENTION_NAME, AttentionContext
from strop.policy.families import Layout
from strop.policy.fused_trunk import FusedTrunk, Products, recompute
from strop.policy.head import Head
from strop.policy.head_form import HeadForm
from strop.policy.lora import adapt_linears
from strop.policy.packing import PackedBatch
from strop.policy.proof import prove
from strop.policy.shared_attention import build_shared_attention
from strop.policy.structure import ModelShape, decoder_layers, find_trunk, read_shape
from strop.spec.lora import LoraSpec

# What an architecture's own code raises at a config that it does not expect may be anything.
_LOADING_ERRORS = (
    *(OSError, ValueError, RuntimeError, ImportError),
    *(TypeError, LookupError, AttributeError, AssertionError),
)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class LanguageModel:
    """A transformers causal LM, run over packed rows with strop's attention, or sequence by sequence.

    The parameters held here are the compute copies: what generation and training read.
    """

    def __init__(self, module: Any, *, shape: ModelShape | None = None, form: HeadForm | None = None) -> None:
        """Take a module as it is; `load` proves it. `form` is that of its head."""
        self.module = module
        self.module.eval()
        self.shape = shape or read_shape(module)
        self.dtype: torch.dtype = module.get_output_embeddings().weight.dtype
        """Type that is computed with."""
        if not self.is_alone:
            self.module.set_attn_implementation(ATTENTION_NAME)
        self.fused: FusedTrunk | None = None
        """The layers for this processor, if the family is known and the kernels run here."""
        self.keeps_states = True
        """Whether generation goes on from states, or computes every sequence anew at each token."""
        self.adapters: LoraSpec | None = None
        """What is trained beside frozen weights, None where the weights are trained."""
        self.recomputes = False
        """Whether only the inputs of layers are kept for a backward."""
        self._form = form or HeadForm()
        self._trunk: Callable[..., Any] = find_trunk(module)

    @classmethod
    def load(
        cls, path: Path, *, dtype: torch.dtype, device: str = "cpu", may_fuse: bool = True
    ) -> LanguageModel:
        """Load a Hugging Face model directory and prove strop's forwards on it.

        Without `may_fuse`, or where the fused layers do not fit, the layers are transformers' own.

        Raises: ConfigError if files are missing or weights do not match the architecture, or if the
        architecture needs something that strop does not give it.
        """
        return prove(cls, load_module(path, dtype).to(device), str(path), may_fuse=may_fuse)

    @property
    def is_alone(self) -> bool:
        """Whether each sequence is computed by itself, instead of in packed rows that share prompts."""
        return self.shape.layout is Layout.ALONE

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

    @property
    def head(self) -> Head:
        """The LM head, over the parameters as they are now: sharding replaces them."""
        linear = self.module.get_output_embeddings()
        return Head(linear.weight, getattr(linear, "bias", None), self._form.scale, self._form.cap)

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
        for layer in decoder_layers(self.module):
            # The function and not the call: what FSDP does around a call is done once.
            layer.forward = partial(_forward_again, layer.forward)

    def route(self, trunk: Callable[..., Any]) -> None:
        """Run all layers through `trunk`, which calls the module's own after what it has to do."""
        self._trunk = trunk

    def read(self, batch: PackedBatch) -> torch.Tensor:
        """Run all layers and the final norm over a batch. Shapes: returns (U, D), scored positions alone."""
        if self.is_alone:
            # Some keep the residual stream in float32.
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

        `products` replaces the multiplications of fused layers; transformers' own ignore it.
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
        """Call the module's own trunk, which returns what transformers returns."""
        return self._trunk(**inputs)

    def logits(self, hidden_N_D: torch.Tensor, products: Products | None = None) -> torch.Tensor:
        """Project hidden states on the vocabulary. Shapes: returns (N, V) in the compute type."""
        if self.fused is not None and products is not None:
            return self.head.finish(products.multiply(self.fused.head, hidden_N_D))
        return self.head.logits(hidden_N_D.to(self.dtype))


def _forward_again(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return recompute(forward, *inputs, **named) if torch.is_grad_enabled() else forward(*inputs, **named)


def load_module(path: Path, dtype: torch.dtype | Literal["auto"]) -> Any:
    """Load with transformers, and refuse a directory whose tensors do not fill the model exactly.

    "auto" keeps the types that are stored.
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
            output_loading_info=True,
            # Listed instead of raised, so that the refusal below can name the tensors.
            ignore_mismatched_sizes=True,
        )
    except _LOADING_ERRORS as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            explain_refusal(
                f"{path} cannot be loaded as a causal language model ({said})",
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
    # which stands in every chat, and nothing that is padded here is ever seen.
    embeddings = module.get_input_embeddings()
    if embeddings is not None:
        embeddings.padding_idx = None
    return module
