"""Compare a reply's answer with the gold answer, in stages: spelling, numbers, symbols.

Equal spellings are equal; two numbers are equal or not; only the remaining pairs go to sympy. So most
answers cost some microseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from strop.tasks.mathematics.normal_form import normal_form, without_name
from strop.tasks.mathematics.symbolic import equal_by_symbols, is_bounded

_MAX_CHARS = 2000
"""A longer answer is wrong; the longest gold answers of MATH have about 160 characters."""
_RELATION = re.compile(r"=|\\in(?![a-zA-Z])")
_INEQUALITY = re.compile(r"(<|>|\\[lg]e(?![a-zA-Z]))")
_UPWARD = ("<", r"\le")
_CHOICE = re.compile(r"\([A-Z]\)(?![-+*/^=<>A-Z])[^(,]*|[A-Z]")
"""The letter of a choice, which may stand with its text: '(C)', 'C', '(C)18'."""
_NAME = re.compile(r"\\?(?!pi|infty)[a-zA-Z]+")


class Strictness(StrEnum):
    """Which stages may find an answer right; the values of `task.strictness`."""

    STRICT = "strict"  # Spelling only, and the answer must stand in one box.
    STANDARD = "standard"
    SYMBOLIC = "symbolic"


def answers_equal(gold: str, reply: str, strictness: Strictness) -> bool:
    """Whether two answers are equal.

    Raises: ConfigError if symbols are to be compared and math-verify is not installed; any exception of
        math-verify about the gold answer.
    """
    if len(reply) > _MAX_CHARS:
        return False
    ours, theirs = answer_forms(gold, reply)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    if strictness is Strictness.STRICT:
        return False
    verdict = compare_numbers(ours, theirs)
    if not verdict and ("%" in gold) is not ("%" in reply):
        # '50\%' is 50, and one half.
        share = (rf"{ours}/100", theirs) if "%" in gold else (ours, rf"{theirs}/100")
        verdict = compare_numbers(*share) or verdict
    if verdict is not None or strictness is Strictness.STANDARD:
        return bool(verdict)
    # math-verify ignores case: 'X' is 'x' to it.
    is_comparable = ours.lower() != theirs.lower() and is_bounded(ours) and is_bounded(theirs)
    return is_comparable and equal_by_symbols(ours, theirs)


_gold_form = lru_cache(maxsize=1024)(normal_form)


def answer_forms(gold: str, reply: str) -> tuple[str, str]:
    r"""Return both normal forms, each without what only it has: a name, braces of a set, inequality signs.

    'x=2' and 'y=2' stay different. '1,2' is '\{1,2\}', and '0\le x<1' is '[0,1)'.
    """
    ours, theirs = _gold_form(gold), normal_form(reply)
    if not _RELATION.search(theirs):
        ours = without_name(ours) or ours
    elif not _RELATION.search(ours):
        # 'm+n=20+5=25' says what 25 is.
        has_one = "=" in theirs and "," not in theirs
        theirs = theirs.rpartition("=")[2] if has_one else without_name(theirs) or theirs
    letter = ours.strip("()")
    if len(letter) == 1 and letter.isupper() and _CHOICE.fullmatch(theirs):
        ours, theirs = letter, theirs.lstrip("(")[0]
    if "(" not in ours and re.fullmatch(r"\([^(),]*\)", theirs):
        theirs = theirs[1:-1]
    our_items, their_items = _set_items(ours), _set_items(theirs)
    if (our_items is None) is not (their_items is None):
        ours, theirs = our_items or ours, their_items or theirs
    our_interval, their_interval = _as_interval(ours), _as_interval(theirs)
    if (our_interval is None) is not (their_interval is None):
        ours, theirs = our_interval or ours, their_interval or theirs
    return ours, theirs


def _set_items(form: str) -> str | None:
    """Return what stands between the braces of a set, or None."""
    is_set = form.startswith("\\{") and form.find("\\}") == len(form) - 2
    return form[2:-2] or None if is_set else None


def _as_interval(form: str) -> str | None:
    """Return the interval of an inequality, or the union of those of several; None for another form."""
    names, intervals = set(), []
    for piece in form.split(","):
        parts = [part.strip() for part in _INEQUALITY.split(piece)]
        if len(parts) == 3:
            # 'x<3' is '-\\infty<x<3'.
            is_named_first = _NAME.fullmatch(parts[0]) is not None
            far = "-\\infty" if is_named_first is (parts[1] in _UPWARD) else "\\infty"
            sign = "<" if parts[1] in _UPWARD else ">"
            parts = [far, sign, *parts] if is_named_first else [*parts, sign, far]
        if len(parts) != 5 or (parts[1] in _UPWARD) is not (parts[3] in _UPWARD):
            return None
        low, left, name, right, high = parts if parts[1] in _UPWARD else parts[::-1]
        names.add(name)
        intervals.append(f"{'(' if left in '<>' else '['}{low},{high}{')' if right in '<>' else ']'}")
    is_one_name = len(names) == 1 and all(_NAME.fullmatch(name) for name in names)
    return "\\cup".join(intervals) if is_one_name else None


# A number is a sign with an integer, a decimal, '\frac{a}{b}', 'a/b', a mixed number, a power 'a^{n}' of
# bounded size, or a decimal '\times10^{n}', as an exact rational. A decimal is also equal to a value that
# it rounds or cuts off, within 1e-6 of the larger one: 0.333333 is 1/3; 0.3333 is not. Whole numbers are
# equal only to themselves.

_REL_TOLERANCE = Fraction(1, 10**6)
_MAX_DIGITS = 1000
_MAX_EXPONENT = 300
_MAX_ITEMS = 64
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SIGN = r"([-+]*)"
_PLAIN = re.compile(
    _SIGN + r"([0-9]+(?:\.[0-9]+)?)(?:(?:\\times|\\cdot|\*)10\^\{?(-?[0-9]{1,3})\}?|"
    f"({'|'.join(SCALES)}))?"
)
_RATIO = re.compile(_SIGN + r"([0-9]*)\\frac\{([-+]?[0-9]+(?:\.[0-9]+)?)\}\{([-+]?[0-9]+(?:\.[0-9]+)?)\}")
_SLASH = re.compile(_SIGN + r"()([0-9]+(?:\.[0-9]+)?)/(-?[0-9]+(?:\.[0-9]+)?)")
_POWER_FORM = re.compile(_SIGN + r"([0-9]{1,6})\^\{?(-?[0-9]{1,3})\}?")
_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}"}


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value, and the place value of its last decimal; None if it was not written as a decimal."""

    value: Fraction
    unit: Fraction | None

    def equals(self, other: Number) -> bool:
        """Compare by the rules of this module; symmetric."""
        if self.value == other.value:
            return True
        if 1 in (self.value.denominator, other.value.denominator):
            return False
        return self._shortens(other.value) or other._shortens(self.value)

    def _shortens(self, value: Fraction) -> bool:
        """Whether this decimal is `value`, rounded or cut off behind enough digits."""
        if self.unit is None or self.value * value < 0:
            return False
        left_off, larger = abs(value) - abs(self.value), max(abs(value), abs(self.value))
        has_digits = self.unit <= 10 * _REL_TOLERANCE * larger and abs(left_off) <= _REL_TOLERANCE * larger
        return has_digits and -self.unit / 2 <= left_off < self.unit


def parse_exact(form: str) -> Number | None:
    """Read a normal form that is one number, or None."""
    if len(form) > _MAX_DIGITS:
        return None
    unit = None
    if match := _PLAIN.fullmatch(form):
        sign, digits, exponent, word = match.groups()
        scale = Fraction(10) ** (SCALES.get(word, 0) if word else int(exponent or 0))
        value = Fraction(digits) * scale
        unit = scale / 10 ** len(digits.partition(".")[2]) if "." in digits else None
    elif match := _RATIO.fullmatch(form) or _SLASH.fullmatch(form):
        sign, whole, upper, lower = match.groups()
        is_mixed = bool(whole)
        if not Fraction(lower) or (is_mixed and not (upper.isdigit() and lower.isdigit())):
            return None
        value = Fraction(int(whole or 0)) + Fraction(upper) / Fraction(lower)
    elif match := _POWER_FORM.fullmatch(form):
        sign, base, exponent = match.groups()
        if abs(int(exponent)) > _MAX_EXPONENT or not int(base):
            return None
        value = Fraction(int(base)) ** int(exponent)
    else:
        return None
    return Number(-value if sign.count("-") % 2 else value, unit)


def compare_numbers(gold: str, reply: str) -> bool | None:
    """Compare two normal forms; None if one of them is not made of numbers.

    Equal tuples and intervals have the same brackets and order of numbers; equal sets, and lists without
    brackets, have the same numbers.
    """
    ours, theirs = _read(gold), _read(reply)
    if ours is None or theirs is None:
        return None
    (brackets, numbers), (their_brackets, their_numbers) = ours, theirs
    if brackets != their_brackets or len(numbers) != len(their_numbers):
        return False
    if brackets in ("", "\\{\\}"):
        left = list(their_numbers)
        for number in numbers:
            match = next((other for other in left if number.equals(other)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    return all(our.equals(their) for our, their in zip(numbers, their_numbers, strict=True))


def _read(form: str) -> tuple[str, list[Number]] | None:
    """Return the brackets and the numbers between them; no brackets for a number or a bare list."""
    number = parse_exact(form)
    if number is not None:
        return "", [number]
    brackets, inner = "", form
    for opening in _BRACKETS:
        for closing in _BRACKETS.values():
            if form.startswith(opening) and form.endswith(closing):
                brackets, inner = opening + closing, form[len(opening) : -len(closing)]
    pieces = inner.split(",")
    if len(pieces) > _MAX_ITEMS or (len(pieces) == 1 and not brackets):
        return None
    numbers = [value for piece in pieces if (value := parse_exact(piece)) is not None]
    return (brackets, numbers) if len(numbers) == len(pieces) else None
