"""What changed between two results, and the order file: one line per example, the easiest first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.evaluate import EvalResult, ExampleScore, Validity, compare_results, write_order
from tests.evaluate.stored_results import make_example_score, make_result, make_score


def in_forms(**replies: tuple[bool, bool]) -> EvalResult:
    """A result of one reply to each example: whether it is right, and in the asked form."""
    return make_result(
        {
            name: make_example_score(
                float(is_solved),
                format_ok_frac=float(format_ok),
                in_format_solved_frac=float(is_solved) if format_ok else None,
            )
            for name, (is_solved, format_ok) in replies.items()
        }
    )


def test_a_change_is_measured_on_the_same_examples() -> None:
    before = make_result({"a": 0.0, "b": 1.0, "c": None, "d": 0.0})
    after = make_result({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, model_digest="m2", step=40)
    change = compare_results(before, after)
    assert change.greedy is not None
    # a, b and d were scored on both sides: +1, 0, 0
    assert change.greedy.estimate == pytest.approx(1 / 3)
    assert (change.greedy.num_examples, change.greedy.num_gained, change.greedy.num_lost) == (3, 1, 0)
    assert change.greedy.p_value == 1.0
    assert change.sampled is None


def test_sampled_scores_are_compared_too() -> None:
    score = make_score({"a": 0.25, "b": 0.5})
    result = make_result(sampled=score, num_samples=4)
    change = compare_results(result, result)
    assert change.sampled is not None
    # Equal shares are no proof that nothing changed: the interval of two examples is wide.
    assert change.sampled.estimate == 0.0
    assert -change.sampled.low == change.sampled.high > 0.7


def test_rewards_are_compared_on_the_scale_that_they_have() -> None:
    def score(reward: float) -> ExampleScore:
        return make_example_score(1.0, reward_mean=reward)

    before = make_result({"a": score(0.5), "b": score(4.0)})
    after = make_result({"a": score(2.5), "b": score(1.0)})
    change = compare_results(before, after).greedy
    assert change is not None
    assert change.reward is not None
    assert change.reward.estimate == pytest.approx(-0.5)
    # The full scale is 4; of two examples little is known.
    assert -4.0 <= change.reward.low < -3.0
    assert 2.0 < change.reward.high <= 4.0


def test_examples_of_one_problem_are_one_change() -> None:
    def score(problem: str | None, solved: float) -> ExampleScore:
        return make_example_score(solved, problem=problem)

    names = {f"{number}": f"p{number // 2}" for number in range(12)}
    twins = [make_result({name: score(p, solved) for name, p in names.items()}) for solved in (0.0, 1.0)]
    change = compare_results(*twins).greedy
    alone = compare_results(
        *(make_result({name: score(None, solved) for name in names}) for solved in (0.0, 1.0))
    ).greedy
    assert change is not None
    assert alone is not None
    assert (change.estimate, change.num_examples, change.num_gained) == (1.0, 12, 12)
    # Six problems that rose, and twelve: 2 / 2^6 and 2 / 2^12.
    assert (change.p_value, alone.p_value) == (2 / 64, 2 / 4096)
    assert change.low < alone.low < 1.0
    # One that rose and one that fell are no change of their problem.
    mixed = [
        make_result({name: score("p", solved) for name, solved in zip("ab", pair, strict=True)})
        for pair in ((0.0, 1.0), (1.0, 0.0))
    ]
    evened = compare_results(*mixed).greedy
    assert evened is not None
    assert (evened.num_gained, evened.num_lost, evened.p_value) == (1, 1, 1.0)


def test_nothing_scored_on_both_sides_is_no_change() -> None:
    unscored = make_result({"a": None, "b": 1.0})
    other = make_result({"a": 1.0, "b": None})
    assert compare_results(unscored, other).greedy is None


def test_rew_7_form_and_ability_are_told_apart() -> None:
    before = in_forms(a=(False, False), b=(False, False), c=(True, True), d=(False, True))
    after = in_forms(a=(True, True), b=(True, True), c=(True, True), d=(False, True))
    change = compare_results(before, after).greedy
    assert change is not None
    # a and b turned right and took the form; c and d, in the form before too, did not change.
    assert change.estimate == 0.5
    assert change.format_ok is not None
    assert change.format_ok.estimate == 0.5
    assert change.in_format is not None
    assert (change.in_format.estimate, change.num_in_format) == (0.0, 2)
    assert (change.num_gained, change.num_lost) == (2, 0)


def test_replies_to_an_older_prompt_are_not_compared_with_those_to_a_newer_one() -> None:
    rescored = make_result(task_version="v2")
    fresh = make_result(task_version="v2", replies_version="v2")
    with pytest.raises(CheckRefused, match=r"protocols: replies_version 'v1' and 'v2'\. Allowed: .*Next: "):
        compare_results(rescored, fresh)
    assert compare_results(rescored, rescored).greedy is not None


def test_examples_are_sorted_by_how_often_they_were_solved(tmp_path: Path) -> None:
    shares = {"d": None, "a": 0.25, "c": 1.0, "b": 0.25}
    sampled = make_score(
        {name: make_example_score(share, num_judged=4 if share else 0) for name, share in shares.items()}
    )
    result = make_result(shares, sampled=sampled, num_samples=4)
    write_order(result, tmp_path / "order.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "order.jsonl").read_text().splitlines()]
    assert [(row["example_id"], row["solved_frac"], row["num_samples"]) for row in rows] == [
        ("c", 1.0, 4),
        ("a", 0.25, 4),
        ("b", 0.25, 4),
        ("d", None, 0),
    ]


def test_without_samples_the_greedy_reply_counts(tmp_path: Path) -> None:
    write_order(make_result({"a": 0.0, "b": 1.0}), tmp_path / "order.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "order.jsonl").read_text().splitlines()]
    assert rows == [
        {"example_id": "b", "solved_frac": 1.0, "num_samples": 1},
        {"example_id": "a", "solved_frac": 0.0, "num_samples": 1},
    ]


def test_no_curriculum_comes_from_an_invalid_result(tmp_path: Path) -> None:
    with pytest.raises(CheckRefused, match="invalid: truncation"):
        write_order(make_result(validity=Validity.TRUNCATION), tmp_path / "order.jsonl")
    assert not (tmp_path / "order.jsonl").exists()
