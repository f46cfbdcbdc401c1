"""Tests of the values between candidate and judge."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tasks.code.runner import decode, encode

_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False), st.decimals(allow_nan=False), st.fractions(),
    st.dates(), st.times(), st.datetimes(), st.timedeltas(),
)  # fmt: skip
_HASHABLE = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
_VALUES = st.recursive(
    _HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(_HASHABLE, inner, max_size=3),
        st.sets(_HASHABLE, max_size=3),
    ),
    max_leaves=10,
)


def no_reference(value: Any) -> NoReturn:
    raise TypeError(type(value).__name__)


def travel(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, no_reference))), no_reference)


def shape(value: Any) -> Any:
    """A value with its types, so that 1, 1.0 and True differ."""
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    if isinstance(value, dict):
        return dict, [(shape(key), shape(item)) for key, item in value.items()]
    return type(value), value


@given(_VALUES)
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    assert shape(travel(value)) == shape(value)


def test_values_by_hand() -> None:
    assert travel(10**4000) == 10**4000
    assert math.isnan(travel(math.nan))
    assert str(travel(-0.0)) == "-0.0"
    assert travel(range(1, 9, 2)) == range(1, 9, 2)
    assert travel({1: int, (2,): None}) == {1: int, (2,): None}
    assert travel(bytearray(b"\0")) == bytearray(b"\0")
    assert travel("\ud800") == "\ud800"


@pytest.mark.parametrize(
    "data",
    [
        ["pickle", "gASVBQ=="],
        ["type", "Popen"],
        ["type", "print"],
        ["int", "5"],
        ["dict", ["list"], 1],
        ["dict", 1],
        ["set", ["list", ["list"]]],
        ["date", ["bytes", "00"]],
        ["range", 1, 2, 3, 4],
        ["ref", "0", "1"],
        ["named", "N", ["list", "__eq__"], 1],
        ["Fraction", 1, 0],
        [["set"]],
        [],
    ],
)
def test_malformed_values_are_refused(data: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError, ArithmeticError)):
        decode(data, no_reference)
