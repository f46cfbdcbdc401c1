"""Find evaluation texts that are, or nearly are, training texts (contamination).

Two checks, both without a model and in time linear in the texts. *Equal*: the same words, numbers and signs
after case, white space and the punctuation of sentences are normalised. *Similar*: one training text holds
most of the pieces of eight words that a held-out text has, and all of its numbers.

Not found: paraphrases and translations.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

PIECE_WORDS = 8
"""Words of a piece; numbers and signs are words too."""
MIN_PIECES = 8
"""A text with fewer distinctive pieces is too short to compare: 15 words at least."""
SIMILAR_FRAC = 0.7
"""A held-out text is similar to a training text that holds at least this share of its pieces."""
MAX_SHARERS = 10
"""A piece in more training texts than this is shared wording, such as an instruction. With few training
texts, half of them are enough."""

_Piece = tuple[str, ...]
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
    indices: dict[str, list[int]] = {}
    for index, text in enumerate(questions):
        indices.setdefault(text, []).append(index)
    pieces = [_pieces_of(text) for text in questions]
    holders: dict[_Piece, list[int]] = {piece: [] for own in pieces for piece in own}
    equal: dict[int, int] = {}
    for place, item in enumerate(learned):
        text = normal_text(text_of(item))
        for index in indices.get(text, ()):
            equal.setdefault(index, place)
        for piece in _pieces_of(text):
            found = holders.get(piece)
            if found is not None and len(found) <= MAX_SHARERS:
                found.append(place)
    most = min(MAX_SHARERS, max(1, len(learned) // 2))
    similar: dict[int, int] = {}
    for index, own in enumerate(pieces):
        distinctive = [holders[piece] for piece in own if len(holders[piece]) <= most]
        if index in equal or len(distinctive) < MIN_PIECES:
            continue
        counts = Counter(place for found in distinctive for place in found)
        for place, number in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
            if number < SIMILAR_FRAC * len(distinctive):
                break
            # The training text may be longer and have more numbers.
            if _numbers(questions[index]) <= _numbers(normal_text(text_of(learned[place]))):
                similar[index] = place
                break
    return Overlap(equal=equal, similar=similar)


def _pieces_of(normal: str) -> set[_Piece]:
    words = normal.split()
    return set(zip(*(words[start:] for start in range(PIECE_WORDS)), strict=False))


def _numbers(normal: str) -> Counter[str]:
    return Counter(word for word in normal.split() if any(char.isdigit() for char in word))
