"""Split a reply into words, sentences and paragraphs, in linear time, and detect its language.

Sentences need no model or word list to download: they end at a terminator followed by white space or the
end, or at a blank line. Not here: the sentence and word splitters of other programs.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from strop.errors import ConfigError

_WORD = re.compile(r"\w+")
_CLOSING = r"[\"'”’»)\]}*_~]*+"
_TERMINATORS = re.compile(rf"[.!?…]++{_CLOSING}(?=\s|\Z)|[。！？।۔]++[”’」』）]*+")
_BLANK_LINE = re.compile(r"\n[^\S\n]*+\n\s*")
_TITLES = (
    r"(?i:mrs?|ms|dr|prof|st|mt|messrs|mme|gen|col|lt|sgt|capt|rev|hon|gov|sen|rep|vs|fig|eq|no|vol|pp|cf"
    r"|approx|e\.g|i\.e|viz|al|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)"
)
"""Abbreviations that never end a sentence."""
_ENDINGS = r"(?i:etc|jr|sr|inc|ltd|co|corp|bros|a\.m|p\.m|u\.s|u\.k|u\.n|ph\.d|b\.c|a\.d|d\.c|est|dept)"
"""Abbreviations that end a sentence only if a capital letter follows."""
_NO_END = re.compile(
    rf"(?<![^\s\"'“‘«(\[{{*_。！？])(?:{_TITLES}|[A-HJ-Z]|{_ENDINGS}(?=\.{_CLOSING}\s+[^\sA-ZÀ-ÖØ-Þ]))"
    rf"\.(?={_CLOSING}(?:\s|\Z))"
    rf"|(?:^[^\S\n]*+|(?<=[.!?…]\s)|(?<=[.!?…][\"'”’»)*]\s))\(?\d{{1,3}}\.(?={_CLOSING}\s)",
    re.MULTILINE,
)
"""An abbreviation, an initial other than I, or a list number, with its full stop."""
_KEPT = "\ue000"
"""Stands for a full stop that ends no sentence."""


def find_words(text: str) -> list[str]:
    """Return the maximal runs of letters, digits and underscores."""
    return _WORD.findall(text)


def bare_words(text: str) -> list[str]:
    """Return the words between white space, without punctuation at their edges; inner marks stay."""
    stripped = (strip_marks(token) for token in text.split())
    return [token for token in stripped if token]


def folded_words(text: str) -> list[str]:
    """Return the `bare_words` in small letters."""
    return [word.lower() for word in bare_words(text)]


def strip_marks(token: str) -> str:
    """Remove punctuation at both edges of a word, brackets included."""
    start, end = 0, len(token)
    while start < end and not token[start].isalnum():
        start += 1
    while end > start and not token[end - 1].isalnum():
        end -= 1
    return token[start:end]


def paragraphs(text: str) -> list[str]:
    """Return the parts between blank lines, without blank ones."""
    return [part.strip() for part in _BLANK_LINE.split(text) if part.strip()]


def parts_between(text: str, divider: re.Pattern[str]) -> list[str]:
    """Return the parts between dividers; blank ones at the start or end do not count."""
    parts = [part.strip() for part in divider.split(text)]
    if parts and not parts[0]:
        parts = parts[1:]
    if parts and not parts[-1]:
        parts = parts[:-1]
    return parts


def sentences(text: str) -> list[str]:
    """Return the sentences with their terminators.

    A terminator ends a sentence if white space or the end follows; a blank line always does. Titles,
    initials and list numbers do not. Marks without any letter or digit belong to the sentence before.
    """
    pieces: list[str] = []
    for part in paragraphs(_NO_END.sub(lambda match: match.group().replace(".", _KEPT), text)):
        start = 0
        for end in [*(match.end() for match in _TERMINATORS.finditer(part)), len(part)]:
            piece, start = part[start:end].strip().replace(_KEPT, "."), end
            if any(map(str.isalnum, piece)):
                pieces.append(piece)
            elif piece and pieces:
                pieces[-1] += f" {piece}"
    return pieces


# langdetect with a fixed seed detects the language: equal texts give equal answers. Tested with langdetect
# 1.0.9, whose own entry point draws from an unseeded generator (REW-5) and reads its profiles in the order of
# the directory; it is not used. The profiles are part of the package and are read on first use.


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the most probable language, or None if the text has no known letter.

    Chinese is 'zh-cn' or 'zh-tw'; an ambiguous text is 'unknown'. Only the first ten thousand characters
    count.
    Raises: ConfigError like `load_detector`.
    """
    detector = load_detector().create()
    from langdetect.lang_detect_exception import LangDetectException

    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


@functools.cache
def load_detector() -> Any:
    """Return what makes detectors, and knows the codes of languages: `get_lang_list`.

    Raises: ConfigError if the package langdetect is not installed.
    """
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    except ImportError as error:
        raise ConfigError(
            f"instructions may ask for a language, and the package langdetect is not installed ({error})",
            allowed="langdetect 1.0.9 or later, part of the extra 'tasks'",
            next_step="pip install 'strop[tasks]'",
        ) from error
    paths = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if path.is_file())
    factory = DetectorFactory()
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in paths])
    factory.set_seed(0)
    return factory
