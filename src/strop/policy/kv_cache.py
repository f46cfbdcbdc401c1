"""Sequences that are decoded token by token: one row each, over a KV cache or the states of a model.

Rows of the preallocated cache have different lengths. Live rows are dense, 0..n-1; a row's tokens occupy its
slots from 0 on, so rows of any length and age are side by side, and the only move is a last row into the hole
of a finished one. Rows of one prompt each hold a copy of it, and all read the first row's copy, which then
stays in the processor's cache. The engine decides how many rows there are, what is sampled and when a row
ends.

Keys are stored in tiles of T slots, transposed inside a tile: T scores are then one vector. The C kernel
needs T = 16 and reads each row only as far as it is filled. Without it one tile holds all slots, and
attention is two batched products over all rows up to the longest, with the slots after a row's end
masked.

Shapes: P distinct prompts, V vocabulary, L layers, n live rows, K key-value heads, R query heads per
key-value head, E head width, F width of values, W slots, T slots of a tile. Keys are
(L, rows, K, W / T, E, T), values (L, rows, K, W, F).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from strop.kernels import calls
from strop.policy.attention import PLAIN, AttentionContext, PrefixSharedAttention, ScoreRule, weigh
from strop.policy.fused_trunk import Products
from strop.policy.language_model import LanguageModel, ModelShape
from strop.policy.packing import PackedLayout, to_device
from strop.rollout import IntArray


class KVCache:
    """Keys and values of all layers for up to `max_num_seqs` sequences of up to `num_slots` tokens."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        max_num_seqs: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        may_use_kernels: bool = True,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_slots = num_slots
        self.num_rows = 0
        self._shape = shape
        is_tiled = may_use_kernels and shape.has_plain_scores and calls.can_run(device, dtype)
        is_tiled = is_tiled and shape.head_width % calls.LANES == 0
        tile = calls.LANES if is_tiled else num_slots
        num_tiles = -(-num_slots // tile)
        rows = (shape.num_layers, max_num_seqs, shape.num_kv_heads)
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times a stray NaN is NaN.
        self._keys = torch.zeros(*rows, num_tiles, shape.head_width, tile, dtype=dtype, device=device)
        self._values = torch.zeros(*rows, num_tiles * tile, shape.value_width, dtype=dtype, device=device)
        places = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device)
        self._rows = calls.CacheRows(lengths=places[0], owners=places[1], shared=places[2])
        self._prompts: list[int] = []
        """For each live row the number of its prompt, equal for rows of one group."""
        self._num_prompts = 0
        self._is_tiled = is_tiled
        self._window: CacheWindow | None = None

    @staticmethod
    def bytes_per_slot(shape: ModelShape, dtype: torch.dtype) -> int:
        """Bytes that one token of one row takes over all layers."""
        widths = shape.head_width + shape.value_width
        return shape.num_layers * shape.num_kv_heads * widths * dtype.itemsize

    def admit(self, keys: torch.Tensor, values: torch.Tensor, num_rows: int = 1) -> None:
        """Append `num_rows` rows that hold the same tokens: those of one prompt.

        Shapes: keys (L, K, length, E) and values (L, K, length, F), positions applied.
        """
        length, tile = keys.shape[2], self._keys.shape[-1]
        num_tiles = -(-length // tile)
        padded = torch.nn.functional.pad(keys, (0, 0, 0, num_tiles * tile - length))
        tiles = padded.view(*padded.shape[:2], num_tiles, tile, -1).transpose(3, 4)
        fresh = slice(self.num_rows, self.num_rows + num_rows)
        self._keys[:, fresh, :, :num_tiles] = tiles[:, None]
        self._values[:, fresh, :, :length] = values[:, None]
        self._rows.lengths[fresh] = length
        self._rows.shared[fresh] = length // tile * tile
        self._prompts += [self._num_prompts] * num_rows
        self._num_prompts += 1
        self.num_rows += num_rows
        self._find_owners()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, moving kept rows from the back into the holes.

        `rows` lists old row numbers; the new number of rows[i] is i.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new, old = to_device(np.array(moved, dtype=np.int64).T, self._keys.device)
            for stored in (self._keys, self._values):
                stored[:, new] = stored[:, old]
            for column in (self._rows.lengths, self._rows.shared):
                column[new] = column[old]
        self._prompts = [self._prompts[row] for row in rows]
        self.num_rows = len(rows)
        self._find_owners()

    def _find_owners(self) -> None:
        """Let each row read its prompt from the first live row of the same prompt.

        Every row has a copy, so any of them may end first.
        """
        if not self._is_tiled:
            return
        first: dict[int, int] = {}
        owners = [first.setdefault(prompt, row) for row, prompt in enumerate(self._prompts)]
        self._rows.owners[: self.num_rows] = torch.tensor(owners, dtype=torch.int64)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Store one token per row and attend over the row so far.

        Shapes: query (H, n, E), key (K, n, E), value (K, n, F); returns (n, H, F).
        """
        if not self._is_tiled:
            if layer == 0:
                lengths = self._rows.lengths[: self.num_rows]
                self._window = self.window(lengths, int(lengths.max()) + 1)
            assert self._window is not None
            return self._window.attend(layer, query, key, value, scaling, rule)
        query, key, value = (_with_dense_heads(part.transpose(0, 1)) for part in (query, key, value))
        keys, values = self._keys[layer], self._values[layer]
        return calls.decode_attention(keys, values, self._rows, query, key, value, scaling, rule.window)

    def window(self, lengths: torch.Tensor, width: int) -> CacheWindow:
        """Return the attention of one decode step over the first rows and slots; not for tiled caches.

        Shapes: lengths (n,), the tokens stored in each row, all less than `width`.
        """
        assert not self._is_tiled
        return CacheWindow(self._keys[:, :, :, 0], self._values, lengths, width)

    def advance(self) -> None:
        """Advance the lengths by the slot that a decode step has written in every row."""
        self._rows.lengths[: self.num_rows] += 1


class CacheWindow:
    """Decode attention with batched products over the first slots of the first rows of a cache.

    The tensors that it touches depend only on the number of rows and slots, not on their content, so that a
    GPU can replay it as a graph.

    Shapes: keys (L, rows, K, E, W), values (L, rows, K, W, F), lengths (n,).
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, width: int) -> None:
        self._keys = keys
        self._values = values
        self._lengths = lengths
        self._width = width
        self._rows = torch.arange(len(lengths), device=lengths.device)
        self._biases: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Store one token per row and attend over the row so far.

        Shapes: query (H, n, E), key (K, n, E), value (K, n, F); returns (n, H, F).
        """
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        num_rows, num_kv_heads = len(self._lengths), key.shape[1]
        if rule.window not in self._biases:
            # Masks the slots after each row's end, and those before its window. Shapes: (n, 1, 1, W).
            slots = torch.arange(self._width, device=self._lengths.device)
            hidden = slots > self._lengths[:, None]
            if rule.window is not None:
                hidden = hidden | (slots <= self._lengths[:, None] - rule.window)
            shape = (len(self._lengths), 1, 1, self._width)
            open_bias = torch.zeros(shape, dtype=query.dtype, device=slots.device)
            self._biases[rule.window] = open_bias.masked_fill_(hidden[:, None, None], float("-inf"))
        bias = self._biases[rule.window]
        self._keys[layer][self._rows, :, :, self._lengths] = key
        self._values[layer][self._rows, :, self._lengths] = value
        keys = self._keys[layer, :num_rows, ..., : self._width]
        values = self._values[layer, :num_rows, :, : self._width]
        grouped = query.reshape(num_rows, num_kv_heads, -1, query.shape[-1]) * scaling
        scores = grouped @ keys
        if rule.is_linear:
            # softmax sums in fp32 for any type; fp32 weights would be copied back and forth.
            weights = torch.softmax(scores + bias, dim=-1)
        else:
            weights = weigh(scores, rule, bias, num_kv_heads).to(values.dtype)
        return (weights @ values).flatten(1, 2)


def _with_dense_heads(part: torch.Tensor) -> torch.Tensor:
    """Return (n, heads, E) with the heads of a row contiguous, as fused layers produce it."""
    is_dense = part.stride(1) == part.shape[2] and part.stride(2) == 1
    return part if is_dense else part.contiguous()


class PrefillRecorder:
    """Attention context that computes prompts and records their keys and values."""

    def __init__(self, inner: AttentionContext, num_layers: int) -> None:
        self._inner = inner
        self.keys: list[torch.Tensor] = [torch.empty(0)] * num_layers
        """By layer: keys (K, N, E), values (K, N, F)."""
        self.values: list[torch.Tensor] = [torch.empty(0)] * num_layers

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Record and compute one layer. Shapes: see `AttentionContext.attend`."""
        self.keys[layer], self.values[layer] = key, value
        return self._inner.attend(layer, query, key, value, scaling, rule)


_CACHES = ("cache", "past_key_values", "cache_params")
"""Names of a trunk's states among its inputs and outputs; the first since transformers 5.24."""


class Rows(Protocol):
    """The sequences of a batch that is decoded."""

    max_num_seqs: int
    num_slots: int
    """Tokens that a sequence may have."""

    def begin(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> torch.Tensor:
        """Add `counts` rows for each prompt. Returns the logits of the next tokens. Shapes: (P, V)."""
        ...

    def step(self, token_ids_n: torch.Tensor, position_ids_n: torch.Tensor) -> torch.Tensor:
        """Feed every row its newest token. Returns the logits of the next tokens. Shapes: (n, V)."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these: `rows` lists old row numbers, the new number of rows[i] is i."""
        ...


def open_rows(
    model: LanguageModel, *, max_num_seqs: int, num_slots: int, products: Products | None = None
) -> CachedRows | AloneRows | RecomputedRows:
    """Return empty rows of the kind that a model needs."""
    if not model.is_alone:
        return CachedRows(model, max_num_seqs=max_num_seqs, num_slots=num_slots, products=products)
    kind = AloneRows if model.keeps_states else RecomputedRows
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
    """The trunk's name for the cache."""


class AloneRows:
    """Sequences that a model continues from its states. See `Rows`."""

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
                raise RuntimeError("its trunk returns no states to continue from")
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
            of_rows = self._model.logits(output.last_hidden_state[:, -1])
            for row, logits_V in zip(cohort.rows, of_rows, strict=True):
                logits[row] = logits_V
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


class RecomputedRows:
    """Sequences of a model without usable states: recomputed at every token. See `Rows`."""

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
