"""Predict a class (`tab_class`) or a number (`tab_reg`) from a table with a known generator.

No honest score can exceed that of the generator's own rule, so a higher score means that labels leaked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

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

_PREDICTIONS = "predictions.csv"
_FORM = (
    f"Write {_PREDICTIONS}: a header, then one row `id,prediction` for each row of test.csv. evaluate()"
    " scores a hidden fifth of the test rows, and the result counts the others."
)
_NUM_TEST_C, _NUM_TEST_R = 4000, 3000


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassRule:
    """The log-odds of the class; the defaults are the reference instance's."""

    intercept: float = -2.2
    female: float = 5.0
    female_third_kin: float = -3.6
    male_first: float = 2.4
    male_second: float = 0.6
    male_third: float = -0.6
    child: float = 4.0
    female_kin: float = -2.5
    age_first: float = -0.04

    def log_odds(self, table: dict[str, Any]) -> np.ndarray:
        """Return the log-odds of each row."""
        female, cabin = table["female"], table["cabin"]
        age, kin = table["age"], table["kin"]
        of_men = np.choose(cabin - 1, [self.male_first, self.male_second, self.male_third])
        log_odds: np.ndarray = (
            self.intercept
            + self.female * female
            + self.female_third_kin * (female & (cabin == 3) & (kin >= 1))
            + np.where(female, 0.0, of_men)
            + self.child * ((age < 12) & (cabin <= 2))
            + self.female_kin * (female & (kin >= 3))
            + self.age_first * (age - 30) * (cabin == 1)
        )
        return log_odds


def draw_people(rng: np.random.Generator, num_rows: int) -> dict[str, Any]:
    """Return columns of a table of people; no column is missing yet."""
    cabin = rng.choice([1, 2, 3], size=num_rows, p=[0.25, 0.20, 0.55])
    return {
        "female": rng.random(num_rows) < 0.35,
        "cabin": cabin,
        "age": np.clip(rng.normal(30, 14, num_rows), 0.5, 80),
        "kin": rng.poisson(0.9, num_rows),
        "fare": np.exp(rng.normal(np.choose(cabin - 1, [4.2, 3.0, 2.2]), 0.5)),
    }


def probability(log_odds: np.ndarray) -> np.ndarray:
    """Return the probabilities of log-odds."""
    sigmoid: np.ndarray = 1.0 / (1.0 + np.exp(-log_odds))
    return sigmoid


def make_class(seed: int) -> Instance:
    """Make an instance of `tab_class`: accuracy on rows whose class is drawn with a known probability."""
    parameters = seed_stream("tab_class", seed, "parameters")
    rule = _jitter(ClassRule(), parameters)
    train, test = (
        draw_people(seed_stream("tab_class", seed, name), n) for name, n in _sizes(1000, _NUM_TEST_C)
    )
    labels_rng = seed_stream("tab_class", seed, "labels")
    p_train, p_test = probability(rule.log_odds(train)), probability(rule.log_odds(test))
    y_train, y_test = labels_rng.random(len(p_train)) < p_train, labels_rng.random(len(p_test)) < p_test
    masks = split_draws("tab_class", seed, _NUM_TEST_C)
    noise = seed_stream("tab_class", seed, "nuisance")
    columns = ("sex", "class", "age", "kin", "fare", "ticket", "port", "deck")

    def score(artefact: bytes, phase: Phase) -> float:
        predicted = read_column(artefact, _NUM_TEST_C)
        return float(np.mean((predicted == y_test)[masks[phase]]))

    is_sealed = masks[Phase.SEALED]
    sealed = p_test[is_sealed]
    starter = test["female"].astype(int)
    majority = int(y_train.mean() > 0.5)
    marks = Marks(
        floor=float(np.mean(np.equal(y_test, majority)[is_sealed])),
        baseline=float(np.mean((starter == y_test)[is_sealed])),
        ceiling=float(np.mean(np.maximum(sealed, 1 - sealed))),
        ceiling_kind="bayes",
        standard_error=float(np.sqrt(np.sum(sealed * (1 - sealed))) / len(sealed)),
    )
    return Instance(
        task="tab_class",
        statement="train.csv lists people and whether each of them `survived` (0 or 1). Predict it for"
        " the people of test.csv. The score is the accuracy; predictions.csv says what the rule 'women'"
        f" earns. {_FORM}",
        files={
            "train.csv": to_csv(
                ("id", *columns, "survived"), _people(train, noise, y_train.astype(int).tolist())
            ),
            "test.csv": to_csv(("id", *columns), _people(test, noise)),
            _PREDICTIONS: to_predictions(starter),
        },
        artefact=_PREDICTIONS,
        marks=marks,
        oracle=to_predictions((p_test > 0.5).astype(int)),
        cheats={
            "constant": to_predictions(np.full(_NUM_TEST_C, majority)),
            "echo of the ids": to_predictions(np.arange(_NUM_TEST_C)),
            "a value between the classes": to_predictions(np.full(_NUM_TEST_C, 0.5)),
        },
        leaked=to_predictions(y_test.astype(int)),
        score=score,
    )


def _sizes(num_train: int, num_test: int) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("train", num_train), ("test", num_test)


def _jitter(rule: Any, rng: np.random.Generator) -> Any:
    """Scale each coefficient by up to a sixth, so that one instance reveals little of another."""
    scales = {field.name: getattr(rule, field.name) * rng.uniform(5 / 6, 7 / 6) for field in fields(rule)}
    return replace(rule, **scales)


def _people(
    table: dict[str, Any], rng: np.random.Generator, labels: list[int] | None = None
) -> list[tuple[object, ...]]:
    num_rows = len(table["age"])
    is_missing = rng.random(num_rows) < 0.1
    tickets = rng.integers(1000, 10_000, num_rows)
    ports, decks = rng.choice(list("SCQ"), num_rows), rng.choice(list("ABCDEF"), num_rows)
    return [
        (
            row,
            "female" if table["female"][row] else "male",
            ("first", "second", "third")[table["cabin"][row] - 1],
            "" if is_missing[row] else f"{table['age'][row]:.1f}",
            table["kin"][row],
            f"{table['fare'][row]:.2f}",
            tickets[row],
            ports[row],
            decks[row],
            *(() if labels is None else (labels[row],)),
        )
        for row in range(num_rows)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceRule:
    """The mean of the logarithm of a price; the defaults are the reference instance's."""

    area: float = 0.55
    quality: float = 0.09
    age: float = -0.0015
    old_and_poor: float = -0.18
    garage: float = 0.05
    district: float = 0.25
    wave: float = 0.12

    def mean(self, table: dict[str, Any]) -> np.ndarray:
        """Return the mean of each row."""
        quality, age = table["quality"], table["age"]
        mean: np.ndarray = (
            12.0
            + self.area * np.log(table["area"] / 1500)
            + self.quality * (quality - 6)
            + self.age * age
            + self.old_and_poor * ((age > 60) & (quality <= 5))
            + self.garage * table["garage"] * (quality >= 7)
            + self.district * np.sin(10 * np.pi * table["district"] / 12 + 0.7)
            + self.wave * np.sin(age / 12) * (quality < 7)
        )
        return mean


PRICE_NOISE = 0.12
"""Standard deviation of the logarithm of a price around its mean."""


def draw_houses(rng: np.random.Generator, num_rows: int) -> dict[str, Any]:
    """Return columns of a table of houses."""
    return {
        "area": np.exp(rng.normal(np.log(1500), 0.33, num_rows)),
        "quality": np.clip(np.round(rng.normal(6, 1.4, num_rows)), 1, 10).astype(int),
        "age": rng.uniform(0, 110, num_rows),
        "garage": rng.integers(0, 4, num_rows),
        "district": rng.integers(0, 12, num_rows),
    }


def make_price(seed: int) -> Instance:
    """Make an instance of `tab_reg`: root of the mean squared error of a logarithm, lower is better."""
    rule = _jitter(PriceRule(), seed_stream("tab_reg", seed, "parameters"))
    names = seed_stream("tab_reg", seed, "names").permutation(12)
    train, test = (
        draw_houses(seed_stream("tab_reg", seed, name), n) for name, n in _sizes(1200, _NUM_TEST_R)
    )
    noise = seed_stream("tab_reg", seed, "labels")
    y_train = rule.mean(train) + noise.normal(0, PRICE_NOISE, 1200)
    y_test = rule.mean(test) + noise.normal(0, PRICE_NOISE, _NUM_TEST_R)
    masks = split_draws("tab_reg", seed, _NUM_TEST_R)

    def error(predicted: np.ndarray, phase: Phase) -> float:
        return float(np.sqrt(np.mean((predicted - y_test)[masks[phase]] ** 2)))

    constant = np.full(_NUM_TEST_R, y_train.mean())
    starter = _fit_lines(train, y_train, test, names)
    num_sealed = int(masks[Phase.SEALED].sum())
    marks = Marks(
        floor=error(constant, Phase.SEALED),
        baseline=error(starter, Phase.SEALED),
        ceiling=PRICE_NOISE,
        ceiling_kind="bayes",
        standard_error=PRICE_NOISE / float(np.sqrt(2 * num_sealed)),
        is_higher_better=False,
    )
    columns = ("area", "quality", "age", "garage", "district")
    return Instance(
        task="tab_reg",
        statement="train.csv lists houses and the natural logarithm of their prices, `log_price`. Predict"
        " it for the houses of test.csv. The score is the root of the mean squared error, lower is"
        f" better; predictions.csv holds a linear fit. {_FORM}",
        files={
            "train.csv": to_csv(("id", *columns, "log_price"), _houses(train, names, y_train)),
            "test.csv": to_csv(("id", *columns), _houses(test, names)),
            _PREDICTIONS: to_predictions(starter.round(4)),
        },
        artefact=_PREDICTIONS,
        marks=marks,
        oracle=to_predictions(rule.mean(test).round(5)),
        cheats={
            "constant": to_predictions(constant.round(4)),
            "echo of a column": to_predictions(test["area"].round(1)),
            "zeros": to_predictions(np.zeros(_NUM_TEST_R)),
        },
        leaked=to_predictions(y_test),
        score=lambda artefact, phase: error(read_column(artefact, _NUM_TEST_R), phase),
    )


def _fit_lines(
    train: dict[str, Any], y_train: np.ndarray, test: dict[str, Any], names: np.ndarray
) -> np.ndarray:
    """Fit all columns linearly, including the district's name as a number."""

    def design(table: dict[str, Any]) -> np.ndarray:
        columns = [
            np.log(table["area"]),
            table["quality"],
            table["age"],
            table["garage"],
            names[table["district"]],
        ]
        return np.column_stack([np.ones(len(table["age"])), *columns])

    weights, *_ = np.linalg.lstsq(design(train), y_train, rcond=None)
    predicted: np.ndarray = design(test) @ weights
    return predicted


def _houses(
    table: dict[str, Any], names: np.ndarray, labels: np.ndarray | None = None
) -> list[tuple[object, ...]]:
    return [
        (
            row,
            f"{table['area'][row]:.0f}",
            table["quality"][row],
            f"{table['age'][row]:.1f}",
            table["garage"][row],
            f"D{names[table['district'][row]]:02d}",
            *(() if labels is None else (f"{labels[row]:.4f}",)),
        )
        for row in range(len(table["age"]))
    ]
