"""Read replies: the part that is judged, numbers, and the number that is the answer.

One number is:
* digits, with thousands commas only where they group by three: '1,234' is one number, '1,2' two;
* a decimal part ('7.0', '.5') and a short exponent ('1e3'); a trailing period is punctuation;
* a minus sign (ASCII or U+2212) that stands directly before the digits, or before a '$' there, and
  not behind a letter, digit or closing bracket: '= -5' is minus five, '7-5' is 7 and 5;
* nothing glued to a letter in front of it: 'H2O' holds no number, '7kg' holds 7.
Not read: words ('seven'), fractions ('14/2' reads as 14 and 2), a minus sign and a space.

Numbers are compared as exact decimals, so '7.0' equals '7' and '0.1' does not drift.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from strop.tasks.thoughts import first_mark, split_thought

# Every quantifier is over one character class and the alternatives start differently, so the time
# is linear in the text, whatever the policy writes.
NUMBER_PATTERN = (
    r"(?:(?<![\w)\]}])[-\u2212])?\$?(?<![A-Za-z0-9])(?<![0-9]\.)"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:(?<=[0-9])\.[0-9]+|(?<![0-9])\.[0-9]+)?"
    r"(?<=[0-9])(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
)
_NUMBER = re.compile(NUMBER_PATTERN)
_DIGITS = "0123456789"
_FIRST_CHARS = 256
"""Characters of a reply's end that are searched first: most answers are there."""
_CLOSING = re.compile(r"[\s.!)\]}*$_`'\"]*")
"""Characters that may follow an answer at the end of the reply."""


def parse_number(text: str) -> Decimal | None:
    """Read a text that is one number and nothing else, or None."""
    match = _NUMBER.fullmatch(text.strip())
    return None if match is None else _to_decimal(match.group())


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None if there is none."""
    match = last_number_match(text)
    return None if match is None else _to_decimal(match.group())


def ends_with_number(text: str) -> bool:
    """Whether nothing but closing punctuation follows the last number."""
    match = last_number_match(text)
    return match is not None and _CLOSING.fullmatch(text, match.end()) is not None


def cut_at_first(text: str, markers: tuple[str, ...]) -> str:
    """Return the text before the first of several markers; all of it if none occurs."""
    ends = [position for marker in markers if (position := text.find(marker)) >= 0]
    return text[: min(ends)] if ends else text


def last_number_match(text: str) -> re.Match[str] | None:
    """Return the last of the left-to-right matches; the search starts at the end."""
    if not any(digit in text for digit in _DIGITS):
        return None
    start, length = len(text), _FIRST_CHARS
    while start:
        # Numbers contain no space, so those behind a space do not depend on the text before it.
        start = text.rfind(" ", 0, max(len(text) - length, 0)) + 1
        last = None
        for match in _NUMBER.finditer(text, start):
            last = match
        if last is not None:
            return last
        # Growing by a factor keeps the time linear in the text.
        length *= 8
    return None


def _to_decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", "").replace("\u2212", "-"))


def text_after_thinking(text: str) -> str | None:
    """Return what a reply says behind its thinking; None if the thinking has no end."""
    return split_thought(text)[1]


def judged_text(reply: str, markers: Sequence[str] = ()) -> str | None:
    """Return the judged part of a reply: behind its thinking, and before the first marker there.

    None if its thinking did not end. Thoughts may contain a marker; a block that begins behind a marker is
    ignored, because the reply had gone on to invent another problem.
    """
    head = cut_at_first(reply, tuple(markers))
    place, is_opening = first_mark(reply)
    if place < 0 or (is_opening and place >= len(head)):
        return head
    answer = text_after_thinking(reply)
    return None if answer is None else cut_at_first(answer, tuple(markers))
