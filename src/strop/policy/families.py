"""How a family of models is run, as far as its config tells. Imports no torch, for `strop plan`.

What a model really does is proven when it is loaded (`proof`). This table says it beforehand, and holds
what a short proof cannot see: layers that change only behind thousands of tokens. `docs/models.md` has the
verdict on every family, and its test keeps both equal.
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
_OWN_ATTENTION = "its attention is code of its own"
_SIZES = "its layers' heads differ in size"
_SHARED = "its layers read keys of other layers"
_SELECTS = "its attention selects keys"

ALONE: Mapping[str, str] = {}
"""By model type: why its sequences are computed by themselves."""

_SELECTING = frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"})
"""Families whose layers attend to so many keys (`index_topk`), and choose them among all of a sequence: what
stands behind a token then changes what it sees. Sequences no longer than that are seen whole."""
_UNLIMITED = 2**20
"""Positions of a model whose config names no limit, as recurrent ones have none."""
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "context_length")


def why_alone(config: Mapping[str, Any]) -> str | None:
    """Say why sequences of a model with this config.json are computed by themselves, None where packed."""
    return ALONE.get(str(config.get("model_type")))


def read_max_positions(config: Mapping[str, Any]) -> int:
    """Return how long a sequence may be under this config, that of the text part.

    Long-rope has two sets of frequencies, for sequences up to a length and for longer ones. Tokens that
    were sampled below it and trained above would have two different log-probabilities: there the limit
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
