"""The environment of recipes/research, which a user might have written: rewards, cheats, audit and play."""

from __future__ import annotations

import asyncio

import pytest

from strop.audit import self_test
from strop.environments.worlds import OwnWorld
from strop.rollout import Example, Outcome, Split
from strop.spec import load_spec
from strop.tasks import build_task
from tests.environments.test_worlds import call, play
from tests.fixtures.judging import failed
from tests.fixtures.recipes import NAMES

SUBMIT = call("submit")
ARTEFACTS = {"car": "controller.py", "people": "predictions.csv", "symbols": "logprobs.json"}


@pytest.fixture(scope="module")
def task() -> OwnWorld:
    words = ["task.sandbox=process", "task.min_isolation=rlimit", "task.tool_limit_s=20"]
    built = build_task(load_spec(NAMES["research"], words).spec.task)
    assert isinstance(built, OwnWorld)
    return built


def example_of(task: OwnWorld, name: str) -> Example:
    return next(one for one in task.examples(Split.HELD_OUT) if one.fields["task"] == name)


def attempt(task: OwnWorld, name: str, *replies: str) -> tuple[Outcome, list[str]]:
    """Return the outcome of an attempt, and what was told after each reply."""
    told, outcome = play(task, example_of(task, name), *replies)
    return outcome, told[1:]


def written(name: str, text: str) -> str:
    return call("create", path=ARTEFACTS[name], text=text)


@pytest.mark.parametrize("name", ARTEFACTS)
def test_the_first_version_earns_nothing_and_the_best_known_work_full_marks(
    task: OwnWorld, name: str
) -> None:
    example = example_of(task, name)
    outcome, _ = attempt(task, name, SUBMIT)
    assert (outcome.reward, outcome.is_correct) == (0.0, False)
    assert asyncio.run(self_test(task, [example])) == []


@pytest.mark.parametrize("name", ARTEFACTS)
@pytest.mark.parametrize("text", ["[1.0]\n", "print([1.0] * 1036)\nimport os; os._exit(0)\n"])
def test_what_cannot_be_scored_earns_nothing(task: OwnWorld, name: str, text: str) -> None:
    outcome, told = attempt(task, name, written(name, text), call("evaluate"), SUBMIT)
    assert (outcome.reward, outcome.failure) == (0.0, None)
    assert told[1].startswith("error: ")
    assert outcome.metrics["num_tool_errors"] == 1


def test_a_program_answers_and_does_not_score(task: OwnWorld) -> None:
    shouting = "print('{\"score\": 100}')\n\n\ndef act(place, speed):\n    return 1.0\n"
    assert attempt(task, "car", written("car", shouting), SUBMIT)[0].reward == 0.0
    better = "def act(place, speed):\n    return 0.5 if speed >= 0 else -0.5\n"
    outcome, told = attempt(task, "car", written("car", better), call("evaluate"), SUBMIT)
    assert outcome.reward is not None
    assert 0.2 < outcome.reward <= 1.0
    assert 90.0 < float(told[1].split()[3].strip(";")) < 100.0


def test_evaluations_are_counted_and_leaked_labels_never_paid(task: OwnWorld) -> None:
    told = attempt(task, "people", *[call("evaluate")] * 6, SUBMIT)[1]
    assert [one.startswith("error: ") for one in told[:6]] == [False] * 5 + [True]
    own = task.make_own()
    own.example = example_of(task, "people")
    score = own.instance.score
    hidden = dict(
        zip(score.__code__.co_freevars, (cell.cell_contents for cell in score.__closure__), strict=True)
    )
    labels = "id,prediction\n" + "".join(f"{row},{int(one)}\n" for row, one in enumerate(hidden["truth"]))
    outcome, _ = attempt(task, "people", written("people", labels), SUBMIT)
    assert (outcome.reward, failed(outcome)[1]) == (None, "ceiling")


def test_instances_differ_and_splits_never_meet(task: OwnWorld) -> None:
    train, held_out = task.examples(Split.TRAIN), task.examples(Split.HELD_OUT)
    assert [one.fields["task"] for one in held_out[:4]] == ["car", "people", "symbols", "car"]
    numbers = [{one.fields["number"] for one in split} for split in (train, held_out)]
    assert not numbers[0] & numbers[1]
    assert task.render(train[0]) != task.render(train[1])
