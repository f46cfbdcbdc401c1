"""A tabular task: who of the people in a table survived."""

from __future__ import annotations

import numpy as np
from instance import Instance, draws, phases

NUM_TRAIN, NUM_TEST = 600, 1500
COLUMNS = ("id", "sex", "class", "age", "kin", "fare", "deck")
ARTEFACT = "predictions.csv"
STATEMENT = (
    "train.csv lists people and whether each of them `survived` (0 or 1). Predict it for the"
    " people of test.csv: write predictions.csv, a header, then one row `id,prediction` for each. The"
    " first version says that women survive. The score is the accuracy."
)


def make(number: int) -> Instance:
    """Make an instance: each has a rule of its own, and people drawn from it."""
    rule = draws("people", number, "parameters").uniform(5 / 6, 7 / 6, 6)
    train, test = (_people(number, name, size) for name, size in (("train", NUM_TRAIN), ("test", NUM_TEST)))
    known, chance = _survived(train, rule), _survived(test, rule)
    labels = draws("people", number, "labels")
    known, truth = labels.random(NUM_TRAIN) < known, labels.random(NUM_TEST) < chance
    masks = phases("people", number, NUM_TEST)

    def score(text: str, phase: str) -> float:
        lines = text.split()
        if len(lines) != NUM_TEST + 1:
            raise ValueError(f"it must have a header and {NUM_TEST} rows")
        predicted = np.full(NUM_TEST, -1)
        for line in lines[1:]:
            row, _, value = line.partition(",")
            if not (row.isdecimal() and int(row[:9]) < NUM_TEST and value in ("0", "1")):
                raise ValueError(f"the row {line[:40]!r} is no id,prediction")
            predicted[int(row[:9])] = int(value)
        return float(np.mean((predicted == truth)[masks[phase]]))

    first, best = predictions(test["sex"] == "female"), predictions(chance > 0.5)
    final = chance[masks["final"]]
    return Instance(
        files={
            "train.csv": _write((*COLUMNS, "survived"), train, known),
            "test.csv": _write(COLUMNS, test),
            "predictions.csv": first,
        },
        score=score,
        best=best,
        first_score=score(first, "final"),
        best_score=score(best, "final"),
        # Five standard errors above the expected accuracy of the rule itself.
        limit=float(
            np.maximum(final, 1 - final).mean() + 5 * np.sqrt((final * (1 - final)).sum()) / len(final)
        ),
    )


def predictions(values: np.ndarray) -> str:
    """Return the table that is scored."""
    return "id,prediction\n" + "".join(f"{row},{value}\n" for row, value in enumerate(values.astype(int)))


def _people(number: int, name: str, size: int) -> dict[str, np.ndarray]:
    rng = draws("people", number, name)
    cabin = rng.choice([1, 2, 3], size=size, p=[0.25, 0.2, 0.55])
    return {
        "id": np.arange(size),
        "sex": np.where(rng.random(size) < 0.35, "female", "male"),
        "class": cabin,
        "age": np.clip(rng.normal(30, 14, size), 1, 80).round(),
        "kin": rng.poisson(0.9, size),
        "fare": np.exp(rng.normal(np.choose(cabin - 1, [4.2, 3.0, 2.2]), 0.5)).round(2),
        "deck": rng.choice(list("ABCDEF"), size),
    }


def _survived(table: dict[str, np.ndarray], rule: np.ndarray) -> np.ndarray:
    """Return the probability that each person survived."""
    is_female, cabin, kin = table["sex"] == "female", table["class"], table["kin"]
    log_odds = (
        np.where(is_female, 2.8 * rule[0], np.choose(cabin - 1, [0.2, -1.6, -2.8]))
        - 3.6 * rule[1] * (is_female & (cabin == 3) & (kin >= 1))
        - 2.5 * rule[2] * (is_female & (kin >= 3))
        + 4.0 * rule[3] * ((table["age"] < 12) & (cabin <= 2))
        - 0.04 * rule[4] * (table["age"] - 30) * (cabin == 1)
    )
    return 1 / (1 + np.exp(-log_odds))


def _write(header: tuple[str, ...], table: dict[str, np.ndarray], labels: np.ndarray | None = None) -> str:
    columns = [*table.values(), *([] if labels is None else [labels.astype(int)])]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return "\n".join(",".join(map(str, row)) for row in (header, *rows)) + "\n"
