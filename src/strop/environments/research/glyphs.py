"""Recognise digits anywhere on a noisy canvas: `glyphs`. Comparing pixels by position hardly helps."""

from __future__ import annotations

import numpy as np

from strop.environments.research.contract import (
    Instance,
    Marks,
    Phase,
    read_column,
    seed_stream,
    split_draws,
    to_csv,
    to_predictions,
)

SIZE = 12
_HEIGHT, _WIDTH = 7, 5
_NUM_TRAIN, _NUM_TEST = 1000, 2500
_ARTEFACT = "predictions.csv"
_SHAPES = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


def digit_shapes() -> np.ndarray:
    """Return the ten digits, (10, 7, 5), of zeros and ones."""
    return np.array([[[int(dot) for dot in row] for row in shape.split()] for shape in _SHAPES], dtype=float)


def place_everywhere(shapes: np.ndarray) -> np.ndarray:
    """Return each shape at each position of the canvas, (10, 48, 144)."""
    spots = [(top, left) for top in range(SIZE - _HEIGHT + 1) for left in range(SIZE - _WIDTH + 1)]
    placed = np.zeros((len(shapes), len(spots), SIZE, SIZE))
    for index, (top, left) in enumerate(spots):
        placed[:, index, top : top + _HEIGHT, left : left + _WIDTH] = shapes
    return placed.reshape(len(shapes), len(spots), SIZE * SIZE)


def classify(images_N: np.ndarray, placed: np.ndarray, noise: float) -> np.ndarray:
    """Return the most probable digit of each image (N, 144), by its likelihood summed over positions."""
    flat = placed.reshape(-1, SIZE * SIZE)
    fit = (images_N @ flat.T - 0.5 * (flat**2).sum(axis=1)) / noise**2
    by_digit = fit.reshape(len(images_N), len(placed), -1)
    peak = by_digit.max(axis=2)
    digits: np.ndarray = (peak + np.log(np.exp(by_digit - peak[..., None]).sum(axis=2))).argmax(axis=1)
    return digits


def draw_images(
    rng: np.random.Generator, placed: np.ndarray, noise: float, num_images: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 144) and their digits."""
    digits = rng.integers(0, len(placed), num_images)
    spots = rng.integers(0, placed.shape[1], num_images)
    return placed[digits, spots] + rng.normal(0, noise, (num_images, SIZE * SIZE)), digits


def make_glyphs(seed: int) -> Instance:
    """Make an instance of `glyphs`: contrast, noise and the digits' labels are drawn."""
    rng = seed_stream("glyphs", seed, "parameters")
    contrast = rng.uniform(0.6, 1.0)
    # Enough noise that the true labels score above any honest answer.
    noise = contrast * rng.uniform(0.62, 0.72)
    placed = place_everywhere(digit_shapes()[rng.permutation(10)] * contrast)
    train, y_train = draw_images(seed_stream("glyphs", seed, "train"), placed, noise, _NUM_TRAIN)
    test, y_test = draw_images(seed_stream("glyphs", seed, "test"), placed, noise, _NUM_TEST)
    masks = split_draws("glyphs", seed, _NUM_TEST)
    best = classify(test, placed, noise)
    nearest = y_train[((train**2).sum(axis=1)[None] - 2 * test @ train.T).argmin(axis=1)]

    def accuracy(predicted: np.ndarray, phase: Phase) -> float:
        return float(np.mean((predicted == y_test)[masks[phase]]))

    ceiling = accuracy(best, Phase.SEALED)
    pixels = [f"p{index}" for index in range(SIZE * SIZE)]
    constant = np.full(_NUM_TEST, np.bincount(y_train).argmax())
    return Instance(
        task="glyphs",
        statement=f"train.csv holds images of {SIZE} by {SIZE} pixels, row by row, in tenths, and what is"
        " on them, `label`: one of ten small shapes, somewhere on the canvas, under noise. Predict the"
        f" label of each image of test.csv. Write {_ARTEFACT}: a header, then one row `id,prediction` for"
        " each. The score is the accuracy; the starter is what the nearest training image says."
        " evaluate() scores a hidden fifth of the test images, and the result counts the others.",
        files={
            "train.csv": to_csv(
                ("id", *pixels, "label"),
                [(row, *image, y_train[row]) for row, image in enumerate(_in_tenths(train))],
            ),
            "test.csv": to_csv(
                ("id", *pixels), [(row, *image) for row, image in enumerate(_in_tenths(test))]
            ),
            _ARTEFACT: to_predictions(nearest),
        },
        artefact=_ARTEFACT,
        marks=Marks(
            floor=accuracy(constant, Phase.SEALED),
            baseline=accuracy(nearest, Phase.SEALED),
            ceiling=ceiling,
            ceiling_kind="bayes",
            standard_error=float(np.sqrt(ceiling * (1 - ceiling) / masks[Phase.SEALED].sum())),
        ),
        oracle=to_predictions(best),
        cheats={
            "constant": to_predictions(constant),
            "echo of the ids": to_predictions(np.arange(_NUM_TEST)),
            "every label at once": to_csv(
                ("id", "prediction"), [(row, label) for row in range(_NUM_TEST) for label in range(10)]
            ),
        },
        leaked=to_predictions(y_test),
        score=lambda artefact, phase: accuracy(read_column(artefact, _NUM_TEST), phase),
    )


def _in_tenths(images: np.ndarray) -> list[list[int]]:
    tenths: list[list[int]] = np.rint(10 * images).astype(int).tolist()
    return tenths
