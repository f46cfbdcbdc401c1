"""The environments that ship keep the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import strop
from strop.environments import Action, Environment, SingleTurn, choose_environment
from strop.environments.guess_number import GuessNumberSpec
from strop.environments.played import PlayedWorld
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.tasks import build_task
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tasks.judging import InlineJudge
from tests.environments.contract_suite import EnvironmentContract
from tests.fixtures.scripted_environment import ScriptedEnvironment

SUM = make_example("arithmetic", {"a": 3, "b": 4}, "7")


class TestSingleTurn(EnvironmentContract):
    @pytest.fixture
    def make_environment(self) -> Callable[[], Environment]:
        return choose_environment(build_task(ArithmeticSpec()))

    @pytest.fixture
    def example(self) -> Example:
        return SUM


def test_a_task_is_attempted_in_its_own_world_or_in_one_turn() -> None:
    for spec, kind in ((ArithmeticSpec(), SingleTurn), (GuessNumberSpec(), PlayedWorld)):
        task = build_task(spec)
        make_environment = choose_environment(task, InlineJudge(task))
        first, second = make_environment(), make_environment()
        assert type(first) is kind
        assert first is not second


class TestGuessNumber(EnvironmentContract):
    @pytest.fixture
    def make_environment(self) -> Callable[[], Environment]:
        return choose_environment(build_task(GuessNumberSpec()))

    @pytest.fixture
    def example(self) -> Example:
        return build_task(GuessNumberSpec()).examples(Split.TRAIN)[0]


def test_no_other_room_chooses_an_environment() -> None:
    src = Path(strop.__file__).parent
    naming = [path for path in src.rglob("*.py") if "SingleTurn" in path.read_text()]
    assert {path.parent.name for path in naming} == {"environments"}


def judge_last_word(example: Example, actions: tuple[Action, ...]) -> Outcome:
    is_correct = bool(actions) and actions[-1].text == example.answer
    return Outcome(parts={"correct": float(is_correct)}, is_correct=is_correct)


class TestScriptedEnvironment(EnvironmentContract):
    @pytest.fixture
    def make_environment(self) -> Callable[[], Environment]:
        more = [Message(role="user", content="Sure?")]
        return lambda: ScriptedEnvironment([Message(role="user", content="3 + 4?")], [more], judge_last_word)

    @pytest.fixture
    def example(self) -> Example:
        return SUM
