r"""Compare a reply's answer with the gold answer, by a ladder: spelling, numbers, math-verify.

Equal normal forms are equal, and two numbers are equal or not: this costs some microseconds. What is left is
for math-verify. The time of its parser and of sympy is unbounded: they run in a process that is killed at a
limit.
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
from typing import Any
from unicodedata import normalize

from strop.tasks.mathematics.answers import PLAIN, SCALES, read_value
from strop.tasks.registry import import_extra

_MAX_CHARS = 2000
"""A longer answer is wrong; the longest gold answers of MATH have about 160 characters."""
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
        (
            r"(?:\u221a|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[a-zA-Z]))",
            r"\\sqrt{\1\2\3}",
        ),
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
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"(?<![0-9./])([0-9]+)\s+([0-9]+)/([0-9]+)(?![0-9./])", r"\1\\frac{\2}{\3}"),
        (r"\^\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\\?[%$]|(?<!\\)\\[()\[\]]", ""),
        (r"(?:,\s*)?(?:\\(?:text|mbox|textrm)\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s))", ","),
        # Units; directly behind digits only those that cannot be variables.
        (rf"(?:(?<=[0-9}})])|(?<=\\pi))\s*{_TEXT}\{{{_NO_UNIT}[a-zA-Z./ ()]*\}}{_POWER}$", ""),
        (rf"(?<=[0-9}}])(?:\s+{_NO_UNIT}{_UNIT}(?:(?:\s+|/){_UNIT}|/[a-zA-Z])*|[ckm]m|kg|mph){_POWER}$", ""),
        (rf"{_TEXT}\{{([^{{}}]*)\}}", r" \1 "),
        # White space, but for one between digits and one that ends a command.
        (r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=[0-9])( ) *(?=[0-9])| +", r"\1\2"),
        (r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2"),
        (
            r"^(?:\u2248|\\approx(?![a-zA-Z]))|(?:\\\\\s*)?\\(?:begin|end)\{(?:align|gather|equation|split)[a-z]*\*?\}",
            "",
        ),
    )
]
_CLOSING = re.compile(r"(?<![\\.,;:? ])[.,;:? ]+$")
_CHOICE = re.compile(r"\(?([A-Z])(?:\)(?![-+*/^=<>A-Z])[^(,]*)?")
"""The letter of a choice, which may stand with its text: '(C)', 'C', '(C)18'."""
_DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+")
_PAIR = re.compile(r"\([^()\[\]]*,[^()\[\]]*\)")


def answers_equal(gold: str, reply: str, *, is_strict: bool = False) -> bool:
    """Whether two answers are equal; strictly, whether they are spelled alike.

    Raises: ConfigError if formulas are to be compared and math-verify is not installed; any exception of
        math-verify about the gold answer.
    """
    if len(reply) > _MAX_CHARS:
        return False
    ours, theirs = normal_form(gold), normal_form(reply)
    if ours == theirs or is_strict:
        return ours == theirs != ""
    letter, choice = ours.strip("()"), _CHOICE.fullmatch(theirs)
    if choice and len(letter) == 1 and letter.isupper():
        return choice[1] == letter
    pairs = [(ours, theirs)]
    if ("%" in gold) is not ("%" in reply):
        # '50\%' is 50, and one half.
        pairs += [
            (rf"\frac{{{ours}}}{{100}}", theirs) if "%" in gold else (ours, rf"\frac{{{theirs}}}{{100}}")
        ]
    return any(_are_equal(*pair) for pair in pairs)


def _are_equal(gold: str, reply: str) -> bool:
    """Compare normal forms. Raises: as `answers_equal`."""
    value, other = (None if "," in form else read_value(form) for form in (gold, reply))
    if value is not None and other is not None:
        return value == other or _begins(gold, other) or _begins(reply, value)
    # math-verify ignores case, 'X' is 'x' to it; and a pair is any two numbers.
    if gold.lower() == reply.lower() or _REFUSED.search(gold) or _REFUSED.search(reply):
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
