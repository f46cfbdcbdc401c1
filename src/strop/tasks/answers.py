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

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from strop.thoughts import first_mark, split_thought

# Every quantifier is over one character class and the alternatives start differently, so the time
# is linear in the text, whatever the policy writes.
NUMBER_PATTERN = (
    r"(?:(?<![\w)\]}])[-\u2212])?\$?(?<![A-Za-z0-9])(?<![0-9]\.)"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:(?<=[0-9])\.[0-9]+|(?<![0-9])\.[0-9]+)?"
    r"(?<=[0-9])(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
)
_NUMBER = re.compile(NUMBER_PATTERN)
_DIGITS = "0123456789"
_FIRST_CHARS = 64
"""Characters of a reply's end that are searched first: most answers are there."""
_CLOSING = re.compile(r"[\s.!)\]}*$_`'\"]*")
"""Characters that may follow an answer at the end of the reply."""


def show_answer(answer: Any) -> str:
    """Return an answer as a text: a whole number without a point, None as nothing, a text as it is."""
    # Above 2**53 not every whole number is a float.
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        answer = int(answer)
    if answer is None or isinstance(answer, str):
        return answer or ""
    return json.dumps(answer, ensure_ascii=False, default=str)


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


def last_number_match(text: str) -> re.Match[str] | None:
    """Return the last of the left-to-right matches."""
    if any(digit in text for digit in _DIGITS):
        # Numbers contain no space, so those behind a space do not depend on the text before it.
        for start in (text.rfind(" ", 0, max(len(text) - _FIRST_CHARS, 0)) + 1, 0):
            if matches := [*_NUMBER.finditer(text, start)]:
                return matches[-1]
    return None


def _to_decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", "").replace("\u2212", "-"))


def text_after_thinking(text: str) -> str | None:
    """Return what a reply says behind its thinking; None if the thinking has no end."""
    return split_thought(text)[1]


_POSES = re.compile(
    r"[\n ](?:(?:(?<=\n)[\s>#*_\[-]{0,8}|(?<=[.!?)}\]$*] ))(?:(?:next|new|another|practice) )?"
    r"(?:(?:question|problem|exercise|instruction)(?: ?#?([0-9]{1,3}))?[*_ ]{0,4}[:.\]\n]"
    r"|q([0-9]{0,3})[*_ ]{0,4}:|(?:human|user)[*_ ]{0,4}:)"
    # Without a name: numbers and what is asked of them, in a paragraph that does not go on with the solution.
    r"|(?<=\n)[ \t]{0,4}\n\s{0,4}(?![*#>0-9-]|(?:wait|hmm|but|actually|no|let|now|next|so|then|therefore"
    r"|thus|hence|also|first|second|finally|step|check|would|do|is)\b)(?=[^\n]{0,300}[0-9])"
    r"(?P<unnamed>(?:find|compute|determine|evaluate|calculate|solve|simplify)\b"
    r"|(?=[^\n?]{0,300}\b(?:how|what|which)\b)[^\n?]{0,300}\?))",
    re.IGNORECASE,
)
"""Where a reply poses a problem: its own one again, a part of it, or the next one."""
_MAX_POSED_CHARS = 300
_MIN_SHARED_FRAC = 0.6


def own_part(text: str, is_marked: Callable[[str], bool], question: str = "") -> str:
    """Return a reply without its run-on: the problems that it poses itself behind its answer.

    A problem that repeats the question is no run-on, nor is one before which nothing was answered. Of parts
    that are numbered one after the other, the last is returned. `is_marked`: whether a text marks an answer,
    as a box does; an unmarked one is a number in a line that neither asks nor announces.
    """
    start, first, numbers = 0, 0, set[int]()
    for posed in _POSES.finditer("\n" + text):
        # Positions are those behind the added line.
        end, behind = max(posed.start() - 1, 0), posed.end() - 1
        number = int(posed[1] or posed[2] or 0)
        line = text[max(start, end - _MAX_POSED_CHARS) : end].rstrip("\n\t *_").rpartition("\n")[2]
        if number > 1 and number - 1 in numbers:
            first = end
        elif (
            (posed["unnamed"] is None and line[-1:] not in "?:" and any(map(line.__contains__, _DIGITS)))
            or is_marked(text[start:end])
        ) and not _repeats(text[behind : behind + _MAX_POSED_CHARS], question):
            return text[first:end]
        numbers.add(number)
        start = behind
    return text[first:]


def _repeats(posed: str, question: str) -> bool:
    """Whether a posed problem is the question: most of its words are there, and all of its numbers."""
    known = set(re.findall(r"\w+", question.lower()))
    words = re.findall(r"\w+", posed.partition("\n\n")[0].lower())
    others = [word for word in words if word not in known]
    return len(others) < (1 - _MIN_SHARED_FRAC) * len(words) and not any(map(str.isdigit, others))


def judged_text(reply: str, is_marked: Callable[[str], bool] | None = None, question: str = "") -> str | None:
    """Return the judged part of a reply: behind its thinking and, with `is_marked`, `own_part` of that.

    None if its thinking did not end. A block of thoughts that begins in a run-on is ignored.
    """
    text = text_after_thinking(reply)
    if is_marked is None:
        return text
    place, is_opening = (-1, False) if text == reply else first_mark(reply)
    if is_opening and reply.startswith(head := own_part(reply, is_marked, question)) and place >= len(head):
        return head
    return None if text is None else own_part(text, is_marked, question)
