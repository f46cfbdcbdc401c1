"""Split a reply into words, sentences and paragraphs, in linear time, and detect its language.

Sentences need no model or word list to download: they end at a terminator followed by white space or the
end, or at a blank line. Not here: the sentence and word splitters of other programs.
"""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strop.errors import ConfigError

_WORD = re.compile(r"\w+")
_TERMINATORS = re.compile(r"[.!?…]++[\"'”’»)\]}*_~]*+(?=\s|\Z)|[。！？।۔]++[”’」』）]*+")
_BLANK_LINE = re.compile(r"\n[^\S\n]*+\n\s*")
_LIST_NUMBER = re.compile(r"(?:\A|\n)\s*\(?\d{1,3}\Z")
_TITLES = re.compile(
    r"mrs?|ms|dr|prof|st|mt|messrs|mme|gen|col|lt|sgt|capt|rev|hon|gov|sen|rep|vs|fig|eq|no|vol|pp|cf|approx"
    r"|e\.g|i\.e|viz|al|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
)
"""Abbreviations that never end a sentence."""
_ENDINGS = re.compile(
    r"etc|jr|sr|inc|ltd|co|corp|bros|a\.m|p\.m|u\.s|u\.k|u\.n|ph\.d|b\.c|a\.d|d\.c|est|dept"
)
"""Abbreviations that end a sentence only if a capital letter follows."""


def find_words(text: str) -> list[str]:
    """Return the maximal runs of letters, digits and underscores."""
    return _WORD.findall(text)


def bare_words(text: str) -> list[str]:
    """Return the words between white space, without punctuation at their edges; inner marks stay."""
    stripped = (strip_marks(token) for token in text.split())
    return [token for token in stripped if token]


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
    for part in paragraphs(text):
        start = 0
        for match in _TERMINATORS.finditer(part):
            if match.group().startswith(".") and _is_abbreviation(part, start, match):
                continue
            _append(pieces, part[start : match.end()])
            start = match.end()
        _append(pieces, part[start:])
    return pieces


def _append(pieces: list[str], piece: str) -> None:
    piece = piece.strip()
    if any(character.isalnum() for character in piece):
        pieces.append(piece)
    elif piece and pieces:
        pieces[-1] += f" {piece}"


def _is_abbreviation(part: str, start: int, match: re.Match[str]) -> bool:
    """Whether a full stop belongs to an abbreviation, an initial or a list number."""
    if len(match.group().rstrip("\"'”’»)]}*_~")) > 1:  # an ellipsis ends a sentence like a full stop
        return False
    before = part[max(start, match.start() - 40) : match.start()]
    token = before.split()[-1] if before.split() and not before[-1:].isspace() else ""
    word = token.lstrip("\"'“‘«([{*_").lower()
    if _TITLES.fullmatch(word) or (
        len(word) == 1 and word.isalpha() and token[-1:].isupper() and word != "i"
    ):
        return True
    if _LIST_NUMBER.search(before) and before.strip() == part[start : match.start()].strip():
        return True
    following = part[match.end() : match.end() + 40].lstrip()
    return _ENDINGS.fullmatch(word) is not None and bool(following) and not following[0].isupper()


# langdetect with a fixed seed detects the language: equal texts give equal answers. Tested with langdetect
# 1.0.9, whose own entry point draws from an unseeded generator (REW-5) and reads its profiles in the order of
# the directory; it is not used. The profiles are part of the package and are read on first use.

_SEED = 0


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the most probable language, or None if the text has no feature.

    Chinese is 'zh-cn' or 'zh-tw'; an ambiguous text is 'unknown'. Only the first ten thousand characters
    count.
    Raises: ConfigError if the package is not installed.
    """
    factory = _load_factory()
    from langdetect.lang_detect_exception import LangDetectException

    detector = factory.create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        # Raised for a text without known letters.
        return None


@functools.cache
def known_languages() -> frozenset[str]:
    """Return the codes of all languages that can be detected.

    Raises: ConfigError if the package is not installed.
    """
    return frozenset(_load_factory().get_lang_list())


@functools.cache
def _load_factory() -> Any:
    require_language_detection()
    import langdetect
    from langdetect.detector_factory import DetectorFactory

    folder = Path(langdetect.__file__).parent / "profiles"
    profiles = [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()) if path.is_file()]
    factory = DetectorFactory()
    factory.load_json_profile(profiles)
    factory.set_seed(_SEED)
    return factory


def require_language_detection() -> None:
    """Require the package langdetect. Raises: ConfigError if it is not installed."""
    if find_spec("langdetect") is None:
        raise ConfigError(
            "an instruction asks for a language, and the package langdetect is not installed",
            allowed="langdetect 1.0.9 or later, part of the extra 'tasks'",
            next_step="pip install 'strop[tasks]'",
        )
