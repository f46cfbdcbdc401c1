from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.spec.durations import format_duration, parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("1.5h", 5400.0),
        ("30m", 1800.0),
        ("5d", 432000.0),
        # 2 * 3600 + 30 * 60.
        ("2:30:00", 9000.0),
        # 86400 + 12 * 3600.
        ("1-12:00:00", 129600.0),
        ("100:00:01", 360001.0),
    ],
)
def test_what_people_write_by_hand(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "90", "10:00", "2 h", "-1h", "1:60:00", "1h30m", "nan", "1e3s", "h", "1H"]
)
def test_what_has_two_meanings_or_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: 90s, 30m, 2h, 5d"):
        parse_duration_s(text)


@given(st.floats(min_value=0.0, max_value=3.2e7, allow_nan=False))
def test_a_formatted_duration_reads_back_rounded_up(seconds: float) -> None:
    assert parse_duration_s(format_duration(seconds)) == math.ceil(seconds)


def test_the_form_of_schedulers_by_hand() -> None:
    assert [format_duration(one) for one in (0.0, 59.2, 3600.0, 90061.0)] == [
        "00:00:00",
        "00:01:00",
        "01:00:00",
        # One day, one hour, one minute, one second.
        "1-01:01:01",
    ]
