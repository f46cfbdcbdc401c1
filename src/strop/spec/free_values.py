"""Checks on tables that strop hands on without knowing their keys (`task.config`)."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

from strop.spec.base import SpecConflict
from strop.spec.display import KeyPath, dotted

MAX_DEPTH = 16
"""Tables and lists inside each other, at most; far above any real data set."""
MAX_INTEGER_BITS = 63
"""Beside the sign; what every reader of TOML and JSON can hold."""


def check_free_table(path: KeyPath, value: Any) -> None:
    """Refuse values that a TOML file could not give back: null, odd numbers, dates, other objects.

    `path` is the table, then the key at fault; what is nested deeper is refused under that key.
    Raises: SpecConflict naming the key.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_free_table((*path, str(name))[:3], item)
    elif isinstance(value, list):
        for item in value:
            check_free_table(path, item)
    elif not _is_plain(value):
        raise SpecConflict(
            {dotted(path): value},
            "this value cannot be handed on",
            allowed="texts, finite numbers, integers of 63 bits, true, false, lists and tables",
            next_step=_advice(value),
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= MAX_INTEGER_BITS
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str)


def _advice(value: Any) -> str:
    if value is None:
        return "leave the key out to get the data set's own default"
    if isinstance(value, dt.date | dt.time):
        return "write the date in quotes"
    return "correct the value"
