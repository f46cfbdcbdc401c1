"""Figures that have a goal of their own, rather than a rival: one line each, and a result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness import write_result
from benchmarks.machine import load_average, machine_facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured value, with the goal that it is held against."""

    name: str
    unit: str
    value: float
    measured: tuple[float, ...]
    """What the value was chosen from."""
    at_least: float | None = None
    at_most: float | None = None

    @classmethod
    def once(cls, name: str, unit: str, value: float, **goal: float) -> Figure:
        """Return a value that was measured once."""
        return cls(name=name, unit=unit, value=value, measured=(value,), **goal)

    @property
    def is_reached(self) -> bool:
        """Whether the value is within its bounds."""
        is_high = self.at_least is None or self.value >= self.at_least
        return is_high and (self.at_most is None or self.value <= self.at_most)

    def describe(self) -> str:
        """Return the figure as a line."""
        if self.at_least is not None:
            goal = f"at least {self.at_least:g}"
        else:
            goal = "-" if self.at_most is None else f"at most {self.at_most:g}"
        verdict = "" if goal == "-" else "pass" if self.is_reached else "FAIL"
        return f"{self.name:44} {self.value:10.3f} {self.unit:18} goal {goal:14} {verdict}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one benchmark found."""

    figures: Sequence[Figure]
    details: dict[str, Any] = field(default_factory=dict)
    """What the figures were made from, for the result file."""


def tell_figures(name: str, measured: Measured, load_before: float, *, is_kept: bool) -> bool:
    """Print the figures and keep them; say if all goals are reached."""
    for figure in measured.figures:
        print(figure.describe())
    if is_kept:
        write_result(
            name,
            {
                "machine": machine_facts(),
                "load": {"before": load_before, "after": load_average()},
                "figures": [{**asdict(one), "is_reached": one.is_reached} for one in measured.figures],
                **measured.details,
            },
        )
    return all(figure.is_reached for figure in measured.figures)
