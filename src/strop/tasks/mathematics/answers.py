r"""Find the final answer in a worked solution: a formula, or the number that answers a word problem.

A formula, by the first form that occurs: the last balanced `\boxed{...}` or `\fbox{...}`, but for the
prompt's wording `\boxed{}` and `\boxed{answer}`; the last sentence such as 'The final answer is X.', or an
`<answer>` tag; the last formula between delimiters, or environment; an expression that ends the last line.

A number: that of the first sentence 'The answer is N.', or else behind the first "####" that is not taken
back, or else of the last box or answer sentence, or else the last one. The result of "24+48=72" counts;
"72/3", '72^2', '72 or 73' and '5:72' are no number, and so no answer.

Callers pass no thoughts. All scans are linear in the text, whatever the policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from strop.tasks.answers import NUMBER_PATTERN, last_number_match
from strop.tasks.mathematics.equivalence import GROUPED, SCALES, VULGAR


class FoundAnswer(NamedTuple):
    """A final answer, as it was written."""

    text: str
    is_boxed: bool
    num_marks: int
    """How many boxes, or else answer sentences, the text has; 0: nothing marks the answer."""


_INSIDE = r"(?:\\.|[^\\{}])*+"
for _ in range(8):
    _INSIDE = rf"(?:\\.|[^\\{{}}]|\{{{_INSIDE}\}})*+"
_BOX = re.compile(
    rf"\\f?box(?:ed)?\s*(?:\{{({_INSIDE})\}}|([-+]?[0-9][0-9/,]*(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])))",
    re.DOTALL,
)
_SENTENCE = re.compile(
    r"\b(?:(?<!/)answer>|answer(?:[*_]*\s*[:=]|\s+is\b))[\s:*_=]*"
    # 'Final Answer: The final answer is' is one sentence.
    r"(?:(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is\b|\s*:)[\s:*_=]*)?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(
    r"\n|</|[.?;](?=\s|$)|,?[ \t](?:I hope|because|since|so|where|as)\b", re.IGNORECASE
)
_REASON = re.compile(r",[ \t](?:I hope|because|since|so|where|as)\b", re.IGNORECASE)
_FORMULA = re.compile(
    r"(?<!\\)(?:(\$\$?)((?:\\.|[^$\\])+)\1|\\\(((?:\\[^()]|[^\\])+)\\\)|\\\[((?:\\[^\[\]]|[^\\])+)\\\])"
    r"|(\\begin\{(?:align|gather|equation|split)(?:(?!\\begin\{[ages]).)+?\\end\{[ages][a-z]+\*?\})",
    re.DOTALL,
)
_PLACEHOLDER = re.compile(
    r"[\s.\u2026]*|(?:\\[cl]?dots|(?:your |the )?(?:final )?answer)(?: here)?", re.IGNORECASE
)
_ANCHOR = re.compile(r"[=:\u2248]|\b(?:is|are|equals|get|have)\b")
_WORD = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{2,}")
_EXPRESSION_WORDS = frozenset({"pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "or", "and"})
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
_EDGES = " \t\r\n,;:?*_`'\""
"""Stripped from both ends of an answer; a period only from the right ('.5'), and '!' is a factorial."""
_MAX_CHARS = 200
"""Of an expression, or between a number and what tells what it is."""
_MAX_SENTENCE_CHARS = 1000


def find_answer(text: str) -> FoundAnswer | None:
    """Return the final answer of a text, or None."""
    found = marked_answer(text)
    if found is None:
        found = FoundAnswer(last_formula(text) or _last_expression(text), is_boxed=False, num_marks=0)
    return found if found.text else None


def marked_answer(text: str) -> FoundAnswer | None:
    """Return the answer in the last box or sentence, or None; without text if all boxes are placeholders."""
    if boxes := find_boxes(text):
        filled = [box for part in boxes if not _PLACEHOLDER.fullmatch(box := part.strip())]
        return FoundAnswer(filled[-1] if filled else "", is_boxed=True, num_marks=len(filled))
    sentences = list(_SENTENCE.finditer(text))
    answers = (_sentence_answer(text, match.end()) for match in reversed(sentences))
    answer = next(filter(None, answers), None)
    return None if answer is None else FoundAnswer(answer, is_boxed=False, num_marks=len(sentences))


def is_marked(text: str) -> bool:
    """Whether a text marks an answer: a box, or a sentence with a formula or at most two words."""
    found = marked_answer(text)
    is_said = found is not None and (len(found.text.split()) <= 2 or _is_expression(found.text))
    return found is not None and found.text != "" and (found.is_boxed or is_said)


def find_boxes(text: str) -> list[str]:
    """Return the contents of the balanced boxes in their order; of a box in a box, those of the inner one."""
    contents = [box[1] if box[2] is None else box[2] for box in _BOX.finditer(text)]
    return [inner for content in contents for inner in find_boxes(content) or [content]]


def last_formula(text: str) -> str:
    """Return the last text between formula delimiters, or environment."""
    contents = (str(match[match.lastindex or 0]).strip() for match in reversed([*_FORMULA.finditer(text)]))
    return next(filter(None, contents), "")


def _sentence_answer(text: str, start: int) -> str:
    """Return the answer that begins at `start`: a formula as a whole, else the rest of the sentence."""
    # A '$' may also be money ('The answer is $5.'), and its next one far away.
    formula = _FORMULA.match(text, start, start + _MAX_CHARS)
    if formula is not None and "\n\n" not in formula.group():
        return str(formula[formula.lastindex or 0]).strip()
    sentence = text[start : start + _MAX_SENTENCE_CHARS]
    return _trim(_SENTENCE_END.split(sentence, maxsplit=1)[0])


def _last_expression(text: str) -> str:
    line = next((line for line in reversed(text[-_MAX_SENTENCE_CHARS:].splitlines()) if line.strip()), "")
    line = _REASON.split(line, maxsplit=1)[0]
    parts = (line, _ANCHOR.split(line)[-1])
    return next((_trim(part) for part in parts if _is_expression(part)), "")


def _trim(text: str) -> str:
    return text.strip(_EDGES).rstrip("." + _EDGES)


def _is_expression(text: str) -> bool:
    """Whether a text is a formula rather than prose: no words, and a digit or a command in it."""
    stripped = _trim(text)
    if not stripped or len(stripped) > _MAX_CHARS or "\\boxed" in stripped:
        return False
    words = {word.lower() for word in _WORD.findall(_TEXT.sub("", stripped))}
    return words <= _EXPRESSION_WORDS and re.search(r"\d|\\", stripped) is not None


_MARKED = re.compile(rf"#{{4,}}\s*(\S[^\n]{{,{_MAX_CHARS}}})")
_PHRASE = re.compile(
    rf"\bThe answer is:?\s*[*_]*({NUMBER_PATTERN})[*_]*(?=[ \t]*(?:\n|$)|[.!](?:\s|$))", re.IGNORECASE
)
_RETRACTS = re.compile(
    r"\b(?:wait\b|actually|correction|mistake|oops|sorry|let me (?:re|correct|fix|double)|i was wrong)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*((?:[ \t$(]|\\[(])*(?![0-9]{1,2}[.):]\*)[-\u2212]?[$0-9.][^*\n]{0,60})\*\*")
_ASIDE = re.compile(
    r"\b(?:for|in|over|after|per|every|each|within|during|(from|at)|of|with|by|across)[ \t]+"
    r"(?:(?:the|all|these|those|just|only|next|last|first|about) )?[$]?$",
    re.IGNORECASE,
)
"""What stands before a number that describes another one: '18 dollars a day for 7 days'."""
_FULL_STOP = re.compile(r"[.!?][ \t]+")
_CLAUSE = re.compile(r"(?<=[0-9a-z*] )\((?!.*\))|, (?:which|where|as)\b(?!.*,)|,? (?:because|since)\b(?!.*,)")
"""What only explains: '18 (9 eggs at 2)', '18, which is 9 eggs at 2'."""
_LEAD = re.compile(r"(?:[ \t*_`~$(\[\u2248]|\\[(\[]|\\(?:text|mathbf|mathrm|textbf)[ \t]*\{)*")
_SIGN = r"\*\*|[-+*/^\u00d7\u00f7\u00b7\u2013]|\\(?:times|cdot|div)(?![a-zA-Z])|x(?=[ \t]*[0-9$])"
_OPERATOR = rf"(?:[ \t]*(?:{_SIGN})[ \t]*|:(?=[0-9]))"
# A fraction or mixed number is one number; so is what `strop.tasks.answers` reads.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?(?<![\w.])(?:[0-9]{1,9}[ \t]{1,3})?[0-9]{1,9}/(?=[0-9]*[1-9])[0-9]{1,9}"
    rf"(?![0-9]|[.,/][0-9])|{NUMBER_PATTERN}"
)
# A number that goes on so, or stands behind an operator, is a part of a calculation, a range or a list.
_GOES_ON = re.compile(
    rf"(?:{_OPERATOR}|(?:,|[ \t]*(?:\\text\{{)?[ \t](?:or|and|to)[ \t]*\}}?)[ \t]+)[({{$]*\.?[0-9]"
    r"|[ \t]*[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]"
)
_IS_OPERAND = re.compile(
    rf"(?:[0-9)\]}}%]{_OPERATOR}|[0-9][ \t]+or[ \t]+|between[ \t]+[$0-9.,]+[ \t]+and[ \t]+)[({{$]*0$"
)
_SCALE = re.compile(rf"[ \t]*(?:\\text\{{[ \t]*)?({'|'.join(SCALES)})s?\b", re.IGNORECASE)
_FRACTION = re.compile(r"([0-9]?)\\[dtc]?frac[ \t]*\{?([0-9]+)\}?[ \t]*\{?([0-9]+)\}?")
_VULGAR = str.maketrans(VULGAR)


class Number(NamedTuple):
    """A number as it was written, and its value; None if the text is a calculation, a range or a list."""

    text: str
    value: Fraction | None


def find_number(text: str, question: str = "") -> Number | None:
    """Return the number that is the answer; None if there is none."""
    text = _plain(text)
    # What was marked first counts, unless the reply takes it back and marks another.
    parts = _RETRACTS.split(text) if text.count("####") > 1 or _PHRASE.search(text) else [text]
    if number := next((number for part in reversed(parts) if (number := first_marked(part))), None):
        return number
    found = marked_answer(text)
    return (found and read_number(found.text[:_MAX_CHARS])) or _last_stated(text, question)


def first_marked(text: str) -> Number | None:
    """Return the number of the first answer sentence, or else behind the first '####'."""
    phrase = _PHRASE.search(text)
    return read_number(phrase.group(1)) if phrase else next(marked_numbers(text), None)


def marked_numbers(text: str) -> Iterator[Number]:
    """Yield the numbers behind '####'; headings are none."""
    marks = enumerate((mark.group(1) for mark in _MARKED.finditer(text)), 1)
    # '#### 1. Find the eggs' is the first heading.
    lines = (
        line for index, line in marks if not re.match(r"[.):]\s+[A-Za-z]", line.removeprefix(str(index)))
    )
    answers = (found.text if (found := marked_answer(line)) else line for line in lines)
    return (number for answer in answers if (number := read_number(answer)))


@lru_cache(maxsize=64)  # One reply's marks are read several times.
def read_number(text: str) -> Number | None:
    """Read a text that begins with a number or says what one equals; None if it does neither."""
    plain = [_LEAD.sub("", side, 1) for side in _plain(text).split("=")]
    sides = [_read_from(side, match) if (match := _NUMBER.match(side)) else None for side in plain]
    read = [side for side in sides if side is not None and side.value is not None]
    return read[-1] if read and sides[0] not in read else sides[0]


def read_value(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else, or None."""
    match = _NUMBER.fullmatch(_plain(text).strip())
    return None if match is None else _value(match)


def _plain(text: str) -> str:
    """Write fractions, money and groups of digits of LaTeX and Unicode as plain text does."""
    text = text if text.isascii() else text.translate(_VULGAR)
    if "\\" in text or "{,}" in text:
        text = GROUPED.sub(",", text.replace("\\$", "$"))
        text = _FRACTION.sub(lambda part: f"{part[1] and part[1] + ' '}{part[2]}/{part[3]}", text)
    return text


def _read_from(text: str, match: re.Match[str]) -> Number:
    if _GOES_ON.match(text, match.end()):
        return Number(text, None)
    scale, value = _SCALE.match(text, match.end()), _value(match)
    if scale is not None and value is not None:
        value *= 10 ** SCALES[scale[1].lower()]
    return Number(match.group(), value)


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a number; '72/3' is a calculation."""
    text = match.group().replace("\u2212", "-").replace("$", "").replace(",", "")
    parts = text.lstrip("-").split()
    first, *rest = (Fraction(part) if "/" in part else Fraction(Decimal(part)) for part in parts)
    value = sum(rest, first)
    is_calculation = "/" in text and value.denominator == 1
    return None if is_calculation else -value if text.startswith("-") else value


def _last_stated(text: str, question: str) -> Number | None:
    """Return the last number, or one before it in its sentence that the last one only describes."""
    last = last_number_match(text)
    if last is None:
        return None
    begin = max(text.rfind("\n", 0, last.start()) + 1, last.start() - _MAX_CHARS)
    bold = [*_BOLD.finditer(text, begin)]
    if bold and "=" not in text[bold[-1].end() : last.start()]:
        return read_number(bold[-1].group(1))
    for stop in _FULL_STOP.finditer(text, begin, last.start()):
        begin = stop.end()
    *stated, last = _NUMBER.finditer(text, begin, last.end())
    line = text[begin : last.start()]
    clause = None if "=" in line else _CLAUSE.search(text, begin, last.start())
    if clause and (said := [one for one in stated if one.end() <= clause.start()]):
        return _read_from(text, said[-1])
    if "=" not in line and (aside := _ASIDE.search(line)):
        stated = [one for one in stated if not _ASIDE.search(line, 0, one.start() - begin)]
        given = {_value(one) for one in _NUMBER.finditer(question)}
        is_money = "$" in last.group() or text[last.end() :][:8].lstrip().startswith("dollar")
        begins = [one for one in stated[:1] if not is_money and not _LEAD.sub("", text[begin : one.start()])]
        news = [one for one in stated if _value(one) not in given]
        if begins or (news and (aside[1] or _value(last) in given)):
            return _read_from(text, (begins or news)[-1])
    if _IS_OPERAND.search(text[max(0, last.start() - 20) : last.start()] + "0"):
        return Number(last.group(), None)
    return _read_from(text, last)
