"""The cache against attention computed plainly from lists, through every move that it makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strop.policy.attention import PLAIN, ScoreRule
from strop.policy.kv_cache import KVCache
from strop.policy.language_model import ModelShape

WIDTH = 16
SCALING = WIDTH**-0.5


def make_shape(
    *, num_heads: int, num_kv_heads: int, num_layers: int = 2, value_width: int = WIDTH, is_plain: bool = True
) -> ModelShape:
    return ModelShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=WIDTH,
        value_width=value_width,
        has_plain_scores=is_plain,
        hidden_width=WIDTH * num_heads,
        vocab_size=10,
        max_positions=100,
    )


class PlainRows:
    """Rows of keys and values in lists. Shapes: per row and layer (K, length, E)."""

    def __init__(self, shape: ModelShape, seed: int, rule: ScoreRule = PLAIN) -> None:
        self.shape = shape
        self.rule = rule
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def new_prompt(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (self.shape.num_layers, self.shape.num_kv_heads, length)
        prompt = self.random(*sizes, WIDTH), self.random(*sizes, self.shape.value_width)
        self.rows.append(prompt)
        return prompt

    def attend(self, layer: int, row: int, query_H_E: torch.Tensor) -> torch.Tensor:
        """Return plain softmax attention of one query. Shapes: (H, F)."""
        begin = 0 if self.rule.window is None else -self.rule.window
        ratio = self.shape.num_heads // self.shape.num_kv_heads
        keys, values = (one[layer][:, begin:].repeat_interleave(ratio, 0) for one in self.rows[row])
        scores = (keys @ query_H_E[:, :, None])[:, :, 0] * SCALING
        if self.rule.cap is not None:
            scores = self.rule.cap * torch.tanh(scores / self.rule.cap)
        if self.rule.sinks is not None:
            scores = torch.cat([scores, self.rule.sinks[:, None]], dim=1)
        weights = torch.softmax(scores, dim=1)[:, : keys.shape[1]]
        return (weights[:, None] @ values)[:, 0]


def decode_step(cache: KVCache, plain: PlainRows) -> None:
    """Write one random token to every row and compare all layers."""
    shape, num_rows = plain.shape, len(plain.rows)
    keys = plain.random(shape.num_layers, shape.num_kv_heads, num_rows, WIDTH)
    values = plain.random(shape.num_layers, shape.num_kv_heads, num_rows, shape.value_width)
    plain.rows = [
        (
            torch.cat([row[0], keys[:, :, index : index + 1]], dim=2),
            torch.cat([row[1], values[:, :, index : index + 1]], dim=2),
        )
        for index, row in enumerate(plain.rows)
    ]
    for layer in range(shape.num_layers):
        query = plain.random(shape.num_heads, num_rows, WIDTH)
        actual = cache.attend(layer, query, keys[layer], values[layer], SCALING, plain.rule)
        expected = [plain.attend(layer, row, query[:, row]) for row in range(num_rows)]
        torch.testing.assert_close(actual, torch.stack(expected), atol=1e-5, rtol=1e-5)
    cache.advance()


def admit(cache: KVCache, plain: PlainRows, lengths: list[int], num_rows: int = 1) -> None:
    """Admit prompts, each for so many rows."""
    for length in lengths:
        prompt = plain.new_prompt(length)
        plain.rows += [prompt] * (num_rows - 1)
        cache.admit(*prompt, num_rows)


def make_cache(shape: ModelShape, *, max_num_seqs: int, num_slots: int, may_use_kernels: bool) -> KVCache:
    return KVCache(
        shape,
        max_num_seqs=max_num_seqs,
        num_slots=num_slots,
        dtype=torch.float32,
        device=torch.device("cpu"),
        may_use_kernels=may_use_kernels,
    )


@pytest.mark.parametrize("may_use_kernels", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (4, 1), (5, 1), (6, 2)])
def test_random_lives_of_rows_equal_plain_attention(
    num_heads: int, num_kv_heads: int, may_use_kernels: bool
) -> None:
    """Rows come late, end early and are replaced; up to 40 slots cross the borders of tiles."""
    shape = make_shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    live_randomly(shape, PLAIN, may_use_kernels=may_use_kernels)


@pytest.mark.parametrize("may_use_kernels", [True, False])
@pytest.mark.parametrize("window", [1, 3, 16, 17, 30, 40])
def test_a_window_hides_what_lies_before_it(window: int, may_use_kernels: bool) -> None:
    shape = make_shape(num_heads=4, num_kv_heads=2)
    live_randomly(shape, ScoreRule(window=window), may_use_kernels=may_use_kernels)


@pytest.mark.parametrize("value_width", [WIDTH, 5])
@pytest.mark.parametrize(
    ("window", "cap", "has_sinks"), [(None, 0.7, False), (None, None, True), (5, 0.7, True)]
)
def test_caps_sinks_and_narrow_values(
    window: int | None, cap: float | None, has_sinks: bool, value_width: int
) -> None:
    shape = make_shape(num_heads=4, num_kv_heads=2, value_width=value_width, is_plain=False)
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0]) if has_sinks else None
    live_randomly(shape, ScoreRule(window=window, cap=cap, sinks=sinks), may_use_kernels=True)


def live_randomly(shape: ModelShape, rule: ScoreRule, *, may_use_kernels: bool) -> None:
    for seed in range(2):
        choose = np.random.default_rng(seed)
        plain = PlainRows(shape, seed, rule)
        cache = make_cache(shape, max_num_seqs=5, num_slots=40, may_use_kernels=may_use_kernels)
        ends_at: list[int] = []
        for _ in range(60):
            free = cache.max_num_seqs - cache.num_rows
            if free and (cache.num_rows == 0 or choose.random() < 0.4):
                length, num_rows = int(choose.integers(1, 34)), int(choose.integers(1, free + 1))
                admit(cache, plain, [length], num_rows)
                ends_at += [int(choose.integers(length + 1, 41)) for _ in range(num_rows)]
            decode_step(cache, plain)
            live = [row for row, kv in enumerate(plain.rows) if kv[0].shape[2] < ends_at[row]]
            if len(live) < len(plain.rows):
                kept = fill(len(plain.rows), live)
                cache.keep(kept)
                plain.rows = [plain.rows[row] for row in kept]
                ends_at = [ends_at[row] for row in kept]


def fill(num_rows: int, live: list[int]) -> list[int]:
    """Move rows from the back into the holes, as the decoder does; written here once more."""
    kept = list(range(len(live)))
    back = [row for row in live if row >= len(live)]
    for hole in (row for row in range(num_rows) if row not in live and row < len(live)):
        kept[hole] = back.pop(0)
    return kept


@pytest.mark.parametrize("may_use_kernels", [True, False])
def test_what_an_earlier_batch_left_is_not_seen(may_use_kernels: bool) -> None:
    """A cache is used again for the next batch; the slots behind a row still hold the last one's."""
    shape = make_shape(num_heads=2, num_kv_heads=1, num_layers=1)
    cache = make_cache(shape, max_num_seqs=2, num_slots=16, may_use_kernels=may_use_kernels)
    first = PlainRows(shape, 0)
    admit(cache, first, [12, 3])
    decode_step(cache, first)
    cache.keep([])
    second = PlainRows(shape, 1)
    admit(cache, second, [2, 9])
    for _ in range(5):
        decode_step(cache, second)


def test_bytes_per_slot_by_hand() -> None:
    # Keys and values (2), 2 layers, 2 heads, width 16, 2 bytes: 256.
    shape = make_shape(num_heads=4, num_kv_heads=2)
    assert KVCache.bytes_per_slot(shape, torch.bfloat16) == 256
    # Values of 4: keys are 4/5 of the 20 that a head stores, 160.
    narrow = make_shape(num_heads=4, num_kv_heads=2, value_width=4)
    assert KVCache.bytes_per_slot(narrow, torch.bfloat16) == 160
