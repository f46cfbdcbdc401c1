"""Find evaluation texts that are, or nearly are, training texts (contamination).

Two checks, both without a model and in time linear in the texts. *Equal*: the same words, numbers and signs
after case, white space and the punctuation of sentences are normalised. *Similar*: one training text holds
most of the pieces of eight words that a held-out text has, and all of its numbers.

Not found: paraphrases and translations.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

PIECE_WORDS = 8
"""Words of a piece; numbers and signs are words too."""
MIN_PIECES = 8
"""A text with fewer distinctive pieces is too short to compare: 15 words at least."""
SIMILAR_FRAC = 0.7
"""A held-out text is similar to a training text that holds at least this share of its pieces."""
MAX_SHARERS = 10
"""A piece in more training texts than this is shared wording, such as an instruction. With few training
texts, half of them are enough."""

_CHUNK = 4096
"""Training texts processed together."""
_FILTER_BITS = 22
_Learned = TypeVar("_Learned")

# A number keeps its point and colon: 3.5 is not 3 5. Signs stay, each alone: 3+4 is 3 + 4 and not 3 - 4.
_TOKEN = re.compile(r"\d+(?:[.:]\d+)+|\w+|[^\w\s]")
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"), "-")
_QUOTES = dict.fromkeys(map(ord, "'\"`\u00b4\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u00ab\u00bb"))
_SIGNS = _DASHES | _QUOTES
_SENTENCE_MARKS = frozenset(".,;:?\u2026\u3001\u3002")


def normal_text(text: str) -> str:
    """Normalise a text for comparison: words, numbers and signs in lower case, separated by single blanks.

    Applies NFKC and drops quotes and the punctuation of sentences. A text of nothing else is only stripped.
    """
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    tokens = _TOKEN.findall(folded.casefold().translate(_SIGNS))
    return " ".join(token for token in tokens if token not in _SENTENCE_MARKS) or text.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Held-out texts that occur in training: index of the held-out text -> index of a training text."""

    equal: Mapping[int, int]
    similar: Mapping[int, int]
    """Held-out texts that equal none -> the training text that has most of their pieces."""


def find_overlap(
    held_out: Sequence[str], learned: Sequence[_Learned], text_of: Callable[[_Learned], str]
) -> Overlap:
    """Compare held-out texts with training items; `text_of` returns the question of an item.

    Source: pieces of 8 words, of which 70 % count as contamination, from PaLM, arXiv:2204.02311, section 8;
        words without case and punctuation, and dropping pieces that many texts have, from GPT-3,
        arXiv:2005.14165, appendix C. That one text must hold them, with the same numbers, is our addition:
        problems of one form with other numbers are other problems.
    """
    questions = [normal_text(text) for text in held_out]
    places: dict[str, list[int]] = {}
    for index, text in enumerate(questions):
        places.setdefault(text, []).append(index)
    equal: dict[int, int] = {}
    pieces = _Pieces(questions)
    for start in range(0, len(learned), _CHUNK):
        texts = [normal_text(text_of(item)) for item in learned[start : start + _CHUNK]]
        for place, text in enumerate(texts, start):
            for index in places.get(text, ()):
                equal.setdefault(index, place)
        pieces.match(texts, start)
    similar: dict[int, int] = {}
    for index, place in pieces.rank_similar(len(learned)):
        if index in equal or index in similar:
            continue
        # The training text may be longer and have more numbers.
        if _numbers(questions[index]) <= _numbers(normal_text(text_of(learned[place]))):
            similar[index] = place
    return Overlap(equal=equal, similar=similar)


def _numbers(normal: str) -> Counter[str]:
    return Counter(word for word in normal.split() if any(char.isdigit() for char in word))


class _Pieces:
    """The pieces of held-out texts, and the training texts that hold them.

    Shapes: W = words of all texts, concatenated; K = distinct pieces of the held-out texts; M = matches: a
    piece of the held-out texts in a training text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        words = [text.split() for text in texts]
        self._ids = {word: index for index, word in enumerate(dict.fromkeys(itertools.chain(*words)), 1)}
        noise = np.random.default_rng(0)
        # Row 0 stands for every word that no held-out text has.
        self._values = noise.integers(0, 2**64, size=len(self._ids) + 1, dtype=np.uint64)
        evens = noise.integers(0, 2**63, size=PIECE_WORDS, dtype=np.uint64) * np.uint64(2)
        self._factors = evens + np.uint64(1)
        hashes, owners = self._hash(words)
        self._hashes_K, pieces = np.unique(hashes, return_inverse=True)
        own = np.unique(np.stack([owners, pieces.reshape(-1)]), axis=1)
        self._owners, self._own_pieces = own[0], own[1]
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
        self._filter[self._slots(self._hashes_K)] = True
        self._num_sharers_K = np.zeros(len(self._hashes_K), dtype=np.int64)
        self._matches: list[NDArray[np.int64]] = []

    def _hash(self, words: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return a hash of each piece, and the index of its text."""
        lengths = np.array([len(text) for text in words], dtype=np.int64)
        ids = map(self._ids.get, itertools.chain.from_iterable(words), itertools.repeat(0))
        values_W = self._values[np.fromiter(ids, dtype=np.int64, count=int(lengths.sum()))]
        num_starts = max(len(values_W) - PIECE_WORDS + 1, 0)
        hashes = np.zeros(num_starts, dtype=np.uint64)
        for offset, factor in enumerate(self._factors):
            hashes += values_W[offset : offset + num_starts] * factor
        # Equal words cancel out in the sum alone.
        hashes ^= hashes >> np.uint64(31)
        owners_W = np.repeat(np.arange(len(words)), lengths)
        is_whole = owners_W[:num_starts] == owners_W[PIECE_WORDS - 1 :][:num_starts]
        return hashes[is_whole], owners_W[:num_starts][is_whole]

    @staticmethod
    def _slots(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (hashes >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)

    def match(self, texts: Sequence[str], start: int) -> None:
        """Record which pieces occur in the next training texts; the first of these has index `start`."""
        if not len(self._hashes_K):
            return
        hashes, owners = self._hash([text.split() for text in texts])
        maybe = self._filter[self._slots(hashes)]
        hashes, owners = hashes[maybe], owners[maybe]
        pieces = np.searchsorted(self._hashes_K, hashes).clip(max=len(self._hashes_K) - 1)
        is_known = self._hashes_K[pieces] == hashes
        matches = np.unique(np.stack([pieces[is_known], owners[is_known] + start]), axis=1)
        # Pieces already known as shared wording are no longer recorded, which bounds the memory.
        matches = matches[:, self._num_sharers_K[matches[0]] <= MAX_SHARERS]
        self._num_sharers_K += np.bincount(matches[0], minlength=len(self._hashes_K))
        self._matches.append(matches)

    def rank_similar(self, num_learned: int) -> list[tuple[int, int]]:
        """Return (held-out text, training text) with enough pieces in common, most first."""
        if not self._matches:
            return []
        is_own_K = self._num_sharers_K <= min(MAX_SHARERS, max(1, num_learned // 2))
        pieces_M, places_M = np.concatenate(self._matches, axis=1)
        pieces_M, places_M = pieces_M[is_own_K[pieces_M]], places_M[is_own_K[pieces_M]]
        order = np.argsort(pieces_M, kind="stable")
        pieces_M, places_M = pieces_M[order], places_M[order]
        counts = is_own_K[self._own_pieces]
        owners, own_pieces = self._owners[counts], self._own_pieces[counts]
        num_pieces = np.bincount(owners, minlength=1)
        # Join each piece of each held-out text with every training text that has it.
        first = np.searchsorted(pieces_M, own_pieces, side="left")
        num_joined = np.searchsorted(pieces_M, own_pieces, side="right") - first
        rows = np.repeat(first - np.cumsum(num_joined) + num_joined, num_joined) + np.arange(num_joined.sum())
        pairs = np.stack([np.repeat(owners, num_joined), places_M[rows]])
        (texts, places), num_common = np.unique(pairs, axis=1, return_counts=True)
        enough = (num_pieces[texts] >= MIN_PIECES) & (num_common >= SIMILAR_FRAC * num_pieces[texts])
        best = np.argsort(-num_common[enough], kind="stable")
        return list(zip(texts[enough][best].tolist(), places[enough][best].tolist(), strict=True))
