"""How each family of models is run, as far as its config shows. Imports no torch, for `strop plan`.

The forwards are proven when a model is loaded (`proof`). This table predicts the result, and holds facts that
a short proof cannot see: layers that change only after thousands of tokens. `docs/models.md` has the verdict
on every family, and its test keeps both equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Layout(StrEnum):
    """How sequences are laid out for a forward."""

    PACKED = "packed"
    """One flat row in which a prompt stands once for all its replies."""
    ALONE = "alone"
    """Each prompt with each reply is a sequence of its own, padded behind."""


_STATE = "its layers carry a state from token to token"
_OWN_CODE = "its attention is code of its own"
_PLACES = "it counts positions along a row"
_SIZES = "its layers have heads of different sizes"
_CHOICE = "its layers choose among the keys of a whole row"
_TWICE = "its layers are run several times"

_BECAUSE: Mapping[str, str] = {
    _STATE: "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe"
    " lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text"
    " qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya",
    _OWN_CODE: "bloom codegen diffllama doge falcon git gpt_neo gpt_neox_japanese gptj inkling2_text"
    " inkling_text mpt mvp nemotron openai-gpt stablelm trocr xglm xlm",
    _PLACES: "bart bigbird_pegasus blenderbot blenderbot-small llama4 llama4_text marian mbart pegasus phimoe"
    " plbart",
    _SIZES: "gemma4 gemma4_text gemma4_unified gemma4_unified_text mimo_v2_flash",
    _CHOICE: "axk2 deepseek_v32 deepseek_v4 dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text",
    _TWICE: "hrm_text",
}
"""Families whose sequences are computed by themselves: reason, and model types."""
_ALONE = {name: because for because, names in _BECAUSE.items() for name in names.split()}
_STATELESS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers without a state."""

_SELECTING = frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"})
"""Families whose layers attend to the best `index_topk` keys of the whole sequence: later tokens then change
what a token sees. Sequences up to that length are seen whole."""
_UNLIMITED = 2**20
"""Positions of a model whose config names no limit, such as recurrent ones."""
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "context_length")


def why_alone(config: Mapping[str, Any]) -> str | None:
    """Return why sequences of a model with this config.json are computed by themselves; None if packed.

    A model of a hybrid family that has only attention layers is packed.
    """
    because = _ALONE.get(str(config.get("model_type")))
    text = config.get("text_config") or config
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if because == _STATE and kinds and _STATELESS.issuperset(kinds):
        return None
    return because


def say_alone(because: str) -> str:
    """Return the note for users that sequences are computed by themselves."""
    return f"each sequence is computed by itself, prompts once for every reply, because {because}"


def read_max_positions(config: Mapping[str, Any]) -> int:
    """Return how long a sequence may be; `config` is that of the text part.

    Long-rope has two sets of frequencies, for sequences up to a length and for longer ones. Tokens that
    were sampled below it and trained above would have two different log-probabilities, so the limit
    is that length.
    """
    limit = next((int(config[name]) for name in _LIMITS if config.get(name)), _UNLIMITED)
    if config.get("model_type") in _SELECTING:
        limit = min(limit, int(config["index_topk"]))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        original = config.get("original_max_position_embeddings") or rope.get(
            "original_max_position_embeddings"
        )
        limit = min(limit, int(original or limit))
    return limit
