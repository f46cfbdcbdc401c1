"""Sequences being continued token by token: one row each, over whatever the model remembers them by.

Rows are dense: 0..n-1. What decides how many there are, what is sampled and when a row ends is the engine's.

Shapes: P distinct prompts, n rows, L layers, K key-value heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from strop.policy.attention import PrefixSharedAttention
from strop.policy.fused_trunk import Products
from strop.policy.kv_cache import KVCache, PrefillRecorder
from strop.policy.language_model import LanguageModel
from strop.policy.packing import PackedLayout
from strop.rollout import IntArray

_CACHES = ("cache", "past_key_values", "cache_params")
"""What a trunk calls its states, among its inputs and its outputs; the first since transformers 5.24."""


class Rows(Protocol):
    """The sequences of a batch being decoded."""

    max_num_seqs: int
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


def open_rows(
    model: LanguageModel, *, max_num_seqs: int, num_slots: int, products: Products | None = None
) -> CachedRows | AloneRows | AnewRows:
    """Return empty rows of the kind that a model needs."""
    if not model.is_alone:
        return CachedRows(model, max_num_seqs=max_num_seqs, num_slots=num_slots, products=products)
    kind = AloneRows if model.keeps_states else AnewRows
    return kind(model, max_num_seqs=max_num_seqs, num_slots=num_slots)


class CachedRows:
    """Rows of packed models, over one KV cache: prompts are prefilled as a packed row, and shared."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_num_seqs: int,
        num_slots: int,
        products: Products | None = None,
        may_use_kernels: bool = True,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_slots = num_slots
        self._model = model
        self._products = products
        self.cache = KVCache(
            model.shape,
            max_num_seqs=max_num_seqs,
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


@dataclass(slots=True, eq=False)
class _Cohort:
    """Rows of one prompt that began together: equally long, with states in one cache."""

    rows: list[int]
    cache: Any
    name: str
    """What the trunk calls the cache."""


class AloneRows:
    """Sequences that a model continues from its own states. See `Rows`."""

    def __init__(self, model: LanguageModel, *, max_num_seqs: int, num_slots: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_slots = num_slots
        self._model = model
        self._cohorts: list[_Cohort] = []
        self._num_rows = 0

    def begin(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> torch.Tensor:
        """Add rows for prompts. See `Rows.begin`."""
        hidden = []
        for prompt, count in zip(prompts, counts, strict=True):
            token_ids = torch.from_numpy(prompt.astype(np.int64)).to(self._model.device)
            output = self._model.run(input_ids=token_ids[None], use_cache=True)
            name = next((name for name in _CACHES if getattr(output, name, None) is not None), None)
            if name is None:
                raise RuntimeError("its trunk gives back no states to go on from")
            cohort = _Cohort(list(range(self._num_rows, self._num_rows + count)), getattr(output, name), name)
            self._choose(cohort, [0] * count)
            self._cohorts.append(cohort)
            self._num_rows += count
            hidden.append(output.last_hidden_state[0, -1])
        return self._model.logits(torch.stack(hidden))

    def step(self, token_ids_n: torch.Tensor, position_ids_n: torch.Tensor) -> torch.Tensor:
        """Feed every row a token. See `Rows.step`."""
        logits: list[torch.Tensor] = [torch.empty(0)] * self._num_rows
        for cohort in self._cohorts:
            output = self._model.run(
                input_ids=token_ids_n[cohort.rows][:, None], use_cache=True, **{cohort.name: cohort.cache}
            )
            cohort.cache = getattr(output, cohort.name)
            for row, found in zip(
                cohort.rows, self._model.logits(output.last_hidden_state[:, -1]), strict=True
            ):
                logits[row] = found
        return torch.stack(logits)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these. See `Rows.keep`."""
        new_of = {old: new for new, old in enumerate(rows)}
        for cohort in self._cohorts:
            kept = [place for place, row in enumerate(cohort.rows) if row in new_of]
            if kept and len(kept) < len(cohort.rows):
                self._choose(cohort, kept)
            cohort.rows = [new_of[cohort.rows[place]] for place in kept]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        self._num_rows = len(rows)

    def _choose(self, cohort: _Cohort, places: Sequence[int]) -> None:
        if list(places) != [0] or len(cohort.rows) > 1:
            cohort.cache.reorder_cache(torch.tensor(places, device=self._model.device))


class AnewRows:
    """Sequences that a model computes anew at every token, for want of states. See `Rows`."""

    def __init__(self, model: LanguageModel, *, max_num_seqs: int, num_slots: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_slots = num_slots
        self._model = model
        self._sequences: list[torch.Tensor] = []

    def begin(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> torch.Tensor:
        """Add rows for prompts. See `Rows.begin`."""
        fresh = [torch.from_numpy(prompt.astype(np.int64)).to(self._model.device) for prompt in prompts]
        for sequence, count in zip(fresh, counts, strict=True):
            self._sequences += [sequence] * count
        return self._read(fresh)

    def step(self, token_ids_n: torch.Tensor, position_ids_n: torch.Tensor) -> torch.Tensor:
        """Feed every row a token. See `Rows.step`."""
        pairs = zip(self._sequences, token_ids_n, strict=True)
        self._sequences = [torch.cat([sequence, token[None]]) for sequence, token in pairs]
        return self._read(self._sequences)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these. See `Rows.keep`."""
        self._sequences = [self._sequences[row] for row in rows]

    def _read(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        padded = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        hidden = self._model.run(input_ids=padded, use_cache=False).last_hidden_state
        rows = torch.arange(len(sequences), device=padded.device)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=padded.device)
        return self._model.logits(hidden[rows, last])
