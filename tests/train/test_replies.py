"""What replies look like beside each other, by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.record import Event, EventKind
from strop.rollout import Group, Outcome, Turn, make_example
from strop.train.measure import measure_replies, prompt_dependence, runs_on, with_samples
from tests.fixtures.builders import rollout_of, spoken_turn

PROMPT = "<|start|>user\nWhat is 6 times 3?<|end|>\n<|start|>assistant\n"
BACKWARDS = "<|start|>user\nWrite this text backwards, letter by letter: fox<|end|>\n"


@pytest.mark.parametrize(
    "reply",
    [
        "18 Q: 2+3? A: 5",
        "6 * 3 = 18\n#### 18\n\n### Problem\nTom has 3 and 4.",
        "\\boxed{18}\nPuzzle 2) Which number is even? 4",
        "The answer is 18. What is 7 times 8? 56",
        "18\n\nNext riddle => A farmer has 12 cows and sells 5. How many are left?\nReply => 7",
        "5\nExercise 2. Add three and four.",  # a wrong answer is one too
        "18\nWhat is 7 times 9\n63",  # as the prompt asks, without a mark
    ],
)
def test_a_reply_that_goes_on_to_a_question_behind_its_answer_runs_on(reply: str) -> None:
    assert runs_on(PROMPT, reply, "18")


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "18",
        "6 times 3 is 18.",
        "What is 6 times 3? It is 18.",
        "18. What is 6 times 3? It is 18.",  # the question that it was asked
        "Tom has 18 apples. How many eggs? 9. So 18.",  # the answer as a number on the way
        "How many are left? 16 - 3 = 13.\nHow much is it? 9 * 2 = 18\n#### 18",
        "The answer is 18. Do you need more help?",  # asked of the reader, and not answered
        "To find 6 times 3, add 6 + 6 + 6 = 18. Therefore 18 is the product.\nExplanation: multiply.",
        "18\n18\n18\n18",
        "I do not know. Question 5: what is 7?",  # no answer that it could be behind
    ],
)
def test_a_reply_that_answers_or_thinks_aloud_does_not(reply: str) -> None:
    assert not runs_on(PROMPT, reply, "18")


def test_a_task_that_asks_no_question_is_imitated_by_its_beginning() -> None:
    assert runs_on(BACKWARDS, "xof\nWrite this text backwards, letter by letter: river\nrevir", "xof")
    assert not runs_on(BACKWARDS, "xof\nWrite this text backwards, letter by letter: fox", "xof")


def test_a_long_reply_is_searched_in_time_that_grows_with_it() -> None:
    # Half a million characters of which each begins a sentence.
    assert not runs_on(PROMPT, "18. " + "a. " * 170_000, "18")


def group(prompt: str, *replies: str, right: str = "never") -> Group:
    example = make_example("toy", {"prompt": prompt}, right)
    rollouts = tuple(
        rollout_of(
            example,
            (
                Turn(role="prompt", text=prompt, token_ids=np.array([1], dtype=np.int32)),
                spoken_turn(reply, [index]),
            ),
            Outcome(parts={"x": 0.0}, is_correct=reply == right),
            sample_index=index,
        )
        for index, reply in enumerate(replies)
    )
    return Group(example=example, rollouts=rollouts)


def test_the_numbers_of_replies_by_hand() -> None:
    groups = [
        group("a?", "text", "Text.", "other", "right", right="right"),
        group("b?", "text", "right", "own", "own"),
    ]
    metrics = measure_replies(groups)
    # "text" thrice, to both prompts; "own" is one prompt's, and "right" is right once.
    assert metrics["common_reply_frac"] == 3 / 8
    assert metrics["distinct_reply_frac"] == 4 / 8
    assert metrics["runaway_frac"] == 0.0
    assert measure_replies([]) == {}


def test_one_question_under_many_ids_is_one_prompt() -> None:
    assert measure_replies([group("a?", "1", "1"), group("a?", "1", "1")])["common_reply_frac"] == 0.0


def dependence(*replies: Sequence[str]) -> float | None:
    prompts = [str(index) for index, of_prompt in enumerate(replies) for _ in of_prompt]
    return prompt_dependence(prompts, [reply for of_prompt in replies for reply in of_prompt])


def test_replies_that_tell_their_prompt_and_ones_that_do_not() -> None:
    assert dependence(["river river", "a river"], ["stone wall", "the stone"]) == 1.0
    # One reply to everybody: each other reply is as near.
    assert dependence(["text"] * 4, ["text"] * 4, ["text"] * 4) == pytest.approx(0.0)
    # Nobody's nearest reply is to its own prompt: 0 of 2 by chance of 1/3 is (0 - 1/3) / (1 - 1/3).
    assert dependence(["river", "stone"], ["river", "stone"]) == pytest.approx(-0.5)
    for few in ([["a", "b"]], [["a"], ["b"], ["c", "d"]], []):
        assert dependence(*few) is None
    # A reply that is alone with its prompt is compared with nothing.
    assert dependence(["river", "a river"], ["stone", "the stone"], ["alone"]) == 1.0


def test_replies_by_chance_depend_on_nothing() -> None:
    stream = random.Random(0)
    means = [
        dependence(*([["".join(stream.choices("abcd", k=12)) for _ in range(6)] for _ in range(6)]))
        for _ in range(40)
    ]
    assert abs(float(np.mean([mean for mean in means if mean is not None]))) < 0.03


@given(st.lists(st.lists(st.text(max_size=8), min_size=2, max_size=4), min_size=2, max_size=5))
def test_dependence_is_within_its_bounds_and_knows_no_order(replies: list[list[str]]) -> None:
    found = dependence(*replies)
    assert found is not None
    sizes = [len(of_prompt) for of_prompt in replies]
    chance = sum(size * (size - 1) for size in sizes) / (sum(sizes) * (sum(sizes) - 1))
    assert -chance / (1 - chance) - 1e-6 <= found <= 1.0 + 1e-6
    assert dependence(*(list(reversed(of_prompt)) for of_prompt in reversed(replies))) == pytest.approx(found)


def alarm(cause: str) -> Event:
    return Event(kind=EventKind.TRIPWIRE, step=3, cause=cause, detail="why")


def test_an_alarm_about_replies_shows_one_and_names_the_examples() -> None:
    groups = [group("a?", "text", "7 Q: 2+3? A: 5"), group("b?", "text", "other")]
    common, running, plain = with_samples(
        [alarm("reply_collapse"), alarm("runaway"), alarm("truncation")], groups
    )
    assert common.detail == "why; for example 'text'"
    assert common.example_ids == tuple(one.example.example_id for one in groups)
    assert running.detail == "why; for example '7 Q: 2+3? A: 5'"
    assert running.example_ids == (groups[0].example.example_id,)
    assert plain == alarm("truncation")
    assert with_samples([alarm("runaway")], []) == [alarm("runaway")]


def test_many_long_replies_are_compared_at_a_bounded_cost() -> None:
    groups = [group(f"{n}?", *("long " * 5000 + str(i) for i in range(8))) for n in range(64)]
    metrics = measure_replies(groups)
    # 8 replies of 16 prompts, and only as far as bytes are compared.
    assert metrics["prompt_dependence"] == pytest.approx(0.0, abs=1e-6)
    assert list(itertools.islice(metrics, 1)) == ["common_reply_frac"]
