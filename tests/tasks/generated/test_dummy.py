"""The canary of one question."""

from __future__ import annotations

import pytest

from strop.errors import DataError
from strop.rollout import Split, make_example
from strop.tasks import build_task
from strop.tasks.generated.dummy import DummySpec
from strop.tasks.traits import problem_of
from tests.fixtures.judging import run_self_test


def test_one_question_many_times() -> None:
    task = build_task(DummySpec(name="dummy", num_train=3, num_held_out=2))
    examples = [*task.examples(Split.TRAIN), *task.examples(Split.HELD_OUT)]
    assert len({example.example_id for example in examples}) == 5
    assert len({task.render(example) for example in examples}) == 1
    # (21/36 + 10/36) / (31/36) = 1
    assert {example.answer for example in examples} == {"1"}
    assert task.verify(examples[0], "31/36 over 31/36 is 1.").is_correct
    assert not task.verify(examples[0], "31/36").is_correct
    assert run_self_test(task, examples) == []


def test_all_examples_are_one_problem_that_is_trained_on() -> None:
    task = build_task(DummySpec(name="dummy", num_train=3, num_held_out=2))
    assert {problem_of(task, example) for split in Split for example in task.examples(split)} == {"dummy"}


def test_a_foreign_example_is_refused() -> None:
    with pytest.raises(DataError, match=r"is not one of task dummy"):
        build_task(DummySpec(name="dummy")).verify(make_example("dummy", {}, None), "1")
