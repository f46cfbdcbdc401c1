"""Lengths of time as people write them for jobs: `90s`, `30m`, `2h`, `5d`, `2:30:00`, `1-12:00:00`."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
DURATION_PATTERN = rf"^(?:{_WITH_UNIT.pattern}|{_CLOCK.pattern})$"
DURATION_HELP = "90s, 30m, 2h, 5d, HH:MM:SS or D-HH:MM:SS"


def parse_duration_s(text: str) -> float:
    """Return the seconds that a text names.

    A bare number is refused: for one program it is minutes, for another seconds, and 10:00 likewise.
    Raises: ValueError if it is of no such form.
    """
    if match := _WITH_UNIT.fullmatch(text):
        return float(match[1]) * _UNITS_S[match[2]]
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)
    raise ValueError(f"{text!r} is no length of time; allowed: {DURATION_HELP}")


def format_duration(duration_s: float) -> str:
    """Return whole seconds, rounded up, as D-HH:MM:SS or HH:MM:SS, the form of schedulers."""
    whole = -int(-duration_s // 1)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
