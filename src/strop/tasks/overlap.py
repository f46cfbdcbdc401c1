"""Whether texts that a model is measured on are, or nearly are, texts that it learns from.

Two looks, both without a model and in time linear in the texts. *Equal*: the same words, numbers and signs
once case, white space and the punctuation of sentences are evened out. *Similar*: one training text holds
most of the pieces of eight words that a held-out text has, and all of its numbers.

Not seen: a problem that is put in other words, and another language.
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
"""Pieces that a text must have of its own, or its words say too little: 15 words at least."""
SIMILAR_FRAC = 0.7
"""Share of a held-out text's pieces that stand in one training text, from which on the two are similar."""
MAX_SHARERS = 10
"""A piece that more training texts have is wording that they share, such as an instruction. Of few texts
half of them are enough."""

_CHUNK = 4096
"""Training texts looked at together."""
_FILTER_BITS = 22
_Learned = TypeVar("_Learned")

# A number keeps its point and colon: 3.5 is not 3 5. Signs stay, each alone: 3+4 is 3 + 4 and not 3 - 4.
_TOKEN = re.compile(r"\d+(?:[.:]\d+)+|\w+|[^\w\s]")
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"), "-")
_QUOTES = dict.fromkeys(map(ord, "'\"`\u00b4\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u00ab\u00bb"))
_SIGNS = _DASHES | _QUOTES
_SENTENCE_MARKS = frozenset(".,;:?\u2026\u3001\u3002")


def normal_text(text: str) -> str:
    """Return a text as it is compared: words, numbers and signs in lower case, with single blanks between.

    Forms of Unicode are made one (NFKC), quotes and the punctuation of sentences left out. A text of nothing
    else stays as it is.
    """
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    tokens = _TOKEN.findall(folded.casefold().translate(_SIGNS))
    return " ".join(token for token in tokens if token not in _SENTENCE_MARKS) or text.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What held-out texts have in common with training texts; by index of the one, an index of the other."""

    equal: Mapping[int, int]
    similar: Mapping[int, int]
    """Of those that are equal to none; the one that has most of it."""


def find_overlap(
    held_out: Sequence[str], learned: Sequence[_Learned], text_of: Callable[[_Learned], str]
) -> Overlap:
    """Compare held-out texts with what is learned from; `text_of` says what each of these asks.

    Source: pieces of 8 words, of which 70 % count as contamination, from PaLM, arXiv:2204.02311, section 8;
        words without case and punctuation, and pieces that many texts have left out, from GPT-3,
        arXiv:2005.14165, appendix C. That they stand in one text, with the same numbers, is ours: problems
        of one form with other numbers are other problems.
    """
    asked = [normal_text(text) for text in held_out]
    places: dict[str, list[int]] = {}
    for index, text in enumerate(asked):
        places.setdefault(text, []).append(index)
    equal: dict[int, int] = {}
    pieces = _Pieces(asked)
    for start in range(0, len(learned), _CHUNK):
        texts = [normal_text(text_of(one)) for one in learned[start : start + _CHUNK]]
        for place, text in enumerate(texts, start):
            for index in places.get(text, ()):
                equal.setdefault(index, place)
        pieces.look(texts, start)
    similar: dict[int, int] = {}
    for index, place in pieces.rank_similar(len(learned)):
        if index not in equal and index not in similar:
            numbers = _numbers(asked[index])
            # A text that is longer may have more of them.
            if numbers <= _numbers(normal_text(text_of(learned[place]))):
                similar[index] = place
    return Overlap(equal=equal, similar=similar)


def _numbers(normal: str) -> Counter[str]:
    return Counter(word for word in normal.split() if any(char.isdigit() for char in word))


class _Pieces:
    """The pieces of some texts, and which other texts have them.

    Shapes: W = words of all texts, one text behind the other; K = different pieces of the held-out texts;
    M = pieces of held-out texts found in training texts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        words = [text.split() for text in texts]
        self._ids = {word: index for index, word in enumerate(dict.fromkeys(itertools.chain(*words)), 1)}
        noise = np.random.default_rng(0)
        # Row 0 is every word that no held-out text has.
        self._values = noise.integers(0, 2**64, size=len(self._ids) + 1, dtype=np.uint64)
        self._factors = noise.integers(0, 2**63, size=PIECE_WORDS, dtype=np.uint64) * np.uint64(
            2
        ) + np.uint64(1)
        hashes, owners = self._hash(words)
        self._hashes_K, pieces = np.unique(hashes, return_inverse=True)
        own = np.unique(np.stack([owners, pieces.reshape(-1)]), axis=1)
        self._owners, self._own_pieces = own[0], own[1]
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
        self._filter[self._slots(self._hashes_K)] = True
        self._num_sharers_K = np.zeros(len(self._hashes_K), dtype=np.int64)
        self._found: list[NDArray[np.int64]] = []

    def _hash(self, words: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return a hash of each piece, and the index of the text that it stands in."""
        lengths = np.array([len(one) for one in words], dtype=np.int64)
        known = map(self._ids.get, itertools.chain.from_iterable(words), itertools.repeat(0))
        values_W = self._values[np.fromiter(known, dtype=np.int64, count=int(lengths.sum()))]
        num_starts = max(len(values_W) - PIECE_WORDS + 1, 0)
        hashes = np.zeros(num_starts, dtype=np.uint64)
        for offset, factor in enumerate(self._factors):
            hashes += values_W[offset : offset + num_starts] * factor
        # The sum alone would keep what equal words cancel out.
        hashes ^= hashes >> np.uint64(31)
        owners_W = np.repeat(np.arange(len(words)), lengths)
        is_whole = owners_W[:num_starts] == owners_W[PIECE_WORDS - 1 :][:num_starts]
        return hashes[is_whole], owners_W[:num_starts][is_whole]

    @staticmethod
    def _slots(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (hashes >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)

    def look(self, texts: Sequence[str], start: int) -> None:
        """Note which of the pieces stand in the next training texts; the first of them has index `start`."""
        if not len(self._hashes_K):
            return
        hashes, owners = self._hash([text.split() for text in texts])
        maybe = self._filter[self._slots(hashes)]
        hashes, owners = hashes[maybe], owners[maybe]
        pieces = np.searchsorted(self._hashes_K, hashes).clip(max=len(self._hashes_K) - 1)
        is_known = self._hashes_K[pieces] == hashes
        found = np.unique(np.stack([pieces[is_known], owners[is_known] + start]), axis=1)
        # What is wording already is counted no more, which bounds the memory.
        found = found[:, self._num_sharers_K[found[0]] <= MAX_SHARERS]
        self._num_sharers_K += np.bincount(found[0], minlength=len(self._hashes_K))
        self._found.append(found)

    def rank_similar(self, num_learned: int) -> list[tuple[int, int]]:
        """Return (held-out text, training text) with enough pieces in common, most first."""
        if not self._found:
            return []
        is_own_K = self._num_sharers_K <= min(MAX_SHARERS, max(1, num_learned // 2))
        pieces_M, places_M = np.concatenate(self._found, axis=1)
        pieces_M, places_M = pieces_M[is_own_K[pieces_M]], places_M[is_own_K[pieces_M]]
        order = np.argsort(pieces_M, kind="stable")
        pieces_M, places_M = pieces_M[order], places_M[order]
        counts = is_own_K[self._own_pieces]
        owners, own_pieces = self._owners[counts], self._own_pieces[counts]
        num_pieces = np.bincount(owners, minlength=1)
        # Each piece of each held-out text meets every training text that has it.
        first = np.searchsorted(pieces_M, own_pieces, side="left")
        num_met = np.searchsorted(pieces_M, own_pieces, side="right") - first
        meetings = np.repeat(first - np.cumsum(num_met) + num_met, num_met) + np.arange(num_met.sum())
        pairs = np.stack([np.repeat(owners, num_met), places_M[meetings]])
        (texts, places), num_common = np.unique(pairs, axis=1, return_counts=True)
        enough = (num_pieces[texts] >= MIN_PIECES) & (num_common >= SIMILAR_FRAC * num_pieces[texts])
        best = np.argsort(-num_common[enough], kind="stable")
        return list(zip(texts[enough][best].tolist(), places[enough][best].tolist(), strict=True))
