"""Sequences being continued token by token: one row each, over whatever the model remembers them by.

Rows are dense: 0..n-1. What decides how many there are, what is sampled and when a row ends is the engine's.

Shapes: P distinct prompts, n rows, L layers, K key-value heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from strop.policy.alone import AloneRows, AnewRows
from strop.policy.kv_cache import KVCache, PrefillRecorder
from strop.policy.packing import PackedLayout
from strop.policy.prefix_attention import PrefixSharedAttention
from strop.rollout import IntArray

if TYPE_CHECKING:
    # A model is proven with these when it is loaded.
    from strop.policy.fused_trunk import Products
    from strop.policy.language_model import LanguageModel


class Rows(Protocol):
    """What a batch being decoded keeps of its sequences."""

    max_rows: int
    num_slots: int
    """Tokens that a sequence may have."""

    def begin(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> torch.Tensor:
        """Add `counts` rows for each prompt. Returns the logits of what comes next. Shapes: (P, V)."""
        ...

    def step(self, token_ids_n: torch.Tensor, position_ids_n: torch.Tensor) -> torch.Tensor:
        """Feed every row its newest token. Returns the logits of what comes next. Shapes: (n, V)."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these: `rows` lists old row numbers, the new number of rows[i] is i."""
        ...


class CachedRows:
    """Rows of packed models, over one KV cache: prompts are prefilled as a packed row, and shared."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_rows: int,
        num_slots: int,
        products: Products | None = None,
        may_use_kernels: bool = True,
    ) -> None:
        self.max_rows = max_rows
        self.num_slots = num_slots
        self._model = model
        self._products = products
        self.cache = KVCache(
            model.shape,
            max_rows=max_rows,
            num_slots=num_slots,
            dtype=model.dtype,
            device=model.device,
            may_use_kernels=may_use_kernels,
        )

    def begin(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> torch.Tensor:
        """Compute each prompt once and copy its keys and values to its rows. See `Rows.begin`."""
        model, device = self._model, self._model.device
        layout = PackedLayout.of_prompts([len(prompt) for prompt in prompts])
        recorder = PrefillRecorder(PrefixSharedAttention(layout, device), model.shape.num_layers)
        token_ids = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
        positions = torch.from_numpy(layout.position_ids()).to(device)
        hidden = model.trunk(token_ids, positions, recorder, self._products)
        keys, values = torch.stack(recorder.keys), torch.stack(recorder.values)
        ends = np.cumsum(layout.prompt_lens_P)
        for index, count in enumerate(counts):
            span = slice(int(layout.prompt_starts_P[index]), int(ends[index]))
            self.cache.admit(keys[:, :, span], values[:, :, span], count)
        return model.logits(hidden[torch.from_numpy(ends - 1).to(device)], self._products)

    def step(self, token_ids_n: torch.Tensor, position_ids_n: torch.Tensor) -> torch.Tensor:
        """Feed every row a token. See `Rows.step`."""
        hidden = self._model.trunk(token_ids_n, position_ids_n, self.cache, self._products)
        self.cache.advance()
        return self._model.logits(hidden, self._products)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these. See `Rows.keep`."""
        self.cache.keep(rows)


def open_rows(
    model: LanguageModel, *, max_rows: int, num_slots: int, products: Products | None = None
) -> CachedRows | AloneRows | AnewRows:
    """Return empty rows of the kind that a model needs."""
    if not model.is_alone:
        return CachedRows(model, max_rows=max_rows, num_slots=num_slots, products=products)
    kind = AloneRows if model.keeps_states else AnewRows
    return kind(model, max_rows=max_rows, num_slots=num_slots)
