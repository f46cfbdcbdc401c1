r"""Find the final answer in a worked solution, and compare it with the gold answer.

A formula, by the first form that occurs: the last balanced `\boxed{...}` or `\fbox{...}`, but for the
prompt's wording `\boxed{}` and `\boxed{answer}`; the last sentence such as 'The final answer is X.', or an
`<answer>` tag; the last formula between delimiters, or environment; an expression that ends the last line.

A number: that of the first sentence 'The answer is N.', or else behind the first "####" that is not taken
back, or else of the last box or answer sentence, or else the last one. The result of "24+48=72" counts;
"72/3", '72^2', '72 or 73' and '5:72' are no number, and so no answer. Thousands commas group by three, a
minus sign stands directly before the digits and behind no letter, digit or bracket, and no letter is glued to
the front: '7-5' is 7 and 5, 'H2O' holds no number, '7kg' holds 7.

Callers pass no thoughts. All scans are linear in the text, whatever the policy writes.
"""

from __future__ import annotations

import cmath
import logging
import re
import zlib
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple
from unicodedata import normalize

from strop.tasks.registry import import_extra


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
_JOINED = re.compile(r"\}\$?,? (?:or|and) \$?(?:[a-z] ?= ?)?\\boxed\{")
_SENTENCE = re.compile(
    # Several answers, where nothing else follows.
    r"\b(?:(?<!/)answer>|(?:answer|solution|root)s\s+are\b(?=(?:[^a-z]++|(?<=\\)[a-z]++|(?:and|or|[a-z])(?![a-z]))*+\Z)"
    r"|(?:answer|(?:right|correct|best) (?:choice|option))"
    r"(?:[*_\"']*\s*[:=]|\s+(?:is|(?:must|should|would) be)\b))[\s:*_=]*"
    # 'Final Answer: The final answer is' is one sentence.
    r"(?:(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is\b|\s*:)[\s:*_=]*)?",
    re.IGNORECASE,
)
_WHY = r"[ \t](?:I hope|because|since|so|where|as)\b"
_SENTENCE_END = re.compile(rf"\n|</|[.?;](?=\s|$)|,?{_WHY}", re.IGNORECASE)
_REASON = re.compile(rf",{_WHY}", re.IGNORECASE)
_FORMULA = re.compile(
    r"(?<!\\)(?:(\$\$?)((?:\\.|[^$\\])+)\1|\\\(((?:\\[^()]|[^\\])+)\\\)|\\\[((?:\\[^\[\]]|[^\\])+)\\\])"
    r"|(\\begin\{(?:align|gather|equation|split)(?:(?!\\begin\{[ages]).)+?\\end\{[ages][a-z]+\*?\})",
    re.DOTALL,
)
_PLACEHOLDER = re.compile(r"(?i)[\s.\u2026]*|(?:\\[cl]?dots|(?:your |the )?(?:final )?answer)(?: here)?")
_ANCHOR = re.compile(r"[=:\u2248]|\b(?:is|are|equals|get|have|thus)\b")
_PROSE = re.compile(
    r"(?<![\\a-zA-Z])(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp|or|and)(?![^\W\d_]))[^\W\d_]{2,}|\\boxed",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
_EDGES = " \t\r\n,;:?*_`'\""
"""Stripped from both ends of an answer; a period only from the right ('.5'), and '!' is a factorial."""
_MAX_CHARS = 200
"""Of an expression, or between a number and what tells what it is."""
_MAX_SENTENCE_CHARS = 1000


def find_answer(text: str) -> FoundAnswer | None:
    """Return the final answer of a text, or None."""
    found = marked_answer(text) or FoundAnswer(_unmarked(text), is_boxed=False, num_marks=0)
    return found if found.text else None


def marked_answer(text: str) -> FoundAnswer | None:
    """Return the answer in the last box or sentence, or None; without text if all boxes are placeholders."""
    if boxes := find_boxes(_JOINED.sub(",", text)) or find_boxes(text):
        filled = [box for part in boxes if not _PLACEHOLDER.fullmatch(box := part.strip())]
        return FoundAnswer(filled[-1] if filled else "", is_boxed=True, num_marks=len(filled))
    sentences = list(_SENTENCE.finditer(text))
    answers = (_sentence_answer(text, match) for match in reversed(sentences))
    answer = next(filter(None, answers), None)
    return None if answer is None else FoundAnswer(answer, is_boxed=False, num_marks=len(sentences))


def find_boxes(text: str) -> list[str]:
    """Return the contents of the balanced boxes in their order; of a box in a box, those of the inner one."""
    contents = [box[1] if box[2] is None else box[2] for box in _BOX.finditer(text)]
    return [inner for content in contents for inner in find_boxes(content) or [content]]


def _sentence_answer(text: str, begin: re.Match[str]) -> str:
    """Return the answer behind a sentence's begin: one formula as a whole, else the rest of the sentence."""
    start = begin.end()
    # A '$' may also be money ('The answer is $5.'), and its next one far away.
    formula = None if "s are" in begin[0] else _FORMULA.match(text, start, start + _MAX_CHARS)
    if formula is not None and "\n\n" not in formula.group():
        return str(formula[formula.lastindex or 0]).strip()
    return _trim(_SENTENCE_END.split(text[start : start + _MAX_SENTENCE_CHARS], maxsplit=1)[0])


def _unmarked(text: str) -> str:
    """Return the expression that ends the last line, or else the last formula, or else the last number."""
    formulas = [one for one in _FORMULA.finditer(text) if str(one[one.lastindex or 0]).strip()]
    behind = text[formulas[-1].end() :] if formulas else text
    line = next((line for line in reversed(behind[-_MAX_SENTENCE_CHARS:].splitlines()) if line.strip()), "")
    line = _REASON.split(line, maxsplit=1)[0]
    for part in (line, _ANCHOR.split(line)[-1]):
        if _is_expression(part):
            return _trim(part)
    if formulas:
        return str(formulas[-1][formulas[-1].lastindex or 0]).strip()
    number = None if "\\" in text else last_number(text)
    return "" if number is None or number.value is None else number.text


def _trim(text: str) -> str:
    return text.strip(_EDGES).rstrip("." + _EDGES)


def _is_expression(text: str) -> bool:
    """Whether a text is a formula rather than prose: no words, and a digit or a command in it."""
    text = _trim(text)
    is_short = len(text) <= _MAX_CHARS and re.search(r"\d|\\", text) is not None
    return is_short and not _PROSE.search(_TEXT.sub("", text))


SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PARTS = {"¼": "14", "½": "12", "¾": "34", "⅓": "13", "⅔": "23"}
PLAIN = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00b0": "", "\u00b7": r"\cdot ", "\u221e": r"\infty "}
    | {sign: rf"\frac{part}" for sign, part in _PARTS.items()}
    | {"\u2205": r"\emptyset "}
)
"""Signs in LaTeX that math-verify does not read."""
_FRAC = r"\\[dtc]?frac[ \t]*(\{[0-9]{1,9}\}|[0-9])[ \t]*(\{0*[1-9][0-9]{0,8}\}|[1-9])"
_SCALE = rf"(?:[ \t]*(?:\\text\{{[ \t]*)?(?i:{'|'.join(SCALES)})s?\b[ \t]*\}}?)"
# A fraction or mixed number is one number; so is one with a scale. Words are passed by its first characters.
_NUMBER = (
    r"(?=[-\u2212\u2013\\$.0-9¼½¾⅓⅔])(?:(?<![\w)\]}])[-\u2212\u2013])?\\?\$?(?<![A-Za-z0-9])(?<![0-9]\.)(?:"
    r"(?:[0-9]{1,9}[ \t]{1,3})?[0-9]{1,9}/(?=[0-9]*[1-9])[0-9]{1,9}(?![0-9]|[.,/][0-9])"
    rf"|[0-9]{{0,9}}(?:{_FRAC}|[{''.join(_PARTS)}])"
    r"|(?:[0-9]{1,3}(?:(?:[,\u00a0\u2009\u202f]|\{,\}|\\[,!]|,\\!)[0-9]{3})+(?![0-9])|[0-9]+)?"
    r"(?:(?<=[0-9])\.[0-9]+|(?<![0-9])\.[0-9]+)?(?<=[0-9])(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?)"
    rf"{_SCALE}?"
)
_SIGN = r"\*\*|[-+*/^\u00d7\u00f7\u00b7\u2013]|\\(?:times|cdot|div)(?![a-zA-Z])|x(?=[ \t]*[0-9$])"
_JOIN = (
    rf"[)\]}}%]*(?:[ \t]*(?:{_SIGN})[ \t]*|:(?=[0-9])"
    r"|(?:,|[ \t]*(?:\\text\{)?[ \t](?:or|and|to)[ \t]*\}?)[ \t]+)[({$\\]*"
)
# With what it is joined to: a calculation, a range or a list is no number.
_NUMBERS = re.compile(rf"{_NUMBER}(?:{_JOIN}{_NUMBER}|[ \t]*[\u00b2\u00b3\u00b9\u2070\u2074-\u2079])*")
_ONE_NUMBER = re.compile(_NUMBER)
_SPACED = re.compile(r"(?<![\w.,/])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/]|[.,][0-9])")
_MARKED = re.compile(rf"#{{4,}}\s*(\S[^\n]{{,{_MAX_CHARS}}})")
_RETRACTS = re.compile(
    r"\b(?:wait\b|actually|correction|mistake|oops|sorry|let me (?:re|correct|fix|double)|i was wrong)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*((?:[ \t$(]|\\[(])*(?![0-9]{1,2}[.):]\*)[-\u2212\u2013]?[$0-9.][^*\n]{0,60})\*\*")
_ASIDE = re.compile(
    r"\b(?:for|in|over|after|per|every|each|within|during|(from|at)|of|with|by|across|buy)[ \t]+"
    r"(?:(?:the|all|these|those|just|only|next|last|first|about) )?[$]?$",
    re.IGNORECASE,
)
"""What stands before a number that describes another one: '18 dollars a day for 7 days'."""
_CLAUSE = re.compile(r"(?<=[0-9a-z*] )\((?!.*\))|, (?:which|where|as)\b(?!.*,)|,? (?:because|since)\b(?!.*,)")
"""What only explains: '18 (9 eggs at 2)', '18, which is 9 eggs at 2'."""
_LEAD = re.compile(r"(?:[ \t*_`~$(\[\u2248]|\\[(\[]|\\(?:text|mathbf|mathrm|textbf)[ \t]*\{)*")


class Number(NamedTuple):
    """A number as it was written, and its value; None if the text is a calculation, a range or a list."""

    text: str
    value: Fraction | None

    @classmethod
    def of(cls, match: re.Match[str]) -> Number:
        """Return the number of a match of `_NUMBERS`."""
        return cls(match.group(), read_value(match.group()))


def find_number(text: str, question: str = "") -> Number | None:
    """Return the number that is the answer; None if there is none."""
    # What was marked first counts, unless the reply takes it back and marks another.
    for part in reversed(_RETRACTS.split(text) if text.count("####") > 1 else [text]):
        if numbers := marked_numbers(part):
            return numbers[0]
    found = marked_answer(text)
    return (found and read_number(found.text[:_MAX_CHARS])) or last_number(text, question)


@lru_cache(maxsize=4)  # A judge asks twice.
def marked_numbers(text: str) -> list[Number]:
    """Return the numbers behind '####'; headings, such as '#### 1. Find the eggs', are none."""
    lines = [
        line
        for index, line in enumerate(_MARKED.findall(text), 1)
        if not re.match(r"[.):]\s+[A-Za-z]", line.removeprefix(str(index)))
    ]
    answers = [found.text if (found := marked_answer(line)) else line for line in lines]
    return [number for answer in answers if (number := read_number(answer))]


def read_number(text: str) -> Number | None:
    """Read a text that begins with a number or says what one equals; None if it does neither."""
    text = _SPACED.sub(lambda digits: digits[0].replace(" ", ""), text)
    sides = [_NUMBERS.match(_LEAD.sub("", side, 1)) for side in text.split("=")]
    read = [Number.of(side) if side else None for side in sides]
    valued = [one for one in read if one is not None and one.value is not None]
    return valued[-1] if valued and read[0] not in valued else read[0]


@lru_cache(maxsize=4096)
def read_value(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else, or None; '72/3' is a calculation."""
    if text.isdecimal() and len(text) < 20:
        return Fraction(int(text))
    if len(text) > _MAX_CHARS or _ONE_NUMBER.fullmatch(text) is None:
        return None
    scale = re.search("|".join(SCALES), text, re.IGNORECASE)
    digits = re.sub(_FRAC, r" \1/\2", (text[: scale.start()] if scale else text).translate(PLAIN))
    digits = re.sub(r"\\text|[^0-9./eE+\- ]", "", digits)
    value = sum(map(Fraction, digits.strip("- ").split()), start=Fraction())
    if "/" in digits and value.denominator == 1:
        return None
    value *= 10 ** SCALES[scale[0].lower()] if scale else 1
    return -value if digits.startswith("-") else value


def last_number(text: str, question: str = "") -> Number | None:
    """Return the last number, or one before it in its sentence that the last one only describes."""
    line = next((line for line in reversed(text.split("\n")) if _NUMBERS.search(line)), "")
    if not line:
        return None
    last = [*_NUMBERS.finditer(line)][-1]
    bold = [*_BOLD.finditer(line, max(0, last.start() - _MAX_CHARS))]
    if bold and "=" not in line[bold[-1].end() : last.start()]:
        return read_number(bold[-1][1])
    head = re.split(r"[.!?][ \t]+", line[: last.start()])[-1][-_MAX_CHARS:]
    stated = [*_NUMBERS.finditer(head)]
    if "=" not in head:
        clause = _CLAUSE.search(head)
        if clause and (said := [one for one in stated if one.end() <= clause.start()]):
            return Number.of(said[-1])
        if aside := _ASIDE.search(head):
            given = {read_value(one.group()) for one in _NUMBERS.finditer(question)}
            is_money = "$" in last.group() or line[last.end() :][:8].lstrip().startswith("dollar")
            stated = [one for one in stated if not _ASIDE.search(head[: one.start()])]
            is_first = stated and not is_money and not _LEAD.sub("", head[: stated[0].start()])
            news = [one for one in stated if read_value(one.group()) not in given]
            if news and (is_first or aside[1] or read_value(last.group()) in given):
                return Number.of(news[-1])
    return Number.of(last)


# A reply's answer and the gold answer, by a ladder. Equal normal forms are equal, and two numbers are equal
# or not: this costs some microseconds. What is left is for math-verify. Its parser's and sympy's time is
# unbounded: they run in a process that is killed at a limit.

_MAX_ANSWER_CHARS = 2000
"""A longer answer is wrong; the longest gold answers of MATH have about 160 characters."""
# Words that make another number are no units: '5 million', 'mod'.
_NO_UNIT = (
    rf"(?![^}}]*\b(?:(?:{'|'.join(SCALES)}|dozen|root)s?|and|or|to|of|hal(?:f|ves)|thirds?|quarters?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|squared|cubed|pi|base|mod|modulo|plus|minus"
    r"|times|over|divided|factorial|more|less|not|sin|cos|tan|log|sqrt)\b)"
)
_UNIT = r"(?:[a-zA-Z]{3,}|(?:mm|cm|dm|km|in|ft|yd|mi|kg|mg|lb|oz|ml|hr|am|pm)(?![a-zA-Z]))"
_POWER = r"(?:\^\{?[23]\}?)?"
_TEXT_COMMAND = r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit|operatorname|mathit|textsf|bold|bf|rm)\s*"
_IN_TEXT = rf"{_TEXT_COMMAND}\{{{_NO_UNIT}[a-zA-Z./ ()]*\}}"
_RULES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"(?:\u221a|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))", r"\\sqrt{\1\2\3}"),
        ("([\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)", lambda raised: f"^{{{normalize('NFKC', raised[1])}}}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\[lr]brace(?![a-zA-Z])", lambda brace: r"\{" if "l" in brace[0] else r"\}"),
        # Thousands, but '(1,234)' is a pair.
        (r"(?<=[0-9])(?:\\[,!]|\{,\}|,\\!)+(?=[0-9]{3}(?![0-9]))", ""),
        (
            r"(?<![0-9.,])[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9]|,[0-9])(?![^(\[{]*[)\]}])",
            lambda digits: re.sub("[, ]", "", digits[0]),
        ),
        (r"[~\s]|(?<!\\)\\[,!;: ]|\\(?:q?quad|left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])", " "),
        (r"\\[dtc](frac|binom)(?![a-zA-Z])", r"\\\1"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (
            r"([0-9]+)\.([0-9]*)\\overline\{?([0-9]{1,9})\}?",
            lambda d: (
                rf"\frac{{{int(d[1] + d[2] + d[3]) - int(d[1] + d[2])}}}"
                rf"{{{'9' * len(d[3])}{'0' * len(d[2])}}}"
            ),
        ),
        (r"(?<![0-9./])([0-9]+)\s+([0-9]+)/([0-9]+)(?![0-9./])", r"\1\\frac{\2}{\3}"),
        (r"\^\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\\?[%$]|(?<!\\)\\[()\[\]]", ""),
        (r"(?:,\s*)?(?:\\(?:text|mbox|textrm)\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s))", ","),
        # Units; directly behind digits only those that cannot be variables.
        (rf"(?:(?<=[0-9}})])|(?<=\\pi))\s*(?:{_IN_TEXT} ?/ ?)?{_IN_TEXT}{_POWER}$", ""),
        (rf"(?<=[0-9}}])(?:\s+{_NO_UNIT}{_UNIT}(?:(?:\s+|/){_UNIT}|/[a-zA-Z])*|[ckm]m|kg|mph){_POWER}$", ""),
        (rf"{_TEXT_COMMAND}\{{([^{{}}]*)\}}", r" \1 "),
        # White space, but for one between digits and one that ends a command.
        (r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=[0-9])( ) *(?=[0-9])| +", r"\1\2"),
        (r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2"),
        (r"^(?:\u2248|\\approx(?![a-zA-Z])|m? ?\\angle ?[A-Z]{1,3} ?=)", ""),
        (r"(?:\\\\\s*)?\\(?:begin|end)\{(?:align|gather|equation|split)[a-z]*\*?\}", ""),
    )
]
_CLOSING = re.compile(r"(?<![\\.,;:? ])[.,;:? ]+$")
_CHOICE = re.compile(r"\(?([A-Z])(?:[).](?![-+*/^=<>A-Z])([^(,]*))?")
"""The letter of a choice, which may stand with its text: '(C)', 'C', '(C)18', 'C.18'."""
_DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+")
_PAIR = re.compile(r"\([^()\[\]]*,[^()\[\]]*\)")


def answers_equal(gold: str, reply: str, *, is_strict: bool = False) -> bool:
    """Whether two answers are equal; strictly, whether they are spelled alike.

    Raises: ConfigError if formulas are to be compared and math-verify is not installed; any exception of
        math-verify about the gold answer.
    """
    if len(reply) > _MAX_ANSWER_CHARS:
        return False
    ours, theirs = normal_form(gold), normal_form(reply)
    if ours == theirs or is_strict:
        return ours == theirs != ""
    # 'C. elegans' is no choice.
    mine, choice = ours[1:2] != "." and _CHOICE.fullmatch(ours), _CHOICE.fullmatch(theirs)
    if mine and choice:
        return mine[1] == choice[1]
    if mine and mine[2]:
        return answers_equal(mine[2], reply)
    pairs = [(ours, theirs)]
    if ("%" in gold) is not ("%" in reply):
        # '50\%' is 50, and one half.
        part = r"\frac{%s}{100}"
        pairs += [(part % ours, theirs) if "%" in gold else (ours, part % theirs)]
    return any(_are_equal(*pair) for pair in pairs)


def _are_equal(gold: str, reply: str) -> bool:
    """Compare normal forms. Raises: as `answers_equal`."""
    value, other = (None if "," in form else read_value(form) for form in (gold, reply))
    if value is not None and other is not None:
        return value == other or _begins(gold, other) or _begins(reply, value)
    # math-verify ignores case, 'X' is 'x' to it; and a pair is any two numbers.
    if gold.lower() == reply.lower() or any(_REFUSED.search(_SMALL.sub("1", form)) for form in (gold, reply)):
        return False
    if "," in gold and "," in reply and "=" not in gold + reply:
        return bool(_PAIR.fullmatch(gold)) is bool(_PAIR.fullmatch(reply)) and equal_by_symbols(gold, reply)
    return equal_by_symbols(gold, reply)


@lru_cache(maxsize=4096)
def normal_form(answer: str) -> str:
    r"""Return one spelling for answers that are written differently and mean the same; may be empty.

    Spacing, delimiters, units, degrees, percent, money and thousands separators go, and what math-verify does
    not read becomes LaTeX; one word alone has no case. No rule removes or adds a sign, and none reduces or
    evaluates.
    """
    text = answer.translate(PLAIN)
    for pattern, to in _RULES:
        text = _CLOSING.sub("", pattern.sub(to, text))
    return text.lower() if len(text) > 1 and text.isalpha() else text


def _begins(short: str, value: Fraction) -> bool:
    """Whether a form is a decimal that a value rounds to, or begins with.

    0.333333 is 1/3; 0.3333, of too few digits, is not. Whole numbers are equal only to themselves.
    """
    if not _DECIMAL.fullmatch(short):
        return False
    unit = Fraction(10) ** -len(short.partition(".")[2])
    away = abs(value) - abs(Fraction(short))
    return unit * 10**5 <= abs(value) and value * Fraction(short) > 0 and -unit / 2 <= away < unit


# Formulas, by math-verify. What it cannot handle in reasonable time is refused, and what it misreads: prose
# ('Evelyn' is a product of letters to it) and numbers with a base ('12_5' and '12_7' are both 12). Most hangs
# are in rewriting the difference of unequal formulas, so both are first evaluated at one point.

_REFUSED = re.compile(
    # Long, with many brackets or deep ones.
    r"^$|(?s:.{301})|(?:[{(\[][^{(\[]*){41}|(?:[{(\[][^{}()\[\]]*){13}|[$!]|[0-9]_|[0-9]{41}"
    # Exponents with many digits, or with powers in them.
    r"|(?:\^|\*\*)\s*\{?\s*[-+(]*\s*[0-9]{4}|\^\{[^}]*\^|\^(?:[0-9]+|[a-zA-Z])\^"
    r"|\\(?:sum|prod|int|iint|oint|lim|[dt]?binom|overline|dot|[lc]?dots)(?![a-zA-Z])"
    # Words, but for functions and matrices.
    r"|(?<![\\a-zA-Z])(?!(?:(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|exp|sqrt|[pbv]?matrix|array|cases)(?![a-zA-Z]))"
    r"[a-zA-Z]{3}"
)
_SMALL = re.compile(r"(?<![\w.)}!])[0-9]{1,2}!(?!!)|\\binom\{[0-9]{1,3}\}\{[0-9]{1,3}\}")
# It warns that its time limits are off: these use SIGALRM, which only main threads have.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_WARM_UP = (r"\frac{1}{2}x^2+\sqrt{3}x-1", r"\left(-\infty,2\right]\cup[3,4)", r"\{1,2\}", r"x\le 2")


@lru_cache(maxsize=4096)
def equal_by_symbols(gold: str, reply: str) -> bool:
    """Whether math-verify finds two normal forms equal. A text that it cannot parse is not equal.

    Raises: ConfigError if math-verify is not installed; any exception of math-verify about the gold answer.
        An exception about the reply makes the reply wrong.
    """
    ours, theirs = _parse(gold, raise_on_error=True), _parse(reply, raise_on_error=False)
    if ours is None or theirs is None:
        return False
    value, other = _evaluate(ours), _evaluate(theirs)
    if value is not None and other is not None:
        if not cmath.isclose(value, other, rel_tol=1e-6, abs_tol=1e-12):
            return False
        # The library compares decimals by six digits only.
        for form, number in ((gold, other), (reply, value)):
            if _DECIMAL.fullmatch(form):
                exact = Fraction(number.real).limit_denominator(10**9)
                return exact == Fraction(form) or _begins(form, exact)
    verify = import_extra("math_verify").verify
    return bool(verify(ours, theirs, allow_set_relation_comp=True, timeout_seconds=None))


def warm_up() -> None:
    """Load the libraries and fill the caches of the grammar. Raises: ConfigError without math-verify."""
    for formula in _WARM_UP:
        equal_by_symbols(formula, f"{formula}+0")


@lru_cache(maxsize=1024)
def _parse(form: str, *, raise_on_error: bool) -> Any:
    library = import_extra("math_verify")
    config = library.LatexExtractionConfig()
    # Its units are single letters, too: '5t' would be 5.
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    given = {"fallback_mode": "no_fallback", "parsing_timeout": None, "raise_on_error": raise_on_error}
    formula = next(iter(library.parse(f"${form}$", [config], **given)), None)
    # Several inequalities of one name are the union of their intervals.
    if formula is not None and "," in form and re.search(r"[<>]|\\[lg]e", form):
        with suppress(AttributeError, NotImplementedError, TypeError):
            from sympy import Union

            is_one = len(formula.free_symbols) == 1
            return Union(*(one.as_set() for one in formula.args)) if is_one else formula
    return formula


def _evaluate(formula: Any) -> complex | None:
    """Return a formula's value at one point; None for equations, sets, matrices, and on failure."""
    import sympy

    # A symbol is compared by its name.
    if not isinstance(formula, sympy.Expr) or formula.is_Matrix or formula.is_Symbol:
        return None
    # Unusual numbers from 1/3 to 10/3, the same for a symbol in every formula.
    hashes = {symbol: zlib.crc32(symbol.name.encode()) for symbol in formula.free_symbols}
    point = {symbol: sympy.Rational(1000 + one % 8999, 3001) for symbol, one in hashes.items()}
    try:
        value = complex(formula.evalf(subs=point, maxn=400, strict=True))
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError):
        return None
    return value if cmath.isfinite(value) else None
