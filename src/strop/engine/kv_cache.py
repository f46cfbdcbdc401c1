"""A preallocated KV cache whose live rows are dense and end at one common index.

Rows occupy 0..n-1 and prompts are placed so that all rows end at the same time slot. Row and time
ranges are then plain views that batched matmul reads without a copy, and a decode step writes one
slice. A row that is admitted late is placed to end at the current slot; when the slots run out,
everything moves left by what no live row uses any more.

Shapes: L layers, n live rows, K key-value heads, R query heads per key-value head, E head width,
T time slots. Keys are stored transposed, (rows, K, E, T), which is the layout the score product
wants; values are (rows, K, T, E).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.policy.attention import AttentionContext
from strop.policy.language_model import ModelShape


class KVCache:
    """Keys and values of all layers for up to `max_rows` sequences."""

    def __init__(
        self, shape: ModelShape, *, max_rows: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.num_slots = num_slots
        self.num_rows = 0
        self.end = 0
        """Filled time slots; the next token of every row is written here."""
        self._num_kv_heads = shape.num_kv_heads
        self._head_width = shape.head_width
        heads = (shape.num_layers, max_rows, shape.num_kv_heads)
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times a stray NaN is NaN.
        self._keys = torch.zeros(*heads, shape.head_width, num_slots, dtype=dtype, device=device)
        self._values = torch.zeros(*heads, num_slots, shape.head_width, dtype=dtype, device=device)
        self._starts = torch.zeros(max_rows, dtype=torch.int64)
        self._bias = torch.zeros(max_rows, 1, 1, num_slots, dtype=dtype, device=device)
        self._step_bias = self._bias

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
        """Move live rows so that a prompt of this length can end at the current slot."""
        if self.num_rows == 0:
            self.end = longest_prompt
        elif self.end < longest_prompt:
            self._shift(longest_prompt - self.end)

    def reserve_slot(self) -> None:
        """Make sure that one more slot is free, moving live rows left where needed."""
        if self.end < self.num_slots:
            return
        unused = int(self._starts[: self.num_rows].min())
        assert unused > 0, "a row outgrew the slots that were planned for it"
        self._shift(-unused)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, moving kept rows from the back into the holes.

        `rows` lists old row numbers; the new number of rows[i] is i.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new = torch.tensor([pair[0] for pair in moved])
            old = torch.tensor([pair[1] for pair in moved])
            low, high = int(self._starts[old].min()), self.end
            self._keys[:, new, :, :, low:high] = self._keys[:, old, :, :, low:high]
            self._values[:, new, :, low:high] = self._values[:, old, :, low:high]
            self._starts[new] = self._starts[old]
            self._bias[new] = self._bias[old]
        self.num_rows = len(rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write one token per row at the current slot and attend over the row so far.

        Shapes: query (H, n, E), key and value (K, n, E); returns (n, H, E).
        """
        rows, low, high = self.num_rows, int(self._starts[: self.num_rows].min()), self.end + 1
        self._keys[layer, :rows, :, :, self.end] = key.transpose(0, 1)
        self._values[layer, :rows, :, self.end] = value.transpose(0, 1)
        batch, ratio = rows * self._num_kv_heads, query.shape[0] // self._num_kv_heads
        grouped = query.transpose(0, 1).reshape(batch, ratio, self._head_width)
        keys = self._keys[layer, :rows].flatten(0, 1)[:, :, low:high]
        values = self._values[layer, :rows].flatten(0, 1)[:, low:high]
        if layer == 0:
            # One mask serves all layers of a step.
            bias = self._bias[:rows, :, :, low:high].expand(rows, self._num_kv_heads, ratio, high - low)
            self._step_bias = bias.reshape(batch, ratio, high - low)
        scores = torch.baddbmm(self._step_bias, grouped, keys, alpha=scaling)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(rows, query.shape[0], self._head_width)

    def advance(self) -> None:
        """Count the slot that a decode step has written."""
        self.end += 1

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
        """Hide the slots before a row's first token."""
        start = int(self._starts[row])
        self._bias[row, :, :, :start] = float("-inf")
        self._bias[row, :, :, start:] = 0.0


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
