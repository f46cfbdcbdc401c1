r"""Find the final answer in a worked solution. `equivalence` compares it.

The first form that occurs counts: the last balanced `\boxed{...}` or `\fbox{...}`, but for the prompt's
wording `\boxed{}` and `\boxed{answer}`; the last sentence such as 'The final answer is X.' or 'Answer: X',
or an `<answer>` tag; the last formula between delimiters or of an environment, of its lines the last; an
expression that ends the last line. Callers pass the text behind the last closed thinking block. All scans
are linear in the text, whatever the policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple
from unicodedata import normalize

from strop.tasks.answers import NUMBER_PATTERN, last_number_match, parse_number
from strop.tasks.mathematics.equivalence import SCALES, parse_exact
from strop.tasks.mathematics.normal_form import normal_form


class FoundAnswer(NamedTuple):
    """A final answer, as it was written."""

    text: str
    is_boxed: bool
    num_marks: int
    """How many boxes, or else answer sentences, the text has; 0: nothing marks the answer."""


_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox)(?![a-zA-Z{])|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\s*([-+]?[0-9][0-9/,]*(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z]))")
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
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:align|gather|equation|split)[a-z]*\*?\}")
_DELIMITER = re.compile(rf"{_ENVIRONMENT.pattern}|\\\\|\\\$|\$\$|\$|\\\(|\\\)|\\\[|\\\]")
_CLOSES = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}
_PLACEHOLDER = re.compile(
    r"[\s.\u2026]*|(?:\\[cl]?dots|(?:your |the )?(?:final )?answer)(?: here)?", re.IGNORECASE
)
_ANCHOR = re.compile(r"[=:\u2248]|\b(?:is|are|equals|get|have)\b")
_WORDS = re.compile(r"\\[a-zA-Z]+|[^\W\d_]{2,}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
_EXPRESSION_WORDS = frozenset({"pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "or", "and"})
_EDGES = " \t\r\n,;:?*_`'\""
"""Stripped from both ends of an answer; a period only from the right ('.5'), and '!' is a factorial."""
_MAX_EXPRESSION_CHARS = 200
_MAX_SENTENCE_CHARS = 1000
_MAX_LAST_LINE_CHARS = 4000


def find_answer(text: str) -> FoundAnswer | None:
    """Return the final answer of a text, or None."""
    found = marked_answer(text)
    if found is None:
        found = FoundAnswer(last_formula(text) or _last_expression(text) or "", is_boxed=False, num_marks=0)
    return found if found.text else None


def marked_answer(text: str) -> FoundAnswer | None:
    """Return the answer in the last box or sentence, or None; without text if all boxes are placeholders."""
    if boxes := find_boxes(text):
        filled = [box for part in boxes if not _PLACEHOLDER.fullmatch(box := part.strip())]
        return FoundAnswer(filled[-1] if filled else "", is_boxed=True, num_marks=len(filled))
    sentences = list(_SENTENCE.finditer(text))
    answers = (answer for match in reversed(sentences) if (answer := _sentence_answer(text, match.end())))
    answer = next(answers, None)
    return None if answer is None else FoundAnswer(answer, is_boxed=False, num_marks=len(sentences))


def is_marked(text: str) -> bool:
    """Whether a text marks an answer: a box, or a sentence with a formula or at most two words."""
    found = marked_answer(text)
    is_said = found is not None and (len(found.text.split()) <= 2 or _is_expression(found.text))
    return found is not None and found.text != "" and (found.is_boxed or is_said)


def find_boxes(text: str) -> list[str]:
    r"""Return the contents of the outermost balanced boxes, in the order of the text."""
    boxes: list[tuple[int, str]] = []
    opened: list[int | None] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.startswith(("\\boxed", "\\fbox")):
            if token.endswith("{"):
                opened.append(match.end())
            elif bare := _BARE_BOX.match(text, match.end()):
                boxes.append((match.end(), bare.group(1)))
        elif token == "{":
            opened.append(None)
        elif token == "}" and opened:
            start = opened.pop()
            if start is not None:
                # A box closes after the boxes inside it.
                while boxes and boxes[-1][0] >= start:
                    boxes.pop()
                boxes.append((start, text[start : match.start()]))
    return [content for _, content in boxes]


def last_formula(text: str) -> str | None:
    """Return the text between the last pair of formula delimiters, or None."""
    opened: re.Match[str] | None = None
    last: str | None = None
    for delimiter in _DELIMITER.finditer(text):
        token = delimiter.group()
        if opened is None:
            opened = delimiter if token in _CLOSES or token.startswith("\\begin") else None
        elif token == _CLOSES.get(opened.group(), opened.group().replace("begin", "end")):
            content = text[opened.start() : delimiter.end()].removeprefix(opened.group()).removesuffix(token)
            if token.startswith("\\end") or _ENVIRONMENT.search(content):
                lines = [line.strip(" \n&") for line in _ENVIRONMENT.sub("", content).split("\\\\")]
                content = next((line.replace("&", "") for line in reversed(lines) if line), "")
            last, opened = content.strip() or last, None
    return last


def _sentence_answer(text: str, start: int) -> str | None:
    """Return the answer that begins at `start`: a formula as a whole, else the rest of the sentence."""
    opening = _DELIMITER.match(text, start)
    if opening is not None and (closing := _CLOSES.get(opening.group())):
        # A '$' may also be money ('The answer is $5.'), and its next one far away.
        rest = _DELIMITER.finditer(text, opening.end(), start + _MAX_EXPRESSION_CHARS)
        end = next((delimiter.start() for delimiter in rest if delimiter.group() == closing), -1)
        if end >= 0 and "\n\n" not in text[start:end]:
            return text[opening.end() : end].strip() or None
    sentence = text[start : start + _MAX_SENTENCE_CHARS]
    end_match = _SENTENCE_END.search(sentence)
    return _trim(sentence[: None if end_match is None else end_match.start()]) or None


def _last_expression(text: str) -> str | None:
    line = next((line for line in reversed(text[-_MAX_LAST_LINE_CHARS:].splitlines()) if line.strip()), "")
    line = _REASON.split(line, maxsplit=1)[0]
    if _is_expression(line):
        return _trim(line)
    anchors = list(_ANCHOR.finditer(line))
    rest = line[anchors[-1].end() :] if anchors else ""
    return _trim(rest) if _is_expression(rest) else None


def _trim(text: str) -> str:
    return text.strip(_EDGES).rstrip("." + _EDGES)


def _is_expression(text: str) -> bool:
    """Whether a text is a formula rather than prose: no words, and a digit or a command in it."""
    stripped = _trim(text)
    if not stripped or len(stripped) > _MAX_EXPRESSION_CHARS or "\\boxed" in stripped:
        return False
    words = {word.lower() for word in _WORDS.findall(_TEXT.sub("", stripped)) if not word.startswith("\\")}
    has_value = any(character.isdigit() for character in stripped) or "\\" in stripped
    return words <= _EXPRESSION_WORDS and has_value


# The number that answers a word problem: of the first sentence 'The answer is N.', or else behind the first
# "####" that is not taken back, or else of the last box or answer sentence, or else the last one. The result
# of "24+48=72" counts; "72/3", '72^2', '72 or 73' and '5:72' are no number, and so no answer.

_MAX_NUMBER_CHARS = 200
_MARKED = re.compile(rf"#{{4,}}\s*(\S[^\n]{{,{_MAX_NUMBER_CHARS}}})")
_PHRASE = re.compile(
    rf"\bThe answer is:?\s*[*_]*({NUMBER_PATTERN})[*_]*(?=[ \t]*(?:\n|$)|[.!](?:\s|$))", re.IGNORECASE
)
_GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!]|\\!,|,\\!)(?=[0-9]{3}(?![0-9]))")
# '#### Step 1', and '#### 1. Find the eggs' over numbers, are headings.
_HEADING = re.compile(
    rf"(?:step|part)\b|[0-9]{{1,2}}[.):][ \t]+[A-Za-z][^\n]{{,{_MAX_NUMBER_CHARS}}}"
    rf"(?:\*\*\$?[0-9]|[=#]|\\boxed|\n[^0-9]{{,{_MAX_NUMBER_CHARS}}}[0-9])",
    re.IGNORECASE,
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
_TRAIL = " \t*_`$\\)]"
_SIGN = r"\*\*|[-+*/^\u00d7\u00f7\u00b7\u2013]|\\(?:times|cdot|div)(?![a-zA-Z])|x(?=[ \t]*[0-9$])"
_OPERATOR = rf"(?:[ \t]*(?:{_SIGN})[ \t]*|:(?=[0-9]))"
_NUMBER = re.compile(NUMBER_PATTERN)
# A number that goes on so, or stands behind an operator, is a part of a calculation, a range or a list.
_GOES_ON = re.compile(
    rf"(?:{_OPERATOR}|(?:,|[ \t]*(?:\\text\{{)?[ \t](?:or|and|to)[ \t]*\}}?)[ \t]+)[({{$]*\.?[0-9]"
    r"|[ \t]*[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]"
)
_IS_OPERAND = re.compile(
    rf"(?:[0-9)\]}}%]{_OPERATOR}|[0-9][ \t]+or[ \t]+|between[ \t]+[$0-9.,]+[ \t]+and[ \t]+)[({{$]*0$"
)
_SLASHED = re.compile(r"(?<![0-9])(?:[0-9]{1,9}[ \t]{1,3})?[0-9]{1,9}/[0-9]{1,9}(?![0-9]|[.,/][0-9])")
_VULGAR = {ord(one): f" {normalize('NFKC', one)}".replace("\u2044", "/") for one in "¼½¾⅓⅔"}
_FRACTION = re.compile("/|frac|[\u00bc-\u00be\u00f7\u2153\u2154]")
_SCALE = re.compile(rf"[ \t]*(?:\\text\{{[ \t]*)?({'|'.join(SCALES)})s?\b", re.IGNORECASE)


class Number(NamedTuple):
    """A number as it was written, and its value; None if the text is a calculation, a range or a list."""

    text: str
    value: Fraction | None


def find_number(text: str, question: str = "") -> Number | None:
    """Return the number that is the answer by the rules of `auto`; None if there is none."""
    text = _GROUPED.sub(",", text.replace("\\$", "$"))
    # What was marked first counts, unless the reply takes it back and marks another.
    parts = _RETRACTS.split(text) if text.count("####") > 1 or _PHRASE.search(text) else [text]
    if number := next((number for part in reversed(parts) if (number := first_marked(part))), None):
        return number
    found = marked_answer(text)
    return (found and read_number(found.text[:_MAX_NUMBER_CHARS])) or _last_stated(text, question)


def first_marked(text: str) -> Number | None:
    """Return the number of the first answer sentence, or else behind the first '####'."""
    phrase = _PHRASE.search(text)
    return read_number(phrase.group(1)) if phrase else next(marked_numbers(text), None)


def _last_stated(text: str, question: str) -> Number | None:
    """Return the last number, or one before it in its line that the last one only describes."""
    last = last_number_match(text if text.isascii() else (text := text.translate(_VULGAR)))
    if last is None:
        return None
    start = text.rfind("\n", 0, last.start()) + 1
    line = text[max(start, last.start() - _MAX_NUMBER_CHARS) : last.start()]
    line = _FULL_STOP.split(line)[-1]
    bold = [*_BOLD.finditer(text, max(start, last.start() - _MAX_NUMBER_CHARS))]
    if bold and "=" not in text[bold[-1].end() : last.start()]:
        return read_number(bold[-1].group(1))
    slashed = _SLASHED.findall(line + last.group()) if line.endswith("/") else []
    if slashed and (number := read_fraction(slashed[-1])):
        return Number(slashed[-1], number)
    if "=" in line:
        pass
    elif _CLAUSE.search(line) and (stated := list(_NUMBER.finditer(_CLAUSE.split(line)[0]))):
        return _read_from(line, stated[-1])
    elif aside := _ASIDE.search(line):
        stated = [match for match in _NUMBER.finditer(line) if not _ASIDE.search(line, 0, match.start())]
        given = {parse_number(match.group()) for match in _NUMBER.finditer(question)}
        is_money = "$" in last.group() or text[last.end() :][:8].lstrip().startswith("dollar")
        begins = [match for match in stated[:1] if not is_money and not _LEAD.sub("", line[: match.start()])]
        news = [match for match in stated if parse_number(match.group()) not in given]
        if begins or (news and (aside[1] or parse_number(last.group()) in given)):
            return _read_from(line, (begins or news)[-1])
    is_operand = _IS_OPERAND.search(text[max(0, last.start() - 20) : last.start()] + "0") is not None
    return Number(last.group(), None) if is_operand else _read_from(text, last)


def read_number(text: str) -> Number | None:
    """Read a text that begins with a number or says what one equals; None if it does neither."""
    sides = [_read_side(_LEAD.sub("", side, 1)) for side in text.split("=")]
    read = [side for side in sides if side is not None and side.value is not None]
    return read[-1] if read and sides[0] not in read else sides[0]


def marked_numbers(text: str) -> Iterator[Number]:
    """Yield the numbers behind '####'; headings are none."""
    lines = (mark.group(1) for mark in _MARKED.finditer(text) if not _HEADING.match(text, mark.start(1)))
    answers = (found.text if (found := marked_answer(line)) else line for line in lines)
    return (number for answer in answers if (number := read_number(answer)))


def _read_side(side: str) -> Number | None:
    fraction = read_fraction(side)
    if fraction is not None:
        return Number(side, fraction)
    match = _NUMBER.match(side)
    return None if match is None else _read_from(side, match)


def _read_from(text: str, match: re.Match[str]) -> Number:
    if _GOES_ON.match(text, match.end()):
        return Number(text, None)
    scale = _SCALE.match(text, match.end())
    power = 0 if scale is None else SCALES[scale.group(1).lower()]
    value = parse_number(match.group())
    exact = None if value is None else Fraction(value)
    return Number(match.group(), exact if exact is None or not power else exact * 10**power)


def read_fraction(text: str) -> Fraction | None:
    """Read a fraction or mixed number that is not whole: '72/3' is a calculation."""
    if not _FRACTION.search(text):
        return None
    begun = _SLASHED.match(text)
    # What follows a fraction is its unit: '3/4 of an hour'.
    is_whole = begun is None or _GOES_ON.match(text, begun.end())
    form = normal_form(text.rstrip(_TRAIL) if begun is None or is_whole else begun.group())
    number = parse_exact(form) if "frac" in form or "/" in form else None
    return None if number is None or number.value.denominator == 1 else number.value
