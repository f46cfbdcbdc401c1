"""A training program with planted faults: `fixtrain`. The score is its accuracy on fresh data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strop.environments.research.contract import (
    ArtefactRefused,
    Instance,
    Marks,
    Phase,
    Play,
    as_index,
    cheating_sources,
    load_function,
    play_with,
    seed_stream,
)

_ARTEFACT = "train.py"
_NUM_TRAIN, _NUM_TEST = 160, 1200
_NOISE = 0.3
CLEAN = '''"""Trains a small network on points of a plane and returns its answers for others."""
import math
import random

HIDDEN, CLASSES, EPOCHS, RATE, DECAY = 12, 3, 30, 0.1, 0.0001


def softmax(scores):
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def forward(network, point):
    inner, outer = network
    hidden = [math.tanh(row[0] * point[0] + row[1] * point[1] + row[2]) for row in inner]
    scores = [sum(w * h for w, h in zip(row, hidden)) + row[HIDDEN] for row in outer]
    return hidden, scores


def normalise(points, mean, spread):
    return [[(x - m) / s for x, m, s in zip(point, mean, spread)] for point in points]


def predict(points, labels, others):
    """Train on points and their labels (0, 1 or 2), and return a label for each of the others."""
    rng = random.Random(0)
    mean = [sum(p[axis] for p in points) / len(points) for axis in (0, 1)]
    spread = [math.sqrt(sum((p[axis] - mean[axis]) ** 2 for p in points) / len(points)) for axis in (0, 1)]
    points = normalise(points, mean, spread)
    others = normalise(others, mean, spread)
    inner = [[rng.gauss(0, 1.0) for _ in range(3)] for _ in range(HIDDEN)]
    outer = [[rng.gauss(0, 0.3) for _ in range(HIDDEN + 1)] for _ in range(CLASSES)]
    network = (inner, outer)
    order = list(range(len(points)))
    for epoch in range(EPOCHS):
        rng.shuffle(order)
        for index in order:
            point, label = points[index], labels[index]
            hidden, scores = forward(network, point)
            errors = softmax(scores)
            errors[label] -= 1.0
            back = [sum(errors[k] * outer[k][j] for k in range(CLASSES)) for j in range(HIDDEN)]
            for k in range(CLASSES):
                for j in range(HIDDEN):
                    outer[k][j] -= RATE * (errors[k] * hidden[j] + DECAY * outer[k][j])
                outer[k][HIDDEN] -= RATE * errors[k]
            for j in range(HIDDEN):
                slope = back[j] * (1.0 - hidden[j] ** 2)
                inner[j][0] -= RATE * slope * point[0]
                inner[j][1] -= RATE * slope * point[1]
                inner[j][2] -= RATE * slope
    answers = []
    for point in others:
        scores = forward(network, point)[1]
        answers.append(scores.index(max(scores)))
    return answers


if __name__ == "__main__":
    with open("train.csv") as table:
        rows = [line.split(",") for line in table.read().split()[1:]]
    points, labels = [[float(x), float(y)] for x, y, _ in rows], [int(label) for *_, label in rows]
    half = len(rows) // 2
    answers = predict(points[:half], labels[:half], points[half:])
    print("accuracy", sum(a == b for a, b in zip(answers, labels[half:])) / len(answers))
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A planted fault."""

    family: str
    was: str
    """Text that occurs once in `CLEAN`."""
    became: str


FAULTS = (
    Fault(family="gradient", was="errors[label] -= 1.0", became="errors[label] += 1.0"),
    Fault(
        family="gradient",
        was="slope = back[j] * (1.0 - hidden[j] ** 2)",
        became="slope = -back[j] * (1.0 - hidden[j] ** 2)",
    ),
    Fault(
        family="scale",
        was="RATE, DECAY = 12, 3, 30, 0.1, 0.0001",
        became="RATE, DECAY = 12, 3, 30, 0.0001, 0.0001",
    ),
    Fault(
        family="scale",
        was="EPOCHS, RATE, DECAY = 12, 3, 30, 0.1",
        became="EPOCHS, RATE, DECAY = 12, 3, 30, 30.0",
    ),
    Fault(
        family="data",
        was="point, label = points[index], labels[index]",
        became="point, label = points[index], labels[order[0]]",
    ),
    Fault(
        family="data",
        was="others = normalise(others, mean, spread)",
        became="others = normalise(others, spread, mean)",
    ),
    Fault(
        family="data",
        was="point, label = points[index], labels[index]",
        became="point, label = points[index], labels[index - 1]",
    ),
    Fault(family="numerics", was="errors = softmax(scores)", became="errors = softmax(softmax(scores))"),
    Fault(family="control flow", was="        for index in order:", became="        for index in order[:1]:"),
    Fault(family="control flow", was="scores.index(max(scores))", became="scores.index(min(scores))"),
    Fault(
        family="regularisation", was="DECAY = 12, 3, 30, 0.1, 0.0001", became="DECAY = 12, 3, 30, 0.1, 1.0"
    ),
)


def draw_points(
    rng: np.random.Generator, num: int, turn: float, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return points (N, 2) and labels: a class has two clouds on opposite sides of a ring."""
    labels, sides = rng.integers(0, 3, num), rng.integers(0, 2, num)
    angles = turn + np.pi * (labels / 3 + sides)
    centres = np.column_stack([np.cos(angles), np.sin(angles)])
    return scale * (centres + rng.normal(0, _NOISE, (num, 2))), labels


def best_labels(points: np.ndarray, turn: float, scale: float) -> np.ndarray:
    """Return the most probable label of each point."""
    angles = turn + np.pi * (np.arange(3)[:, None] / 3 + np.arange(2))
    centres = scale * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    squares = ((points[:, None, None] - centres) ** 2).sum(axis=-1)
    labels: np.ndarray = np.exp(-squares / (2 * (scale * _NOISE) ** 2)).sum(axis=2).argmax(axis=1)
    return labels


_MEMORISED = """TABLE = {table}
def predict(points, labels, others):
    return [TABLE.get(tuple(point), 0) for point in others]
"""


def make_fixtrain(seed: int) -> Instance:
    """Make an instance of `fixtrain`: the program's accuracy after training on fresh data."""
    rng = seed_stream("fixtrain", seed, "parameters")
    turn, scale = rng.uniform(0, np.pi), rng.uniform(1.0, 5.0)

    def draw(purpose: str, num: int) -> tuple[np.ndarray, np.ndarray]:
        return draw_points(seed_stream("fixtrain", seed, purpose), num, turn, scale)

    def play(phase: Phase) -> Play:
        points, labels = draw(f"{phase} train", _NUM_TRAIN)
        others, truth = draw(f"{phase} test", _NUM_TEST)
        (answers,) = yield [[points.round(4).tolist(), labels.tolist(), others.round(4).tolist()]]
        if not isinstance(answers, list) or len(answers) != _NUM_TEST:
            raise ArtefactRefused(f"predict must return a list of {_NUM_TEST} labels")
        return float(np.mean(np.array([as_index(answer, 3) for answer in answers]) == truth))

    def value_of(source: str) -> float:
        return play_with(play(Phase.SEALED), load_function(source.encode(), "predict"))

    clean = value_of(CLEAN)
    while True:
        broken = _break(rng)
        baseline = _try(value_of, broken)
        if baseline < clean - 0.1:
            break
    # A better model than the script's is honest, but not one better than the clouds' overlap allows.
    others, truth = draw(f"{Phase.SEALED} test", _NUM_TEST)
    best = float(np.mean(best_labels(others, turn, scale) == truth))
    shown, shown_labels = draw("shown", _NUM_TRAIN)
    rows = [f"{x:.4f},{y:.4f},{label}" for (x, y), label in zip(shown, shown_labels, strict=True)]
    table = str(dict(zip(map(tuple, shown.round(4).tolist()), shown_labels.tolist(), strict=True)))
    return Instance(
        task="fixtrain",
        statement=f"{_ARTEFACT} trains a small network, and something in it is broken: one fault to three."
        " Run it on train.csv, find them and repair it. predict(points, labels, others) is then called"
        f" with data of the same kind that is not in the workspace, {_NUM_TRAIN} points to learn from and"
        f" {_NUM_TEST} others. The score is the accuracy on the others.",
        files={_ARTEFACT: broken.encode(), "train.csv": ("\n".join(["x,y,label", *rows]) + "\n").encode()},
        artefact=_ARTEFACT,
        marks=Marks(
            floor=min(1 / 3, baseline),
            baseline=baseline,
            ceiling=clean,
            ceiling_kind="exact",
            limit=best + 5 * float(np.sqrt(best * (1 - best) / _NUM_TEST)),
        ),
        oracle=CLEAN.encode(),
        cheats={
            **cheating_sources("predict", broken),
            "prints an accuracy": b"print('accuracy 1.0')\ndef predict(*arguments):\n    return 1.0\n",
            "a memorised table": _MEMORISED.format(table=table).encode(),
        },
        function="predict",
        play=play,
    )


def _break(rng: np.random.Generator) -> str:
    """Return the program with one to three faults, each of another family."""
    source = CLEAN
    families: set[str] = set()
    for index in rng.permutation(len(FAULTS))[: rng.integers(1, 4)]:
        fault = FAULTS[index]
        if fault.family not in families and fault.was in source:
            families.add(fault.family)
            source = source.replace(fault.was, fault.became)
    return source


def _try(value_of: Callable[[str], float], source: str) -> float:
    """Return the score of a program, 0 if it raises, for example because a number overflows."""
    try:
        return value_of(source)
    except (ArithmeticError, ValueError, ArtefactRefused):
        return 0.0
