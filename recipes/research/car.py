"""A control task: a car in a valley, too weak to drive straight up the hill."""

from __future__ import annotations

import json

import numpy as np
from instance import Instance, draws

NUM_STEPS = 999
NUM_CARS = {"dev": 16, "final": 64}
PLACES = np.round(np.linspace(-1.2, 0.6, 37), 4)
# An even number: no state stands still, and each is pushed in the direction that it moves in.
SPEEDS = np.round(np.linspace(-0.07, 0.07, 28), 4)
STRENGTHS = (0.1, 0.14, 0.17, 0.2, 0.24, 0.28, 0.33, 0.4, 0.5)
CONTROLLER = '''"""A driver to improve."""


def act(place, speed):
    """Return the push, from -1 to 1."""
    return {strength} if speed >= 0 else -{strength}
'''
SIMULATOR = '''"""The car, to practise with: drive(act) returns what one drive earns."""

import math
import random


def drive(act):
    place, speed, total = random.uniform(-0.6, -0.4), 0.0, 0.0
    for _ in range({steps}):
        push = min(1.0, max(-1.0, act(place, speed)))
        total -= 0.1 * push * push
        speed = min(0.07, max(-0.07, speed + {power} * push - {slope} * math.cos(3 * place)))
        place = min(0.6, max(-1.2, place + speed))
        if place <= -1.2 and speed < 0:
            speed = 0.0
        if place >= 0.45:
            return total + 100.0
    return total


if __name__ == "__main__":
    from controller import act

    print(sum(drive(act) for _ in range(20)) / 20)
'''
ARTEFACT = "controller.py"
STATEMENT = (
    "A car in a valley is too weak to drive straight up the hill on its right. Improve"
    " act(place, speed) in controller.py, which returns the push. A drive earns 100 on the top, less 0.1"
    f" times the square of each push, and ends after {NUM_STEPS} steps; simulator.py is the same car. For"
    f" scoring, act is called for {len(PLACES)} places and {len(SPEEDS)} speeds, and the car always gets"
    " the push of the nearest. The score is the mean over many drives."
)


def make(number: int) -> Instance:
    """Make an instance: each has a hill and an engine of its own."""
    rng = draws("car", number, "parameters")
    power, slope = round(rng.uniform(0.0011, 0.0016), 5), round(rng.uniform(0.0022, 0.0027), 5)

    def score(answers: str, phase: str) -> float:
        try:
            pushes = np.asarray(json.loads(answers), dtype=float)
        except (TypeError, OverflowError, RecursionError):
            raise ValueError("act must return numbers") from None
        if pushes.shape != (len(PLACES) * len(SPEEDS),) or not np.isfinite(pushes).all():
            raise ValueError("act must return a number for each state")
        (found,) = drive(pushes[np.newaxis], phase)
        return found

    def drive(pushes: np.ndarray, phase: str) -> list[float]:
        tables = np.clip(pushes, -1.0, 1.0).reshape(-1, len(PLACES), len(SPEEDS))
        return _drive(tables, draws("car", number, phase).uniform(-0.6, -0.4, NUM_CARS[phase]), power, slope)

    directions = np.array([1.0 if speed >= 0 else -1.0 for _, speed in _states()])
    first_score, *scores = drive(np.outer((1.0, *STRENGTHS), directions), "final")
    best_score = max(scores)
    best = STRENGTHS[scores.index(best_score)]
    return Instance(
        files={
            "controller.py": CONTROLLER.format(strength=1.0),
            "simulator.py": SIMULATOR.format(steps=NUM_STEPS, power=power, slope=slope),
        },
        questions=_states(),
        score=score,
        best=CONTROLLER.format(strength=best),
        first_score=first_score,
        best_score=best_score,
        limit=100.0,
    )


def _states() -> list[list[float]]:
    return [[float(place), float(speed)] for place in PLACES for speed in SPEEDS]


def _drive(tables: np.ndarray, place: np.ndarray, power: float, slope: float) -> list[float]:
    """Return by table the mean of what drives earn that begin at these places."""
    num, of = len(place), np.repeat(np.arange(len(tables)), len(place))
    place, speed, total = np.tile(place, len(tables)), np.zeros(len(of)), np.zeros(len(tables))
    for _ in range(NUM_STEPS):
        row = np.rint((place + 1.2) / 1.8 * (len(PLACES) - 1)).astype(int)
        column = np.rint((speed + 0.07) / 0.14 * (len(SPEEDS) - 1)).astype(int)
        push = tables[of, row, column]
        speed = np.clip(speed + power * push - slope * np.cos(3 * place), -0.07, 0.07)
        place = np.clip(place + speed, -1.2, 0.6)
        speed = np.where((place <= -1.2) & (speed < 0), 0.0, speed)
        is_there = place >= 0.45
        total += np.bincount(of, 100.0 * is_there - 0.1 * push**2, minlength=len(tables))
        place, speed, of = place[~is_there], speed[~is_there], of[~is_there]
        if not len(place):
            break
    return (total / num).tolist()
