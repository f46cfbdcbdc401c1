"""The tasks' models give the reference's numbers, whatever instances are drawn from them."""

from __future__ import annotations

import numpy as np
import pytest

from strop.environments.research.blotto import all_allocations, draw_scaled, value_of
from strop.environments.research.charlm import Chain
from strop.environments.research.contract import load_function, play_with
from strop.environments.research.control import Car, Pole
from strop.environments.research.games import prisoners_game, sexes_game
from strop.environments.research.glyphs import classify, digit_shapes, draw_images, place_everywhere
from strop.environments.research.sat import count_decisions, draw_formula, pick_first, pick_frequent
from strop.environments.research.tabular import ClassRule, PriceRule, draw_houses, draw_people, probability


def test_battle_of_the_sexes() -> None:
    best, _, deviation = sexes_game().best()
    assert best == pytest.approx(1.44)
    assert deviation == pytest.approx(0.240, abs=0.001)
    assert sexes_game().value_of(lambda turn, mine, theirs: 0) == pytest.approx(1.44)
    assert sexes_game().value_of(lambda turn, mine, theirs: 1) == pytest.approx(0.82)


def test_prisoners_dilemma() -> None:
    best, _, deviation = prisoners_game().best()
    assert best == pytest.approx(2.62514, abs=1e-5)
    assert deviation == pytest.approx(0.585, abs=0.005)
    assert prisoners_game().value_of(lambda *_: 0) == pytest.approx(2.2478, abs=1e-4)
    assert prisoners_game().value_of(lambda *_: 1) == pytest.approx(best)
    copying = prisoners_game().value_of(lambda turn, mine, theirs: max(theirs, 0))
    assert copying == pytest.approx(2.343, abs=0.02)


def test_blotto() -> None:
    book = draw_scaled(np.random.default_rng(0), 100_000, 120, 6)
    assert (book.sum(axis=1) == 120).all()
    rivals = [(30, 30, 30, 30, 0, 0), (20,) * 6, (25, 25, 25, 25, 10, 10), (40, 40, 40, 0, 0, 0)]
    values = np.array([value_of(np.array([one]), book)[0] for one in rivals])
    assert values == pytest.approx([0.2478, -0.0035, 0.08, -0.09], abs=0.012)
    assert len(all_allocations(30, 4)) == 5456


def test_table_of_classes() -> None:
    people = draw_people(np.random.default_rng(0), 400_000)
    chance = probability(ClassRule().log_odds(people))
    assert chance.mean() == pytest.approx(0.395, abs=0.003)
    assert np.maximum(chance, 1 - chance).mean() == pytest.approx(0.851, abs=0.002)
    assert np.where(people["female"], chance, 1 - chance).mean() == pytest.approx(0.756, abs=0.003)


def test_table_of_prices() -> None:
    mean = PriceRule().mean(draw_houses(np.random.default_rng(0), 200_000))
    assert np.sqrt(mean.var() + 0.12**2) == pytest.approx(0.351, abs=0.003)


def entropies(table: np.ndarray) -> tuple[float, float, float]:
    """Return the entropy of a symbol in bits, given none, one and two before it."""
    pairs = np.full(table.shape[:2], 1 / table.shape[0] ** 2)
    for _ in range(500):
        pairs = np.einsum("ab,abc->bc", pairs, table)
    single = pairs.sum(axis=0)
    given_one = np.einsum("ab,abc->bc", pairs, table) / single[:, None]
    return (
        -float(single @ np.log2(single)),
        -float((single[:, None] * given_one * np.log2(given_one)).sum()),
        -float((pairs[..., None] * table * np.log2(table)).sum()),
    )


def test_text() -> None:
    assert entropies(Chain().table()) == pytest.approx((4.000, 3.850, 2.944), abs=0.001)


@pytest.mark.parametrize(("noise", "expected"), [(0.5, 0.991), (0.7, 0.903), (0.9, 0.701)])
def test_glyphs(noise: float, expected: float) -> None:
    placed = place_everywhere(digit_shapes())
    images, digits = draw_images(np.random.default_rng(0), placed, noise, 4000)
    assert (classify(images, placed, noise) == digits).mean() == pytest.approx(expected, abs=0.03)


def test_formulas_have_one_answer_whoever_branches() -> None:
    rng = np.random.default_rng(0)
    formulas = [draw_formula(rng, 25, 106) for _ in range(30)]
    first = [count_decisions(formula, pick_first) for formula in formulas]
    frequent = [count_decisions(formula, pick_frequent) for formula in formulas]
    assert [answer for _, answer in first] == [answer for _, answer in frequent]
    assert 5 < sum(answer for _, answer in first) < 28
    assert sum(num for num, _ in frequent) < 0.6 * sum(num for num, _ in first)


def test_a_formula_is_decided_as_by_trying_everything() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        formula = draw_formula(rng, 8, 40)
        rows = (np.arange(256)[:, None] >> np.arange(8)) & 1
        holds = [np.any([rows[:, abs(one) - 1] == (one > 0) for one in clause], axis=0) for clause in formula]
        assert count_decisions(formula, pick_frequent)[1] == bool(np.all(holds, axis=0).any())


def test_the_car() -> None:
    cars = Car().start(np.random.default_rng(0), 200)
    values = {strength: Car().value_of(strength, cars) for strength in (1.0, 0.5, 0.3, 0.2, 0.15, 0.0)}
    assert values[1.0] == pytest.approx(89.3, abs=0.3)
    assert values[0.5] == pytest.approx(95.9, abs=0.3)
    assert values[0.3] == pytest.approx(97.8, abs=0.3)
    assert values[0.2] == pytest.approx(98.6, abs=0.3)
    assert values[0.15] < 0
    assert values[0.0] == 0
    same = play_with(Car().drive(cars), lambda state: 7.0 if state[1] >= 0 else -7.0)
    assert same == pytest.approx(values[1.0], abs=0.1)  # stronger than 1 is no stronger, and no dearer


def test_the_pole() -> None:
    carts = Pole().start(np.random.default_rng(0), 200)
    rules = {
        "1": (9.3, 0.2),
        "int(state[2] > 0)": (42.2, 2.0),
        "int(state[2] + state[3] > 0)": (485, 40),
        "int(0.1 * state[0] + 0.5 * state[1] + 8 * state[2] + 1.5 * state[3] > 0)": (500, 0),
    }
    for rule, (expected, slack) in rules.items():
        act = load_function(f"def act(state):\n    return {rule}\n".encode(), "act")
        assert play_with(Pole().balance(carts), act) == pytest.approx(expected, abs=slack)
