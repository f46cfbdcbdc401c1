"""Bytes and FLOP of a model, from its config alone. Imports no torch.

For `strop plan`, before a model is loaded, and the gate. Formulas count matrix products and
the tensors that autograd keeps; norms and elementwise work are not counted as FLOP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import ConfigError, CorruptRecord
from strop.policy.families import read_max_positions, why_alone
from strop.spec.model import LoraSpec
from strop.store.model_files import WEIGHTS_INDEX

if TYPE_CHECKING:
    # An engine's own environment reads sizes too, without the run file.
    from strop.spec.run import RunSpec

DEFAULT_MICRO_BATCH_POSITIONS = 1280
"""Fed positions per micro-batch, which determine the memory for activations.

About 0.6 MiB each for a model of 135M parameters with fused layers, 1 MiB without. Fewer, larger
micro-batches save only the adding of gradients, some 50 ms each on two cores.
"""
MAX_GPU_POSITIONS = 32_768
"""Positions of a micro-batch on a GPU at most; more do not use it better."""
GPU_HEAD_BYTES = 2**30
"""Workspace of the head on a GPU, for any vocabulary and number of tokens."""
_ACTIVATION_FRAC = 0.5
"""Share for activations of the GPU memory that weights and optimizer leave; caches need some too."""
HEAD_CHUNK_ROWS = 256
"""Rows of logits held at once: 48 MiB in fp32 for a vocabulary of 49,152. Twice as many where they
stay in bf16 and become their gradient in place."""
_STATE_BYTES = {"bfloat16": 18, "float32": 16}
"""Per parameter: fp32 master 4, moments 8, gradient 4, and a bf16 copy 2 where there is one."""
_EXPLAINED_FRAC = 0.05
"""Norms and biases are at most this share of a model's parameters; a larger difference has another cause."""
_SPARE_FRAC = 0.1
"""Share of a rank's memory for KV caches and for memory that is freed late."""
COPY_BYTES = {"bfloat16": 2, "float32": 4}
"""Per parameter or cached value, by compute type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The sizes of a decoder with grouped-query attention and a gated MLP, and its other parameters."""

    num_layers: int
    hidden_width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    vocab_size: int
    max_positions: int
    is_tied: bool
    other_params: int = 0
    """Parameters of the layers that a token does not pass through, or that these sizes do not explain:
    experts that are not chosen, states, narrower projections."""
    alone_because: str | None = None
    """Why each sequence is computed by itself, as far as the config shows; None where rows are packed."""

    @property
    def body_params(self) -> int:
        """Parameters in the layers' matrices that every token passes through (N)."""
        query = self.hidden_width * self.num_heads * self.head_width
        key_value = self.hidden_width * self.num_kv_heads * self.head_width
        mlp = 3 * self.hidden_width * self.mlp_width
        return self.num_layers * (2 * query + 2 * key_value + mlp)

    @property
    def head_params(self) -> int:
        """Parameters of the LM head (H)."""
        return self.vocab_size * self.hidden_width

    @property
    def num_params(self) -> int:
        """All parameters without norms."""
        return self.layer_params * self.num_layers + self.outer_params

    @property
    def outer_params(self) -> int:
        """Parameters of embedding and head."""
        return self.head_params * (1 if self.is_tied else 2)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer."""
        return (self.body_params + self.other_params) // self.num_layers


def size_of_config(config: Mapping[str, Any]) -> ModelSize:
    """Read sizes from the content of a config.json.

    Raises: KeyError, TypeError or ValueError if one is missing or no number.
    """
    text = config.get("text_config") or config
    num_heads = _first(text, "num_attention_heads", "n_head", "n_heads", "num_heads", default=1)
    hidden_width = _first(text, "hidden_size", "n_embd", "d_model")
    num_layers = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    mlp_width, idle_width = _mlp_widths(text, hidden_width, num_layers)
    return ModelSize(
        num_layers=num_layers,
        hidden_width=hidden_width,
        mlp_width=mlp_width,
        other_params=3 * hidden_width * idle_width,
        num_heads=num_heads,
        num_kv_heads=_first(text, "num_key_value_heads", default=num_heads),
        head_width=_first(text, "head_dim", default=hidden_width // num_heads),
        vocab_size=_first(text, "vocab_size"),
        max_positions=read_max_positions(text),
        is_tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        alone_because=why_alone(config),
    )


def _mlp_widths(text: Mapping[str, Any], hidden_width: int, num_layers: int) -> tuple[int, int]:
    """Return the MLP's width for one token, and the width of all experts that it does not pass through.

    The first is the mean over the layers, the second their sum. Routers are too small to count.
    """
    dense = _first(
        text, "intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", default=4 * hidden_width
    )
    num_experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts", default=0)
    chosen = _first(text, "num_experts_per_tok", "num_experts_per_token", default=0)
    if not num_experts or not 0 < chosen <= num_experts:
        return dense, 0
    width = _first(text, "moe_intermediate_size", default=dense)
    shared = _first(text, "shared_expert_intermediate_size", default=0)
    shared = shared or width * _first(text, "n_shared_experts", default=0)
    plain = text.get("mlp_only_layers") or ()
    num_dense = min(_first(text, "first_k_dense_replace", default=len(plain)), num_layers)
    num_sparse = num_layers - num_dense
    mean = (num_sparse * (chosen * width + shared) + num_dense * dense) // num_layers
    return mean, num_sparse * (num_experts - chosen) * width


def _first(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first size that a config has under one of its names."""
    size = next((config[name] for name in names if config.get(name)), default)
    if size is None:
        raise KeyError(names[0])
    return int(size)


def read_model_size(model_dir: Path) -> ModelSize:
    """Read sizes from a model directory's config.json, and the number of parameters from its weights.

    Raises: ConfigError if the file is missing or lacks a size; CorruptRecord naming a file of weights that is
        cut.
    """
    try:
        config = json.loads((model_dir / "config.json").read_text())
        size, num_stored = size_of_config(config), _count_stored(model_dir, config)
        if num_stored is None or abs(num_stored - size.num_params) <= _EXPLAINED_FRAC * num_stored:
            return size
        return replace(size, other_params=size.other_params + num_stored - size.num_params)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the sizes of the model in {model_dir} cannot be read ({type(error).__name__}: {error})",
            allowed="a config.json of a decoder-only language model",
            next_step="fetch the model anew with `strop model get URI`",
        ) from error


def _count_stored(model_dir: Path, config: Mapping[str, Any]) -> int | None:
    """Count the parameters in a model's weights, by the headers or index of its files; None if unknown."""
    index_path, index = model_dir / WEIGHTS_INDEX, None
    names = {"model.safetensors"}
    if index_path.is_file():
        index = json.loads(index_path.read_text())
        names = set(index["weight_map"].values())
    paths = [model_dir / name for name in sorted(names)]
    if not all(path.is_file() for path in paths):
        return None if index is None else _count_indexed(index.get("metadata") or {}, config)
    tensors = [tensor for path in paths for tensor in _read_tensors(path)]
    return sum(int(math.prod(tensor["shape"])) for tensor in tensors)


def _read_tensors(path: Path) -> list[Mapping[str, Any]]:
    """Return the descriptions of the tensors in a file of weights.

    Raises: CorruptRecord if it is not as long as they say.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(min(length, size))
    try:
        header = json.loads(head) if len(head) == length else {}
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        expected = 8 + length + max(tensor["data_offsets"][1] for tensor in tensors)
    except (ValueError, KeyError, TypeError, AttributeError):
        expected = -1
    if size != expected:
        wanted = "its header cannot be read" if expected < 0 else f"its header promises {expected}"
        raise CorruptRecord(
            f"{path} is damaged: it has {size} bytes, and {wanted}",
            allowed="a whole file in the format safetensors",
            next_step="fetch the model anew, or copy the file again",
        )
    return tensors


def _count_indexed(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Count the parameters by the index of the weights; None if it does not say."""
    if metadata.get("total_parameters"):
        return int(metadata["total_parameters"])
    dtype = config.get("dtype") or config.get("torch_dtype")
    item = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(dtype))
    if item is None or "total_size" not in metadata or config.get("quantization_config"):
        return None
    return int(metadata["total_size"]) // item


def state_bytes(size: ModelSize, dtype: str, num_trained: int | None = None) -> int:
    """Bytes of weights, gradients and optimizer state. `num_trained` None: all weights are trained."""
    if num_trained is None:
        return size.num_params * _STATE_BYTES[dtype]
    return size.num_params * COPY_BYTES[dtype] + num_trained * _STATE_BYTES[dtype]


def count_trained(size: ModelSize, lora: LoraSpec) -> int | None:
    """Return how many parameters a run's adapters have, None where it trains all weights instead.

    Targets other than the usual seven layers are not counted.
    """
    if lora.rank is None:
        return None
    query, key_value = size.num_heads * size.head_width, size.num_kv_heads * size.head_width
    widths = {
        "q_proj": size.hidden_width + query,
        "k_proj": size.hidden_width + key_value,
        "v_proj": size.hidden_width + key_value,
        "o_proj": query + size.hidden_width,
        "gate_proj": size.hidden_width + size.mlp_width,
        "up_proj": size.hidden_width + size.mlp_width,
        "down_proj": size.mlp_width + size.hidden_width,
    }
    return size.num_layers * lora.rank * sum(widths.get(name, 0) for name in lora.target_names)


def rank_kept_bytes(size: ModelSize, dtype: str, num_ranks: int, num_trained: int | None = None) -> int:
    """Bytes that one rank of several keeps between steps: its rows, and the fp32 gradient of the LM head.

    Its rows are masters, moments and gradients; of frozen weights only compute copies. The head's gradient is
    whole, where the head is trained.
    """
    if num_trained is None:
        return -(-size.num_params * 16 // num_ranks) + 4 * size.head_params
    return -(-(size.num_params * COPY_BYTES[dtype] + num_trained * 16) // num_ranks)


def rank_state_bytes(size: ModelSize, dtype: str, num_ranks: int, num_trained: int | None = None) -> int:
    """Bytes of one rank's share of weights, gradients and optimizer state, with what it gathers.

    In a forward a rank gathers embedding, head and two layers (one computed, one in transfer), in a backward
    also the gradients of one of them, in fp32 for their transfer. On a CPU the resident memory is larger: the
    C library keeps freed memory.
    """
    if num_ranks == 1:
        return state_bytes(size, dtype, num_trained)
    item, layer, outer = COPY_BYTES[dtype], size.layer_params, size.outer_params
    reduced = max(outer, layer) if num_trained is None else num_trained // size.num_layers
    gathered = (outer + 2 * layer) * item + reduced * (item + 4)
    return rank_kept_bytes(size, dtype, num_ranks, num_trained) + gathered


def packed_bytes(size: ModelSize, dtype: str) -> int:
    """Bytes of the copies that the native engine packs for a processor's matrix kernels."""
    return size.num_params * COPY_BYTES[dtype]


def terms_bytes(size: ModelSize, num_terms: int, num_trained: int | None = None) -> int:
    """Bytes of the buffer in which the gradients of several terms are added up."""
    return 4 * (size.num_params if num_trained is None else num_trained) if num_terms > 1 else 0


def activation_bytes(size: ModelSize, dtype: str, num_positions: int, *, is_recomputed: bool = False) -> int:
    """Bytes that autograd keeps for one micro-batch, attention and head workspace included.

    Counted for the layers of transformers; fused ones keep about two thirds of it. Recomputed: the inputs
    of every layer, and the inside of one at a time.
    """
    item = COPY_BYTES[dtype]
    # Per layer: two norms keep fp32 inputs and normalised values, attention its projections before
    # and after rotary embedding, the MLP four tensors of its width.
    norms = 2 * size.hidden_width * (8 + 2 * item)
    attention = 6 * (size.num_heads + size.num_kv_heads) * size.head_width * item
    mlp = 4 * size.mlp_width * item
    layer = norms + attention + mlp
    per_position = size.num_layers * layer
    if is_recomputed:
        # Two tensors of the stream: fused layers add up late.
        per_position = size.num_layers * 2 * size.hidden_width * item + layer
    head = HEAD_CHUNK_ROWS * size.vocab_size * (4 + 2 * item)
    return num_positions * per_position + head


def frozen_bytes(
    size: ModelSize, dtype: str, *, num_positions: int, beside_bytes: int = 0, num_ranks: int = 1
) -> int:
    """Bytes that a frozen model adds to a learner's rank: its weights, and the memory of a forward.

    Its forwards run while the learner holds no activations, so only their excess over these, `beside_bytes`,
    is added; hidden states stay, such as a teacher's. Each of several ranks keeps its rows and gathers as in
    a forward of `rank_state_bytes`.
    """
    item = COPY_BYTES[dtype]
    weights = -(-size.num_params * item // num_ranks)
    if num_ranks > 1:
        weights += (size.outer_params + 2 * size.layer_params) * item
    one_layer = replace(size, num_layers=1)
    forward = activation_bytes(one_layer, dtype, num_positions, is_recomputed=True)
    return weights + num_positions * size.hidden_width * item + max(forward - beside_bytes, 0)


def must_recompute(
    size: ModelSize,
    dtype: str,
    *,
    num_positions: int,
    have_bytes: int | None,
    num_ranks: int = 1,
    num_trained: int | None = None,
    frozen_bytes: int = 0,
) -> bool:
    """Whether activations must be recomputed, because they do not fit into memory beside the weights.

    `have_bytes` is the memory that a rank can get; None if unknown: activations are kept then. `frozen_bytes`
    is the memory of frozen models.
    """
    if have_bytes is None:
        return False
    weights = rank_state_bytes(size, dtype, num_ranks, num_trained) + frozen_bytes
    return weights + activation_bytes(size, dtype, num_positions) > (1 - _SPARE_FRAC) * have_bytes


def wants_recompute(
    spec: RunSpec, size: ModelSize, have_bytes: int | None, *, num_ranks: int, frozen: Iterable[ModelSize]
) -> bool:
    """Whether a learner recomputes activations: by the run file, else by `must_recompute`.

    `frozen` are the sizes of the frozen models.
    """
    if spec.train.activation_checkpointing is not None:
        return spec.train.activation_checkpointing
    dtype, num_positions = spec.model.dtype, spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    return must_recompute(
        size,
        dtype,
        num_positions=num_positions,
        have_bytes=have_bytes,
        num_ranks=num_ranks,
        num_trained=count_trained(size, spec.lora),
        frozen_bytes=sum(
            frozen_bytes(model, dtype, num_positions=num_positions, num_ranks=num_ranks) for model in frozen
        ),
    )


def gpu_positions(
    total_bytes: int,
    size: ModelSize,
    dtype: str,
    *,
    num_ranks: int = 1,
    num_trained: int | None = None,
    is_recomputed: bool = False,
) -> int:
    """Return how many positions a rank trains at once on a GPU of `total_bytes`, in steps of 1024."""
    one, none = (activation_bytes(size, dtype, count, is_recomputed=is_recomputed) for count in (1, 0))
    left = total_bytes - rank_state_bytes(size, dtype, num_ranks, num_trained) - GPU_HEAD_BYTES
    fitting = int(_ACTIVATION_FRAC * left) // (one - none) // 1024 * 1024
    return max(min(fitting, MAX_GPU_POSITIONS), DEFAULT_MICRO_BATCH_POSITIONS)


def micro_batch_positions(
    *, budget: int, num_prompts: int, num_rollouts: int, prompt_tokens: int, reply_tokens: int
) -> int:
    """Positions of the largest micro-batch: the whole step where it fits the budget.

    Units: `num_rollouts` is per prompt, `prompt_tokens` and `reply_tokens` are the longest of each.
    """
    return min(budget, num_prompts * (prompt_tokens + num_rollouts * reply_tokens))


def cache_bytes(size: ModelSize, dtype: str, num_rows: int, num_slots: int) -> int:
    """Bytes of a KV cache."""
    per_slot = 2 * size.num_layers * size.num_kv_heads * size.head_width * COPY_BYTES[dtype]
    return num_rows * num_slots * per_slot


def checkpoint_bytes(size: ModelSize, dtype: str, num_trained: int | None = None) -> int:
    """Bytes of one checkpoint: export, masters and two moments."""
    if num_trained is None:
        return size.num_params * (COPY_BYTES[dtype] + 12)
    return size.num_params * COPY_BYTES[dtype] + num_trained * (COPY_BYTES[dtype] + 12)


def decode_flop(size: ModelSize, num_tokens: float) -> float:
    """FLOP to generate tokens, attention left out."""
    return 2.0 * (size.body_params + size.head_params) * num_tokens


def prefill_flop(size: ModelSize, num_tokens: float) -> float:
    """FLOP to feed prompt tokens."""
    return 2.0 * size.body_params * num_tokens


def learn_flop(size: ModelSize, num_positions: float, num_scored: float) -> float:
    """FLOP of forward and backward: 6 per body parameter and position, 6 per head parameter and score."""
    return 6.0 * (size.body_params * num_positions + size.head_params * num_scored)
