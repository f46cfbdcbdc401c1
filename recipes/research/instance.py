"""One instance of a research task: the files that the model is given, and how its work is scored."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One drawn instance of a task. Scores are higher for better work."""

    files: dict[str, str]
    """The workspace at the beginning, by path; the file that is improved is there in a first version."""
    score: Callable[[str, str], float]
    """Scores the artefact's data, or its program's answers, on the hidden draws of a phase: "dev" or "final".

    Raises: ValueError for data in another form.
    """
    best: str
    """An artefact that earns full marks, made with the generator's knowledge."""
    first_score: float
    """Score of the first version on the final draws, which earns nothing."""
    best_score: float
    limit: float
    """No honest artefact has a higher score; the hidden answers themselves have one."""
    questions: list[list[float]] | None = None
    """Arguments for the function `act` of a program; None: the artefact is data."""


def draws(task: str, number: int, purpose: str) -> np.random.Generator:
    """Return the random generator of one purpose of an instance, independent of the others."""
    return np.random.default_rng(zlib.crc32(f"{task}/{number}/{purpose}".encode()))


def phases(task: str, number: int, num_draws: int) -> dict[str, np.ndarray]:
    """Return which hidden draws belong to each phase: a fifth is for development."""
    is_dev = draws(task, number, "phases").random(num_draws) < 0.2
    return {"dev": is_dev, "final": ~is_dev}
