r"""Compare a reply's answer with the gold answer, by a ladder: spelling, numbers, formulas.

Equal normal forms are equal; numbers, and lists of them, are equal or not; only the remaining pairs go to
math-verify. So most answers cost some microseconds. The time of its parser and of sympy is unbounded: they
run in a process that is killed at a limit.
"""

from __future__ import annotations

import cmath
import logging
import re
import zlib
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

from strop.tasks.registry import import_extra

Strictness = Literal["strict", "standard", "symbolic"]
"""Which steps may find an answer right: spelling, of an answer in one box; numbers, too; formulas, too."""
_MAX_CHARS = 2000
"""A longer answer is wrong; the longest gold answers of MATH have about 160 characters."""
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SIGNS = "\u00d7\u00b7\u22c5\u03c0\u221e\u2264\u2265\u2260\u222a\u00b1\u2248"
_COMMANDS = ("times", "cdot", "cdot", "pi", "infty", "le", "ge", "ne", "cup", "pm", "approx")
_UNICODE = str.maketrans(
    {sign: rf"\{name} " for sign, name in zip(_SIGNS, _COMMANDS, strict=True)}
    | {one: rf"\frac{normalize('NFKC', one)}".replace("\u2044", "") for one in "¼½¾⅓⅔"}
    | {"\u2212": "-", "\u00f7": "/", "\u00b0": ""}
    | dict.fromkeys("\u00a0~\t\r\n", " ")
)
# Words that make another number are no units: '5 million', 'mod'.
_NO_UNIT = (
    rf"(?![^}}]*\b(?:(?:{'|'.join(SCALES)}|dozen|root)s?|and|or|to|of|hal(?:f|ves)|thirds?|quarters?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|squared|cubed|pi|base|mod|modulo|plus|minus"
    r"|times|over|divided|factorial|more|less|not|sin|cos|tan|log|sqrt)\b)"
)
_UNIT = r"(?:[a-zA-Z]{3,}|(?:mm|cm|dm|km|in|ft|yd|mi|kg|mg|lb|oz|ml|hr|am|pm)(?![a-zA-Z]))"
_POWER = r"(?:\^\{?[23]\}?)?"
_TEXT = r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit|operatorname|mathit|textsf|bold|bf|rm)\s*"
_RULES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"(?<=[0-9])(?:\\[,!]|\{,\}|,\\!)+(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<!\\)\\[,!;: ]|\\(?:q?quad|left|right|[bB]igg?[lr]?|(?:display|text)style)(?![a-zA-Z])", " "),
        (r"\^\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\\?[%$]|(?<!\\)\\[()\[\]]", ""),
        (
            r"(?:\u221a|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[a-zA-Z]))",
            r"\\sqrt{\1\2\3}",
        ),
        ("([\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)", lambda raised: f"^{{{normalize('NFKC', raised[1])}}}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"<=|\\leq(?:slant)?(?![a-zA-Z])", r"\\le "),
        (r">=|\\geq(?:slant)?(?![a-zA-Z])", r"\\ge "),
        (r"\\[lr]brace(?![a-zA-Z])", lambda brace: r"\{" if "l" in brace[0] else r"\}"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        # Mixed numbers, and arguments without braces.
        (r"(?<![0-9./])([0-9]+)\s+([0-9]+)/([0-9]+)(?![0-9./])", r"\1\\frac{\2}{\3}"),
        (r"\\(frac|sqrt)\s*([0-9a-zA-Z])", r"\\\1{\2}"),
        (r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"(?:,\s*)?(?:\\(?:text|mbox|textrm)\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s))", ","),
        # Units; directly behind digits only those that cannot be variables.
        (rf"(?:(?<=[0-9}})])|(?<=\\pi))\s*{_TEXT}\{{{_NO_UNIT}[a-zA-Z./ ()]*\}}{_POWER}$", ""),
        (rf"(?<=[0-9}}])(?:\s+{_NO_UNIT}{_UNIT}(?:(?:\s+|/){_UNIT}|/[a-zA-Z])*|[ckm]m|kg|mph){_POWER}$", ""),
        (rf"{_TEXT}\{{([^{{}}]*)\}}", r" \1 "),
        # Thousands, but '(1,234)' is a pair.
        (
            r"(?<![0-9.,])[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9]|,[0-9])(?![^(\[{]*[)\]}])",
            lambda digits: re.sub("[, ]", "", digits[0]),
        ),
        # White space, but for one between digits and one that ends a command.
        (r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=[0-9])( ) *(?=[0-9])| +", r"\1\2"),
        (r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2"),
        (
            r"(?<![0-9a-zA-Z./})])([0-9]+(?:\.[0-9]+)?)/([0-9]+(?:\.[0-9]+)?)(?![0-9a-zA-Z./^])",
            r"\\frac{\1}{\2}",
        ),
        (
            r"^(?:\+|\\approx(?![a-zA-Z]))|(?:\\\\\s*)?\\(?:begin|end)\{(?:align|gather|equation|split)[a-z]*\*?\}",
            "",
        ),
        (r"^\{([^{}]*)\}$", r"\1"),
    )
]
_CLOSING = re.compile(r"(?<![\\.,;:? ])[.,;:? ]+$")
_RELATION = re.compile(r"=|\\in(?![a-zA-Z])")
_NAME = re.compile(r"^\\?[a-zA-Z]+(?:_[0-9a-zA-Z])?(?:\([a-zA-Z]\))?(?:=|\\in(?![a-zA-Z]))(?=[^=]+$)")
_CHOICE = re.compile(r"\([A-Z]\)(?![-+*/^=<>A-Z])[^(,]*|[A-Z]")
"""The letter of a choice, which may stand with its text: '(C)', 'C', '(C)18'."""


def answers_equal(gold: str, reply: str, strictness: Strictness) -> bool:
    """Whether two answers are equal.

    Raises: ConfigError if symbols are to be compared and math-verify is not installed; any exception of
        math-verify about the gold answer.
    """
    if len(reply) > _MAX_CHARS:
        return False
    ours, theirs = answer_forms(gold, reply)
    if ours == theirs or strictness == "strict":
        return ours == theirs != ""
    verdict = _compare_numbers(ours, theirs)
    if verdict is False and ("%" in gold) is not ("%" in reply):
        # '50\%' is 50, and one half.
        ours, theirs = (
            form + r"\times10^{-2}" * ("%" in answer) for form, answer in ((ours, gold), (theirs, reply))
        )
        verdict = _compare_numbers(ours, theirs)
    if verdict is not None or strictness == "standard":
        return bool(verdict)
    # math-verify ignores case: 'X' is 'x' to it.
    is_refused = ours.lower() == theirs.lower() or _REFUSED.search(ours) or _REFUSED.search(theirs)
    return not is_refused and equal_by_symbols(ours, theirs)


@lru_cache(maxsize=4096)
def normal_form(answer: str) -> str:
    r"""Return one spelling for answers that are written differently and mean the same; may be empty.

    Unicode, spacing, delimiters, synonyms, units, degrees, percent, money and thousands separators go or
    become LaTeX; one word alone has no case. No rule removes or adds a sign, and none reduces or evaluates.
    """
    text = answer.translate(_UNICODE)
    for pattern, to in _RULES:
        text = _CLOSING.sub("", pattern.sub(to, text))
    return text.lower() if len(text) > 1 and text.isalpha() else text


def answer_forms(gold: str, reply: str) -> tuple[str, str]:
    """Return both normal forms, without a name that only one has: 'x=2' and 'y=2' stay different."""
    ours, theirs = normal_form(gold), normal_form(reply)
    if not _RELATION.search(theirs):
        ours = _NAME.sub("", ours)
    elif not _RELATION.search(ours):
        # 'm+n=20+5=25' says what 25 is.
        has_one = "=" in theirs and "," not in theirs
        theirs = theirs.rpartition("=")[2] if has_one else _NAME.sub("", theirs)
    letter = ours.strip("()")
    if len(letter) == 1 and letter.isupper() and _CHOICE.fullmatch(theirs):
        ours, theirs = letter, theirs.lstrip("(")[0]
    return ours, theirs


class Number(NamedTuple):
    """An exact value, and the place value of its last decimal; 0 if it was not written as a decimal."""

    value: Fraction
    unit: Fraction


_PLAIN = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?"
_NUMBER = re.compile(
    rf"([-+]*)(?:([0-9]*)\\frac\{{([-+]?{_PLAIN})\}}\{{([-+]?{_PLAIN})\}}|([0-9]{{1,6}})\^\{{?(-?[0-9]{{1,3}})\}}?"
    rf"|({_PLAIN})(?:(?:\\times|\\cdot|\*)10\^\{{?(-?[0-9]{{1,3}})\}}?|((?i:{'|'.join(SCALES)})))?)"
)
_LIST = re.compile(r"(\(|\[|\\\{|)(.*?)(\)|\]|\\\}|)", re.DOTALL)


def parse_exact(form: str) -> Number | None:
    r"""Read a normal form that is one number, or None.

    It is a sign with an integer, a decimal, a fraction, a mixed number, a power, or a decimal '\times10^{n}'.
    """
    match = _NUMBER.fullmatch(form) if len(form) <= _MAX_CHARS // 2 else None
    if match is None:
        return None
    sign, whole, upper, lower, base, power, plain, exponent, word = match.groups()
    unit = Fraction()
    try:
        if upper:
            value = Fraction(whole or 0) + Fraction(upper) / Fraction(lower)
        elif base:
            value = Fraction(base) ** int(power)
        else:
            scale = Fraction(10) ** (SCALES[word.lower()] if word else int(exponent or 0))
            value = Fraction(plain) * scale
            unit = scale / 10 ** len(plain.partition(".")[2]) if "." in plain else unit
    except ZeroDivisionError:
        return None
    return Number(-value if sign.count("-") % 2 else value, unit)


def _compare_numbers(gold: str, reply: str) -> bool | None:
    """Compare two numbers or lists of numbers; None if one is neither. Lists have the same brackets."""
    ours, theirs = _read_numbers(gold), _read_numbers(reply)
    if ours is None or theirs is None:
        return None
    is_alike = ours[0] == theirs[0] and len(ours[1]) == len(theirs[1])
    return is_alike and all(map(_is_close, ours[1], theirs[1]))


def _read_numbers(form: str) -> tuple[str, list[Number]] | None:
    """Return the brackets of a list, and its numbers; a set has none and no order, as has one number."""
    opening, inside, closing = _LIST.fullmatch(form).groups()  # type: ignore[union-attr]
    numbers = [number for piece in inside.split(",") if (number := parse_exact(piece)) is not None]
    if len(numbers) <= inside.count(","):
        return None
    is_ordered = opening + closing not in ("", r"\{\}", "()" * (len(numbers) == 1))
    return (opening + closing, numbers) if is_ordered else ("", sorted(numbers))


def _is_close(one: Number, other: Number) -> bool:
    """Whether values are equal, or one is a decimal that the other rounds to, or begins with.

    0.333333 is 1/3; 0.3333, of too few digits, is not. Whole numbers are equal only to themselves.
    """
    if one.value == other.value or 1 in (one.value.denominator, other.value.denominator):
        return one.value == other.value
    return any(
        0 < short.unit * 10**5 <= abs(value)
        and short.value * value > 0
        and -short.unit / 2 <= abs(value) - abs(short.value) < short.unit
        for short, value in ((one, other.value), (other, one.value))
    )


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
            if (one := parse_exact(form)) and one.unit:
                return _is_close(one, Number(Fraction(number.real).limit_denominator(10**9), Fraction()))
    verify = import_extra("math_verify").verify
    return bool(verify(ours, theirs, allow_set_relation_comp=True, timeout_seconds=None))


def warm_up() -> None:
    """Load the libraries and fill the caches of the grammar. Raises: ConfigError without math-verify."""
    for formula in _WARM_UP:
        equal_by_symbols(formula, f"{formula}+0")


@lru_cache(maxsize=1024)
def _parse(form: str, *, raise_on_error: bool) -> Any:
    library = import_extra("math_verify")
    given = {"fallback_mode": "no_fallback", "parsing_timeout": None, "raise_on_error": raise_on_error}
    formula = next(iter(library.parse(f"${form}$", [library.LatexExtractionConfig()], **given)), None)
    # Several inequalities of one name are the union of their intervals.
    if formula is not None and "," in form and re.search(r"[<>]|\\[lg]e", form):
        with suppress(AttributeError, NotImplementedError, TypeError):
            from sympy import Union

            return (
                Union(*(one.as_set() for one in formula.args)) if len(formula.free_symbols) == 1 else formula
            )
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
