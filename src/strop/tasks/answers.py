"""Read replies: the part that is judged, without thoughts and without what a model adds behind its answer."""

from __future__ import annotations

import json
import re
from typing import Any

from strop.thoughts import first_mark, split_thought


def to_whole(value: Any) -> int | None:
    """Return a float that is a whole number as such; None for any other value."""
    # Above 2**53 not every whole number is a float.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else None


def show_answer(answer: Any) -> str:
    """Return an answer as a text: a whole number without a point, None as nothing, a text as it is."""
    answer = answer if (whole := to_whole(answer)) is None else whole
    if answer is None or isinstance(answer, str):
        return answer or ""
    return json.dumps(answer, ensure_ascii=False, default=str)


def text_after_thinking(text: str) -> str | None:
    """Return what a reply says behind its thinking; None if the thinking has no end."""
    return split_thought(text)[1]


_POSES = re.compile(
    r"[\n ](?:(?:(?<=\n)[\s>#*_\[-]{0,8}+|(?<=[.!?)}\]$*] ))(?:(?:next|new|another|practice) )?"
    r"(?:(?:question|problem|exercise|instruction)(?: ?#?([0-9]{1,3}))?[*_ ]{0,4}[:.\]\n]"
    r"|q([0-9]{0,3})[*_ ]{0,4}:|(?:human|user)[*_ ]{0,4}:)"
    # Without a name: numbers and what is asked of them, in a paragraph that does not go on with the solution.
    r"|(?<=\n)[ \t]{0,4}+\n\s{0,4}(?![*#>0-9-]|(?:wait|hmm|but|actually|no|let|now|next|so|then|therefore"
    r"|thus|hence|also|first|second|finally|step|check|would|do|is)\b)(?=[^\n]{0,300}[0-9])"
    r"(?P<unnamed>(?:find|compute|determine|evaluate|calculate|solve|simplify)\b"
    r"|(?=[^\n?]{0,300}\b(?:how|what|which)\b)[^\n?]{0,300}\?))",
    re.IGNORECASE,
)
"""Where a reply poses a problem: its own one again, a part of it, or the next one."""
_ANSWERS = re.compile(
    r"\\f?box(?:ed)?\s*(?:[0-9]|\{(?!\s*(?:\}|\.\.)|(?i:(?:your |the )?(?:final )?answer)))"
    r"|#{4,}\s*(?![0-9]+[.):]\s|[A-Z])\S"
    r"|(?i:\b(?:answer|(?:right|correct|best) (?:choice|option))(?:>|[*_]*\s*[:=]|\s+is\b))[\s:*_=(]*"
    r"(?:[A-D]\b|[^\s.]*[0-9$\\]|\S+(?: \S+)?\s*(?:\n|\Z))"
)
"""What marks an answer: a box, '####', or a sentence with a letter, a formula or at most two words."""
_MAX_POSED_CHARS = 300
_MIN_SHARED_FRAC = 0.6


def own_part(text: str, question: str = "") -> str:
    """Return a reply without its run-on: the problems that it poses itself behind its answer.

    A problem that repeats the question is no run-on, nor is one before which nothing was answered: neither
    marked, nor as a number in a line that neither asks nor announces. Of parts that are numbered one after
    the other, the last is returned.
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
            (posed["unnamed"] is None and re.search(r"[0-9](?:.*[^?:])?$", line))
            or _ANSWERS.search(text, start, end)
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


def judged_text(reply: str, question: str = "") -> str:
    """Return `own_part` of what a reply says behind its thinking; nothing if that did not end.

    A block of thoughts that begins in a run-on is ignored.
    """
    text = text_after_thinking(reply)
    place, is_opening = (-1, False) if text == reply else first_mark(reply)
    if is_opening and reply.startswith(head := own_part(reply, question)) and place >= len(head):
        return head
    return own_part(text or "", question)
