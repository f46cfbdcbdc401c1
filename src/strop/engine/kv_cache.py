"""A preallocated KV cache whose live rows are dense and end at one common index.

Rows occupy 0..n-1 and prompts are placed so that all rows end at the same time slot, so that a decode
step writes one slice. The window, the slots that attention reads, is a contiguous block: batched
products on a CPU copy anything else at every call. It starts just wide enough and grows by a few slots
at a time; slots that are not filled yet, or lie before a row's first token, are masked. A row that is
admitted late is placed to end at the current slot; when the slots run out, everything moves left by
what no live row uses any more.

Shapes: L layers, n live rows, K key-value heads, R query heads per key-value head, E head width,
W slots of the window. Keys are stored transposed, (rows, K, E, W), which is the layout the score
product wants; values are (rows, K, W, E).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.policy.attention import AttentionContext
from strop.policy.language_model import ModelShape

_GROWTH_SLOTS = 32
"""Slots that a window grows by: wide enough that moving is rare, narrow enough to mask little."""


class KVCache:
    """Keys and values of all layers for up to `max_rows` sequences."""

    def __init__(
        self, shape: ModelShape, *, max_rows: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.num_slots = num_slots
        """Slots that the window may grow to."""
        self.num_rows = 0
        self.end = 0
        """Filled time slots; the next token of every row is written here."""
        self._shape = shape
        self._window = 0
        per_slot = max_rows * shape.num_kv_heads * shape.head_width
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times a stray NaN is NaN.
        stored = (shape.num_layers, per_slot * num_slots)
        self._stored_keys = torch.zeros(stored, dtype=dtype, device=device)
        self._stored_values = torch.zeros(stored, dtype=dtype, device=device)
        self._starts = torch.zeros(max_rows, dtype=torch.int64)
        self._bias = torch.full((max_rows, num_slots), float("-inf"), dtype=dtype, device=device)
        self._step_bias = self._bias
        self._set_window(min(_GROWTH_SLOTS, num_slots))

    @staticmethod
    def bytes_per_slot(shape: ModelShape, dtype: torch.dtype) -> int:
        """Bytes that one token of one row takes over all layers."""
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_width * dtype.itemsize

    def admit(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append one row that ends at the current slot. Call `make_room` first.

        Shapes: keys and values (L, K, length, E) after rotary embedding.
        """
        length = keys.shape[2]
        row, slots = self.num_rows, slice(self.end - length, self.end)
        self._keys[:, row, :, :, slots] = keys.transpose(2, 3)
        self._values[:, row, :, slots] = values
        self._starts[row] = self.end - length
        self._write_bias(row)
        self.num_rows += 1

    def make_room(self, longest_prompt: int) -> None:
        """Widen the window and move live rows so that a prompt of this length can end here."""
        if self.num_rows == 0:
            # From the start again: a batch must not see how wide the one before it had become.
            self.end = longest_prompt
            self._set_window(min(longest_prompt + _GROWTH_SLOTS, self.num_slots))
        elif self.end < longest_prompt:
            self._widen(longest_prompt)
            self._shift(longest_prompt - self.end)

    def reserve_slot(self) -> None:
        """Make sure that one more slot is free, moving live rows left or widening the window."""
        if self.end < self._window:
            return
        unused = int(self._starts[: self.num_rows].min())
        if unused >= _GROWTH_SLOTS or self._window == self.num_slots:
            assert unused > 0, "a row outgrew the slots that were planned for it"
            self._shift(-unused)
        else:
            self._widen(self._window + 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, moving kept rows from the back into the holes.

        `rows` lists old row numbers; the new number of rows[i] is i.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new = torch.tensor([pair[0] for pair in moved])
            old = torch.tensor([pair[1] for pair in moved])
            self._keys[:, new] = self._keys[:, old]
            self._values[:, new] = self._values[:, old]
            self._starts[new] = self._starts[old]
            self._bias[new] = self._bias[old]
        self.num_rows = len(rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write one token per row at the current slot and attend over the row so far.

        Shapes: query (H, n, E), key and value (K, n, E); returns (n, H, E).
        """
        rows, num_heads = self.num_rows, query.shape[0]
        batch, ratio = rows * self._shape.num_kv_heads, num_heads // self._shape.num_kv_heads
        keys, values = self._keys[layer, :rows], self._values[layer, :rows]
        keys[..., self.end] = key.transpose(0, 1)
        values[:, :, self.end] = value.transpose(0, 1)
        if layer == 0:
            # One mask serves all layers of a step.
            self._bias[:rows, self.end] = 0.0
            bias = self._bias[:rows, None, None, : self._window]
            self._step_bias = bias.expand(-1, self._shape.num_kv_heads, ratio, -1).reshape(batch, ratio, -1)
        grouped = query.transpose(0, 1).reshape(batch, ratio, self._shape.head_width)
        scores = torch.baddbmm(self._step_bias, grouped, keys.flatten(0, 1), alpha=scaling)
        # Sums in fp32 whatever the type; asking for fp32 weights would copy them there and back.
        weights = torch.softmax(scores, dim=-1)
        return torch.bmm(weights, values.flatten(0, 1)).view(rows, num_heads, self._shape.head_width)

    def advance(self) -> None:
        """Count the slot that a decode step has written."""
        self.end += 1

    def _set_window(self, num_slots: int) -> None:
        """Lay the stored bytes out as a window of this many slots. What they hold is not moved."""
        self._window = num_slots
        shape = self._shape
        rows = (shape.num_layers, self.max_rows, shape.num_kv_heads)
        num_used = self.max_rows * shape.num_kv_heads * shape.head_width * num_slots
        self._keys = self._stored_keys[:, :num_used].view(*rows, shape.head_width, num_slots)
        self._values = self._stored_values[:, :num_used].view(*rows, num_slots, shape.head_width)

    def _widen(self, num_slots: int) -> None:
        """Widen the window to at least this many slots, keeping what live rows hold."""
        if num_slots <= self._window:
            return
        rows = slice(0, self.num_rows)
        keys, values = self._keys[:, rows].clone(), self._values[:, rows].clone()
        old = slice(0, self._window)
        self._set_window(min(num_slots - 1 + _GROWTH_SLOTS, self.num_slots))
        self._keys[:, rows, :, :, old] = keys
        self._values[:, rows, :, old] = values

    def _shift(self, offset: int) -> None:
        """Move all live rows by `offset` slots."""
        low, high = int(self._starts[: self.num_rows].min()), self.end
        old, new = slice(low, high), slice(low + offset, high + offset)
        rows = slice(0, self.num_rows)
        self._keys[:, rows, :, :, new] = self._keys[:, rows, :, :, old].clone()
        self._values[:, rows, :, new] = self._values[:, rows, :, old].clone()
        self._starts[rows] += offset
        self.end += offset
        for row in range(self.num_rows):
            self._write_bias(row)

    def _write_bias(self, row: int) -> None:
        """Show the slots of a row's own tokens, and hide all others."""
        self._bias[row] = float("-inf")
        self._bias[row, int(self._starts[row]) : self.end] = 0.0


class PrefillRecorder:
    """Attention context that computes prompts and keeps their keys and values."""

    def __init__(self, inner: AttentionContext, num_layers: int) -> None:
        self._inner = inner
        self.keys: list[torch.Tensor] = [torch.empty(0)] * num_layers
        """Per layer (K, N, E)."""
        self.values: list[torch.Tensor] = [torch.empty(0)] * num_layers

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Record and compute one layer. Shapes: see `AttentionContext.attend`."""
        self.keys[layer], self.values[layer] = key, value
        return self._inner.attend(layer, query, key, value, scaling)
