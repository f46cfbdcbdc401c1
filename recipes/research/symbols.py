"""A character model: predict the next symbol of texts in an unknown language."""

from __future__ import annotations

import json

import numpy as np
from instance import Instance, draws, phases

NUM_SYMBOLS, NUM_TEXTS, TEXT_LENGTH = 8, 60, 200
NUM_TEST, CONTEXT = 500, 6
LETTERS = "abcdefgh"
ARTEFACT = "logprobs.json"
STATEMENT = (
    f"train.txt holds {NUM_TEXTS} texts of {TEXT_LENGTH} symbols, one a line; contexts.txt has"
    f" {NUM_TEST} pieces of {CONTEXT} symbols. Predict the symbol behind each piece: write logprobs.json,"
    f" a list with one list for each piece, in order, of {NUM_SYMBOLS} natural logarithms of"
    " probabilities, a first; they are normalised. The first version counts pairs. The score is the mean"
    " of the base-2 logarithms of the true symbols' probabilities."
)


def make(number: int) -> Instance:
    """Make an instance: a language is a Markov chain of second order."""
    table = np.exp(draws("symbols", number, "parameters").normal(0, 1.2, (NUM_SYMBOLS,) * 3))
    table /= table.sum(axis=2, keepdims=True)
    texts = _walk(draws("symbols", number, "train"), table, NUM_TEXTS, TEXT_LENGTH)
    walks = _walk(draws("symbols", number, "test"), table, NUM_TEST, CONTEXT + 1)
    truth, targets = table[walks[:, -3], walks[:, -2]], walks[:, -1]
    masks = phases("symbols", number, NUM_TEST)

    def score(text: str, phase: str) -> float:
        try:
            logs = np.asarray(json.loads(text), dtype=float)
        except (TypeError, OverflowError, RecursionError):
            raise ValueError("it must be a list of lists of numbers") from None
        if logs.shape != (NUM_TEST, NUM_SYMBOLS) or not (np.abs(logs) <= 1e6).all():
            raise ValueError(f"it must be {NUM_TEST} lists of {NUM_SYMBOLS} finite numbers")
        logs = logs - np.logaddexp.reduce(logs, axis=1, keepdims=True)
        return float(logs[np.arange(NUM_TEST), targets][masks[phase]].mean() / np.log(2))

    pairs = np.ones((NUM_SYMBOLS, NUM_SYMBOLS))
    np.add.at(pairs, (texts[:, :-1].ravel(), texts[:, 1:].ravel()), 1)
    pairs /= pairs.sum(axis=1, keepdims=True)
    first, best = to_json(np.log(pairs[walks[:, -2]])), to_json(np.log(truth))
    final, logs = truth[masks["final"]], np.log2(truth[masks["final"]])
    spread = (final * logs**2).sum(axis=1) - (final * logs).sum(axis=1) ** 2
    return Instance(
        files={
            "train.txt": _spell(texts),
            "contexts.txt": _spell(walks[:, :-1]),
            "logprobs.json": first,
        },
        score=score,
        best=best,
        first_score=score(first, "final"),
        best_score=score(best, "final"),
        # Five standard errors above what the chain's own probabilities are expected to reach.
        limit=float((final * logs).sum(axis=1).mean() + 5 * np.sqrt(spread.sum()) / len(final)),
    )


def to_json(logs: np.ndarray) -> str:
    """Return the file that is scored."""
    return json.dumps(logs.round(3).tolist())


def _walk(rng: np.random.Generator, table: np.ndarray, num_walks: int, length: int) -> np.ndarray:
    """Return texts of the chain, after 16 symbols that are dropped."""
    sums = table.cumsum(axis=2)
    texts = np.empty((num_walks, length + 16), dtype=int)
    texts[:, :2] = rng.integers(0, NUM_SYMBOLS, (num_walks, 2))
    for step in range(2, length + 16):
        passed = sums[texts[:, step - 2], texts[:, step - 1]] < rng.random((num_walks, 1))
        texts[:, step] = np.minimum(passed.sum(axis=1), NUM_SYMBOLS - 1)
    return texts[:, 16:]


def _spell(texts: np.ndarray) -> str:
    return "".join("".join(LETTERS[symbol] for symbol in row) + "\n" for row in texts)
