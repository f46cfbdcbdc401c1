"""Tests of reasoning-gym data sets as tasks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.rollout import Split, make_example
from strop.tasks import Task, build_task
from strop.tasks.generated import ReasoningGymSpec, list_datasets
from tests.fixtures.judging import run_self_test, verdict

pytest.importorskip("reasoning_gym", reason="the extra 'tasks' is not installed")


def rg(dataset: str, num_train: int = 12, num_held_out: int = 6, **config: Any) -> Task:
    return build_task(
        ReasoningGymSpec(
            name="reasoning-gym",
            dataset=dataset,
            config=config,
            num_train=num_train,
            num_held_out=num_held_out,
        )
    )


def test_splits_share_no_question() -> None:
    # Two terms of one digit with + or -: 10 * 10 * 2 = 200 questions, so most are drawn repeatedly.
    task = rg("chain_sum", num_train=120, num_held_out=50, max_terms=2, max_digits=1)
    held_out, train = task.examples(Split.HELD_OUT), task.examples(Split.TRAIN)
    assert (len(held_out), len(train)) == (50, 120)
    assert len({example.fields["question"] for example in [*held_out, *train]}) == 170


def test_problems_that_differ_in_order_are_in_one_split() -> None:
    task = rg("lcm", num_train=120, num_held_out=40, max_numbers=2, min_value=1, max_value=20)
    held_out, train = (
        [sorted(map(int, re.findall(r"\d+", example.fields["question"]))) for example in task.examples(split)]
        for split in reversed(Split)
    )
    assert (len(held_out), len(train)) == (40, 120)
    assert not [numbers for numbers in held_out if numbers in train]
    # Some question of two stands in both orders, so that there was something to keep together.
    mirrored = [numbers for numbers in train if train.count(numbers) > 1]
    assert mirrored


def test_other_order_with_another_answer_is_another_problem() -> None:
    task = rg("chain_sum")

    def problem(question: str, answer: str | None) -> str | None:
        return task.problem_of(make_example("reasoning-gym", {"question": question}, answer))

    assert problem("What is 3 + 4?", "7") == problem("what is 4+3", "7")
    assert problem("What is 3 - 4?", "-1") != problem("What is 4 - 3?", "1")
    # Where no answer is stored, order may be all that there is.
    assert problem("Sort 3 4", None) != problem("Sort 4 3", None)


def test_verify_and_self_test() -> None:
    task = rg("chain_sum")
    example = task.examples(Split.TRAIN)[0]
    assert run_self_test(task, task.examples(Split.TRAIN)) == []
    right = verdict(
        task,
        example,
        f"In <answer></answer>: <answer>1</answer> no,\n<answer> {example.answer} </answer> it is",
    )
    assert (right.reward, right.is_correct, right.format_ok) == (1.0, True, True)
    untagged = verdict(task, example, f"I think\n{example.answer}")
    assert (untagged.is_correct, untagged.format_ok) == (True, False)
    unclosed = verdict(task, example, f"<answer>{example.answer}")
    assert (unclosed.is_correct, unclosed.format_ok) == (True, True)
    assert verdict(task, example, "<answer>x</answer>").reward == 0.0
    assert verdict(task, example, "").is_correct is False
    assert "<answer> and </answer>" in task.render(example)[0].text


def test_what_differs_between_processes_is_not_taken() -> None:
    """Python's sets have another order in each, and list_functions draws unseeded; no run could go on."""
    for dataset in ("ransom_note", "word_ladder", "list_functions"):
        assert dataset not in list_datasets()
        with pytest.raises(ConfigError, match=f"task.dataset={dataset} "):
            rg(dataset).examples(Split.TRAIN)


def test_scorer_that_raises_is_not_a_zero() -> None:
    task = rg("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        verdict(task, task.examples(Split.TRAIN)[0], "<answer>asdf</answer>")
    findings = run_self_test(task, task.examples(Split.TRAIN))
    (garbage,) = [finding for finding in findings if finding.probe == "garbage"]
    assert {entry.reward for entry in garbage.evidence} == {None}
    assert garbage.evidence[0].detail.startswith("task, ValueError: invalid literal for int()")


@pytest.mark.parametrize(
    ("dataset", "config", "named"),
    [
        ("chain_sums", {}, "chain_sum,"),
        ("chain_sum", {"max_term": 3}, "max_term'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "max_terms"),
        ("chain_sum", {"max_terms": "many"}, "max_terms"),
        *(("chain_sum", {key: 1}, key) for key in ("seed", "size")),
    ],
)
def test_what_the_package_does_not_take_is_refused(dataset: str, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rg(dataset, **config).examples(Split.TRAIN)


def test_too_few_different_questions_are_refused() -> None:
    # One term of one digit: the ten questions 0 to 9.
    task = rg("chain_sum", min_terms=1, max_terms=1, min_digits=1, max_digits=1)
    with pytest.raises(ConfigError, match=r"ask for 18 different problems.*about 10 in all"):
        task.examples(Split.TRAIN)


def test_what_a_generator_prints_stays_off_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert rg("bf").examples(Split.TRAIN)
    found = capsys.readouterr()
    assert (found.out, set(found.err)) == ("", {"."})
