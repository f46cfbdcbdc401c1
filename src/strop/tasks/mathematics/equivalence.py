"""Whether a reply's answer is the gold answer, in stages: spelling, numbers, symbols.

A stage decides where it can: two equal spellings are equal, two numbers are equal or not, and only
what is left is asked of sympy. So most answers cost some microseconds.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

from strop.tasks.mathematics.normal_form import normal_form, without_name
from strop.tasks.mathematics.numbers import compare_numbers
from strop.tasks.mathematics.symbolic import equal_by_symbols, is_bounded, require_math_verify

_MAX_CHARS = 2000
"""A longer answer is no answer; the longest gold answers of MATH have about 160 characters."""


_RELATION = re.compile(r"=|\\in(?![a-zA-Z])")


class Strictness(StrEnum):
    """Which stages may find an answer right; the values of `task.strictness`."""

    STRICT = "strict"
    """Spelling only, and the answer must stand in one box."""
    STANDARD = "standard"
    """Spelling and numbers."""
    SYMBOLIC = "symbolic"
    """Spelling, numbers and symbols."""


def answers_equal(gold: str, reply: str, strictness: Strictness) -> bool:
    """Whether two answers are equal.

    Raises: ConfigError if symbols are to be compared and math-verify is not installed; whatever
        math-verify raises on the gold answer.
    """
    verdict = equal_at_once(gold, reply, strictness)
    return equal_by_symbols(*_forms(gold, reply)) if verdict is None else verdict


def equal_at_once(gold: str, reply: str, strictness: Strictness) -> bool | None:
    """Return what `answers_equal` does, in a time that their lengths bound; None where symbols must tell."""
    if len(reply) > _MAX_CHARS:
        return False
    ours, theirs = _forms(gold, reply)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    if strictness is Strictness.STRICT:
        return False
    verdict = compare_numbers(ours, theirs)
    if verdict is not None or strictness is Strictness.STANDARD:
        return bool(verdict)
    # math-verify takes 'X' for 'x'.
    can_be_asked = ours.lower() != theirs.lower() and is_bounded(ours) and is_bounded(theirs)
    return None if can_be_asked else False


def harness_math_verify(solution: str, reply: str) -> bool:
    """Judge as the metric `math_verify` of lm-eval 0.4.13's task `minerva_math` does.

    It parses the whole worked solution and the whole reply, with math-verify's own extraction. Its time
    limits are left out: call it where processes are killed. For parity with published scores only, and
    exact with the ANTLR runtime that lm-eval asks for, 4.11: with 4.13 math-verify also reads a percent sign.
    Raises: ConfigError if math-verify is not installed.
    """
    library = require_math_verify()
    parsed_gold = library.parse(solution, parsing_timeout=None)
    return bool(library.verify(parsed_gold, library.parse(reply, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _gold_form(gold: str) -> str:
    return normal_form(gold)


def _forms(gold: str, reply: str) -> tuple[str, str]:
    """Return both normal forms, without 'x=' where only one has it; 'x=2' and 'y=2' stay different."""
    ours, theirs = _gold_form(gold), normal_form(reply)
    if not _RELATION.search(theirs):
        return without_name(ours) or ours, theirs
    if not _RELATION.search(ours):
        return ours, without_name(theirs) or theirs
    return ours, theirs
