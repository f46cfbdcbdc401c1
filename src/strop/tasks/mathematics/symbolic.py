"""Compare answers as formulas, with math-verify, and refuse the texts that it cannot handle.

The time of its parser and of sympy is unbounded, so this runs in a process that is killed at a limit.
`is_bounded` refuses most texts that hang, and those that math-verify misreads: prose ('Evelyn' is a product
of letters to it) and numbers with a base ('12_5' and '12_7' are both 12). Most hangs are in rewriting the
difference of unequal formulas, so both are first evaluated at one point. An interval equals an inequality
in one order of the arguments only: the gold answer is the first.
"""

from __future__ import annotations

import cmath
import re
import zlib
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from strop.errors import ConfigError

_MAX_CHARS = 300
_MAX_DEPTH = 12
_MAX_DIGITS = 40
_MAX_EXPONENT = 100
_MAX_FRACTIONS = 12
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_KNOWN_WORDS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan"}
)
_LONG_NUMBER = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1},}}")
_NUMBER_WITH_BASE = re.compile(r"[0-9]_")
_EXPONENT_NUMBER = re.compile(r"(?:\^|\*\*)\s*\{?\s*[-+(]*\s*([0-9]+)")
_GROWING = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|binom|dbinom|tbinom|overline|dot)(?![a-zA-Z])|!|\\(?:dots|ldots|cdots)"
)
_DECIMAL = re.compile(r"[0-9]+\.([0-9]+)")
_FLOAT_ERROR = 1e-12
_MIN_DIFFERENCE = 1e-3
"""Relative, and absolute for small values. math-verify accepts decimals that differ by 1e-6."""
_MAX_PRECISION = 400
_WARM_UP = (r"\frac{1}{2}x^2+\sqrt{3}x-1", r"\left(-\infty,2\right]\cup[3,4)", r"\{1,2\}", r"x\le 2")


class _Formula(NamedTuple):
    parsed: tuple[Any, ...]
    """The result of math-verify's parser; empty if it failed."""
    value: complex | None
    """Value at a point of unusual numbers; None if it cannot be computed."""


def is_bounded(form: str) -> bool:
    """Whether a normal form is a formula that sympy can handle in reasonable time."""
    if not form or len(form) > _MAX_CHARS or "$" in form or "\n" in form:
        return False
    if _LONG_NUMBER.search(form) or _NUMBER_WITH_BASE.search(form) or _GROWING.search(form):
        return False
    if any(
        word.lower() not in _KNOWN_WORDS
        for word in _WORD.findall(re.sub(r"\\(?:begin|end)\{(?:[pbv]?matrix|array|cases)\}", "", form))
    ):
        return False
    if any(int(exponent) > _MAX_EXPONENT for exponent in _EXPONENT_NUMBER.findall(form)):
        return False
    return form.count("\\frac") <= _MAX_FRACTIONS and _is_shallow(form)


@lru_cache(maxsize=4096)
def equal_by_symbols(gold: str, reply: str) -> bool:
    """Whether math-verify finds two normal forms equal. A text that it cannot parse is not equal.

    Raises: ConfigError if math-verify is not installed; any exception of math-verify about the gold answer.
        An exception about the reply makes the reply wrong.
    """
    verify = require_math_verify().verify
    ours = _read_gold(gold)
    if not ours.parsed:
        return False
    theirs = _read(reply, raise_on_error=False)
    if not theirs.parsed:
        return False
    if ours.value is not None and theirs.value is not None:
        largest = max(1.0, abs(ours.value), abs(theirs.value))
        if abs(ours.value - theirs.value) > _MIN_DIFFERENCE * largest:
            return False
    if not verify(list(ours.parsed), list(theirs.parsed), timeout_seconds=None):
        return False
    if ours.value is None or theirs.value is None or "." not in gold + reply:
        return True
    difference = ours.value - theirs.value
    # The library compares decimals by six digits only.
    is_same = abs(difference) <= _FLOAT_ERROR * abs(ours.value)
    return is_same or _is_rest(gold, ours.value, -difference) or _is_rest(reply, theirs.value, difference)


def _is_rest(form: str, value: complex, rest: complex) -> bool:
    """Whether decimals that were rounded or cut off at their last digit leave such a rest of the value."""
    raised = _DECIMAL.sub(lambda match: str(Decimal(match[0]) + Decimal(10) ** -len(match[1])), form)
    span = (_read(raised, raise_on_error=False).value or value) - value
    return span != 0 and -0.5 <= (rest / span).real < 1


def warm_up() -> None:
    """Load the libraries and fill the caches of the grammar. Raises: ConfigError without math-verify."""
    for formula in _WARM_UP:
        equal_by_symbols(formula, f"{formula}+0")


@lru_cache(maxsize=256)
def _read_gold(form: str) -> _Formula:
    return _read(form, raise_on_error=True)


def _read(form: str, *, raise_on_error: bool) -> _Formula:
    library = require_math_verify()
    parsed = tuple(
        library.parse(
            f"${form}$",
            [library.LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=raise_on_error,
        )
    )
    return _Formula(parsed, _evaluate(parsed[0]) if len(parsed) == 1 else None)


def _evaluate(formula: Any) -> complex | None:
    """Return a formula's value at one point; None for equations, sets, matrices, and on failure."""
    import sympy

    # A symbol is compared by its name, and a percentage (an UnevaluatedExpr) is equal to two numbers.
    if not isinstance(formula, sympy.Expr) or formula.is_Matrix or formula.is_Symbol:
        return None
    if formula.has(sympy.UnevaluatedExpr):
        return None
    # Unusual numbers from 1/3 to 10/3, the same for a symbol in every formula.
    hashes = {symbol: zlib.crc32(symbol.name.encode()) for symbol in formula.free_symbols}
    point = {symbol: sympy.Rational(1000 + one % 8999, 3001) for symbol, one in hashes.items()}
    try:
        value = complex(formula.evalf(subs=point, maxn=_MAX_PRECISION, strict=True))
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError):
        return None
    return value if cmath.isfinite(value) else None


@lru_cache(maxsize=1)
def require_math_verify() -> Any:
    """Import math-verify. Raises: ConfigError if it is not installed."""
    try:
        import math_verify
    except ImportError as error:
        raise ConfigError(
            f"task.strictness=symbolic, but math-verify is not installed ({error})",
            allowed="the extra 'tasks', or strictness 'standard' or 'strict'",
            next_step="pip install 'strop[tasks]'",
        ) from error
    from math_verify import grader, parser

    # They warn that their time limits are off: these use SIGALRM, which only main threads have.
    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True
    return math_verify


def _is_shallow(form: str) -> bool:
    """Whether brackets are nested at most a few levels, and no exponent contains a power."""
    depths = list(accumulate((char in "{([") - (char in "})]") for char in form))
    for exponent in form.split("^{")[1:]:
        braces = accumulate((char == "{") - (char == "}") for char in exponent)
        end = next((index for index, depth in enumerate(braces) if depth < 0), None)
        # One that is open behind the next '^{' contains it.
        if end is None or "^" in exponent[:end]:
            return False
    return max(depths) <= _MAX_DEPTH and re.search(r"\^[^{}()+*/=,-]{0,8}\^", form) is None
