"""Spread an army over fields against a commander with a book of allocations: `blotto`.

The commander draws one allocation of its book in each battle, so the value of an allocation is a mean over
the book, and trying all allocations finds the best.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np

from strop.environments.research.contract import (
    ArtefactRefused,
    Instance,
    Marks,
    Phase,
    read_json,
    seed_stream,
)

_ARTEFACT = "allocation.json"
_NUM_SEEN = 120
_CHUNK = 4096


def value_of(allocations: np.ndarray, book: np.ndarray) -> np.ndarray:
    """Return the mean of wins less losses of each allocation (N, F) against a book (M, F)."""
    values = [
        np.sign(np.sign(chunk[:, None, :] - book[None, :, :]).sum(axis=2)).mean(axis=1)
        for chunk in np.array_split(allocations, max(1, len(allocations) // _CHUNK))
    ]
    return np.concatenate(values)


@cache
def all_allocations(num_units: int, num_fields: int) -> np.ndarray:
    """Return every way to spread units over fields, (N, F)."""
    if num_fields == 1:
        return np.array([[num_units]], dtype=np.int16)
    blocks = []
    for first in range(num_units + 1):
        rest = all_allocations(num_units - first, num_fields - 1)
        blocks.append(np.column_stack([np.full(len(rest), first, dtype=np.int16), rest]))
    return np.concatenate(blocks)


def draw_scaled(rng: np.random.Generator, num_draws: int, num_units: int, num_fields: int) -> np.ndarray:
    """Draw allocations as uniform numbers scaled to the sum; one random field gets the rounding error."""
    raw = rng.integers(0, num_units + 1, (num_draws, num_fields))
    raw[raw.sum(axis=1) == 0] = 1
    return _fill(raw * num_units // raw.sum(axis=1, keepdims=True), num_units, rng)


def _draw_book(rng: np.random.Generator, num_units: int, num_fields: int) -> np.ndarray:
    """Draw a commander's book: few allocations, or many that favour some fields."""
    if rng.random() < 0.5:
        return draw_scaled(rng, int(rng.integers(4, 9)), num_units, num_fields)
    shares = rng.dirichlet(rng.uniform(1.0, 4.0, num_fields), size=200)
    return _fill(np.floor(shares * num_units).astype(int), num_units, rng)


def _fill(allocations: np.ndarray, num_units: int, rng: np.random.Generator) -> np.ndarray:
    """Add the rounding error of each allocation to one random field."""
    num, num_fields = allocations.shape
    left = num_units - allocations.sum(axis=1)
    allocations[np.arange(num), rng.integers(0, num_fields, num)] += left
    return allocations


def make_blotto(seed: int) -> Instance:
    """Make an instance of `blotto`. Its score is exact: judging draws nothing."""
    rng = seed_stream("blotto", seed, "parameters")
    num_fields = 4
    while True:
        num_units = int(rng.integers(30, 41))
        book = _draw_book(rng, num_units, num_fields)
        even = np.full(num_fields, num_units // num_fields)
        even[0] += num_units - even.sum()
        baseline = float(value_of(even[None], book)[0])
        everything = all_allocations(num_units, num_fields)
        values = value_of(everything, book)
        if -1 < baseline < values.max() - 0.05:
            break
    best = everything[values.argmax()]
    seen = book[seed_stream("blotto", seed, "record").integers(0, len(book), _NUM_SEEN)]

    def score(artefact: bytes, phase: Phase) -> float:
        return float(value_of(_read(artefact, num_units, num_fields)[None], book)[0])

    return Instance(
        task="blotto",
        statement=f"Two commanders spread {num_units} units each over {num_fields} fields, at the same"
        " time. A field goes to whoever has more units there, and the battle to whoever has more fields."
        f" past.json holds the other commander's last {_NUM_SEEN} allocations; it goes on as before,"
        f" whatever I do. Write the allocation that I use in every battle to {_ARTEFACT}: a list of"
        f" {num_fields} whole numbers whose sum is {num_units}. The score is the expected number of wins"
        " less losses per battle.",
        files={
            _ARTEFACT: json.dumps(even.tolist()).encode(),
            "past.json": json.dumps(seen.tolist()).encode(),
        },
        artefact=_ARTEFACT,
        marks=Marks(floor=-1.0, baseline=baseline, ceiling=float(values.max()), ceiling_kind="exact"),
        oracle=json.dumps(best.tolist()).encode(),
        cheats={
            "more units than there are": json.dumps([num_units] * num_fields).encode(),
            "negative units": json.dumps([2 * num_units, -num_units, 0, 0]).encode(),
            "halves": json.dumps([num_units / 2 + 0.5, num_units / 2 - 0.5, 0.0, 0.0]).encode(),
            "huge": b"[1e999, 0, 0, 0]",
            "nested": b"[" * 5000,
            "true": b"[true, true, true, true]",
        },
        score=score,
    )


def _read(artefact: bytes, num_units: int, num_fields: int) -> np.ndarray:
    units: Any = read_json(artefact)
    if not isinstance(units, list) or len(units) != num_fields:
        raise ArtefactRefused(f"it must be a list of {num_fields} whole numbers")
    if not all(type(number) is int and 0 <= number <= num_units for number in units):
        raise ArtefactRefused(f"each number must be whole, from 0 to {num_units}")
    if sum(units) != num_units:
        raise ArtefactRefused(f"the sum is {sum(units)}; it must be {num_units}")
    return np.array(units)
