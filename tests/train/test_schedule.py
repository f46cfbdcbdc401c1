"""The example schedule: every epoch a permutation, nothing dropped, no state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import DataError
from strop.rollout import Example, make_example
from strop.train.batch import ExampleSchedule

MAX_EXAMPLES = 12
EXAMPLES = [make_example("count", {"n": n}, str(n)) for n in range(MAX_EXAMPLES)]


@st.composite
def geometries(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw a number of examples, a number per step that they can fill, and a seed."""
    num_examples = draw(st.integers(1, MAX_EXAMPLES))
    return num_examples, draw(st.integers(1, num_examples)), draw(st.integers(0, 2**63 - 1))


def make_schedule(geometry: tuple[int, int, int]) -> ExampleSchedule[Example]:
    num_examples, per_step, seed = geometry
    return ExampleSchedule(EXAMPLES[:num_examples], seed=seed, prompts_per_step=per_step)


def numbers(examples: list[Example]) -> list[int]:
    return [int(example.fields["n"]) for example in examples]


@given(geometries())
@settings(max_examples=100, deadline=None)
def test_every_epoch_is_a_permutation(geometry: tuple[int, int, int]) -> None:
    num_examples, _, _ = geometry
    schedule = make_schedule(geometry)
    served = [n for step in range(2 * num_examples) for n in numbers(schedule.examples(step))]
    for start in range(0, len(served), num_examples):
        assert sorted(served[start : start + num_examples]) == list(range(num_examples))


@given(geometries(), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_a_step_never_gets_an_example_twice(geometry: tuple[int, int, int], step: int) -> None:
    found = numbers(make_schedule(geometry).examples(step))
    assert len(set(found)) == len(found) == geometry[1]


@given(geometries(), st.lists(st.integers(0, 30), max_size=6), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_a_step_does_not_depend_on_what_was_asked_before(
    geometry: tuple[int, int, int], history: list[int], step: int
) -> None:
    asked = make_schedule(geometry)
    for earlier in history:
        asked.examples(earlier)
    assert asked.examples(step) == make_schedule(geometry).examples(step)


@given(geometries(), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_a_number_names_the_example_of_its_place(geometry: tuple[int, int, int], number: int) -> None:
    step, place = divmod(number, geometry[1])
    assert make_schedule(geometry).numbered(number) == make_schedule(geometry).examples(step)[place]


def test_finding_one_example_makes_no_other() -> None:
    """Incident: a simulated step of 2,000 groups made four million sums, for minutes."""

    class Made(list[Example]):
        num_made = 0

        def __getitem__(self, index: Any) -> Any:
            self.num_made += 1
            return super().__getitem__(index)

    made = Made(EXAMPLES)
    schedule = ExampleSchedule(made, seed=0, prompts_per_step=MAX_EXAMPLES)
    for number in range(MAX_EXAMPLES):
        schedule.numbered(number)
    assert made.num_made == MAX_EXAMPLES


@pytest.mark.parametrize("num_examples", [0, 3])
def test_too_few_examples_for_a_step_are_refused(num_examples: int) -> None:
    with pytest.raises(DataError, match=rf"has {num_examples} training examples and a step asks for 4\. "):
        make_schedule((num_examples, 4, 0))
