"""Predict the next symbol of a Markov chain: `charlm`. The best score is the chain's entropy."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from strop.environments.research.contract import (
    ArtefactRefused,
    Instance,
    Marks,
    Phase,
    read_json,
    seed_stream,
    split_draws,
)

_ARTEFACT = "logprobs.json"
_NUM_CHARS, _NUM_TEST, _CONTEXT = 20_000, 2500, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A second-order Markov chain; the defaults are the reference instance's. K = symbols."""

    num_symbols: int = 16
    near: float = 1.5
    far: float = 2.5
    multipliers: tuple[int, int, int] = (3, 5, 7)
    """Multipliers of the symbol two back, the previous symbol, and the next."""
    phase: float = 1.0

    def table(self) -> np.ndarray:
        """Return the probabilities of the next symbol, (K, K, K), by the symbol two back and the previous."""
        turn = 2 * np.pi / self.num_symbols
        first, second, third = self.multipliers
        a, b, c = np.ogrid[: self.num_symbols, : self.num_symbols, : self.num_symbols]
        energy = self.near * np.cos(turn * (second * b + third * c)) + self.far * np.cos(
            turn * (first * a + second * b + third * c) + self.phase
        )
        weights = np.exp(energy)
        probabilities: np.ndarray = weights / weights.sum(axis=2, keepdims=True)
        return probabilities


def _walk(rng: np.random.Generator, table: np.ndarray, num_walks: int, num_steps: int) -> np.ndarray:
    """Return texts, (num_walks, num_steps), after a burn-in of 16 symbols."""
    num_symbols = len(table)
    sums = table.cumsum(axis=2)
    texts = np.empty((num_walks, num_steps + 16), dtype=int)
    texts[:, :2] = rng.integers(0, num_symbols, (num_walks, 2))
    for step in range(2, num_steps + 16):
        drawn = rng.random((num_walks, 1))
        reached = sums[texts[:, step - 2], texts[:, step - 1]]
        texts[:, step] = np.minimum((reached < drawn).sum(axis=1), num_symbols - 1)
    return texts[:, 16:]


def make_charlm(seed: int) -> Instance:
    """Make an instance of `charlm`: bits per symbol, lower is better."""
    rng = seed_stream("charlm", seed, "parameters")
    num_symbols = int(rng.choice([12, 16, 24]))
    units = [unit for unit in range(1, num_symbols) if np.gcd(unit, num_symbols) == 1]
    multipliers = tuple(int(unit) for unit in rng.choice(units, size=3, replace=len(units) < 3))
    chain = Chain(
        num_symbols=num_symbols,
        near=rng.uniform(1.2, 1.8),
        far=rng.uniform(2.2, 2.8),
        multipliers=(multipliers[0], multipliers[1], multipliers[2]),
        phase=rng.uniform(0, 2 * np.pi),
    )
    table = chain.table()
    text = _walk(seed_stream("charlm", seed, "train"), table, 100, _NUM_CHARS // 100)
    walks = _walk(seed_stream("charlm", seed, "test"), table, _NUM_TEST, _CONTEXT + 1)
    truth, targets = table[walks[:, -3], walks[:, -2]], walks[:, -1]
    masks = split_draws("charlm", seed, _NUM_TEST)
    sealed = truth[masks[Phase.SEALED]]
    entropy_N = -(sealed * np.log2(sealed)).sum(axis=1)
    variance_N = (sealed * np.log2(sealed) ** 2).sum(axis=1) - entropy_N**2
    bigram = _fit_bigram(text, num_symbols)[walks[:, -2]]

    def bits(logs: np.ndarray, phase: Phase) -> float:
        peak = logs.max(axis=1, keepdims=True)
        normal = logs - peak - np.log(np.exp(logs - peak).sum(axis=1, keepdims=True))
        lost = -normal[np.arange(_NUM_TEST), targets] / np.log(2)
        return float(lost[masks[phase]].mean())

    letters = "abcdefghijklmnopqrstuvwxyz"
    uniform = np.zeros((_NUM_TEST, num_symbols))
    return Instance(
        task="charlm",
        statement=f"train.txt holds 100 texts of {_NUM_CHARS // 100} symbols, one a line, over the first"
        f" {num_symbols} letters. contexts.txt holds {_NUM_TEST} pieces of {_CONTEXT} symbols. Predict the"
        f" symbol behind each: write {_ARTEFACT}, a list with one list for each piece, in order, of"
        f" {num_symbols} natural logarithms of probabilities, a first. They are normalised before they"
        " count. The score is the mean of bits per symbol, lower is better; the starter counts pairs."
        " evaluate() scores a hidden fifth of the pieces, and the result counts the others.",
        files={
            "train.txt": _spell(text, letters),
            "contexts.txt": _spell(walks[:, :-1], letters),
            _ARTEFACT: _to_json(np.log(bigram)),
        },
        artefact=_ARTEFACT,
        marks=Marks(
            floor=float(np.log2(num_symbols)),
            baseline=bits(np.log(bigram).round(3), Phase.SEALED),
            ceiling=float(entropy_N.mean()),
            ceiling_kind="exact",
            standard_error=float(np.sqrt(variance_N.sum()) / len(sealed)),
            is_higher_better=False,
        ),
        oracle=_to_json(np.log(truth)),
        cheats={
            "constant": _to_json(uniform),
            "each as probable as can be": _to_json(uniform + 50),
            "too few": _to_json(uniform[:-1]),
            "infinite": _to_json(uniform).replace(b"0.0", b"-Infinity"),
            "huge": _to_json(uniform).replace(b"0.0", b"1e308", 1),
        },
        leaked=_to_json(np.where(np.arange(num_symbols) == targets[:, None], 0.0, -9.0)),
        score=lambda artefact, phase: bits(_read(artefact, num_symbols), phase),
    )


def _fit_bigram(text: np.ndarray, num_symbols: int) -> np.ndarray:
    counts = np.ones((num_symbols, num_symbols))
    np.add.at(counts, (text[:, :-1].ravel(), text[:, 1:].ravel()), 1)
    probabilities: np.ndarray = counts / counts.sum(axis=1, keepdims=True)
    return probabilities


def _spell(symbols: np.ndarray, letters: str) -> bytes:
    return "".join("".join(letters[symbol] for symbol in row) + "\n" for row in symbols.tolist()).encode()


def _to_json(logs: np.ndarray) -> bytes:
    return json.dumps(logs.round(3).tolist()).encode()


def _read(artefact: bytes, num_symbols: int) -> np.ndarray:
    rows = read_json(artefact)
    if not isinstance(rows, list) or len(rows) != _NUM_TEST:
        raise ArtefactRefused(f"it must be a list of {_NUM_TEST} lists")
    if not all(isinstance(row, list) and len(row) == num_symbols for row in rows):
        raise ArtefactRefused(f"each list must have {num_symbols} numbers")
    try:
        logs = np.array(rows, dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise ArtefactRefused("each entry must be a number") from None
    if logs.ndim != 2 or not (np.abs(logs) <= 1e6).all():
        raise ArtefactRefused("each entry must be a number between -1e6 and 1e6")
    return logs
