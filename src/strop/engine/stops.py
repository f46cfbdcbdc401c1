"""Finding stop strings while a reply grows, and cutting them off its text."""

from __future__ import annotations

from collections.abc import Sequence

from strop.rollout import IntArray
from strop.tokenizer import Tokenizer


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # Every token of a byte-level vocabulary adds at least one byte, so a stop string lies
        # within the last tokens as many as it has bytes, plus a few for characters cut in half.
        self._window = max(len(string.encode()) for string in self._strings) + 4

    def is_completed(self, token_ids: IntArray) -> bool:
        """Whether the newest token completed a stop string."""
        tail = self._tokenizer.decode(token_ids[-self._window :])
        return any(string in tail for string in self._strings)

    def cut(self, text: str) -> str:
        """Return the text before its first stop string."""
        starts = [start for string in self._strings if (start := text.find(string)) >= 0]
        return text[: min(starts)] if starts else text
