"""The environments that ship keep the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strop.environments import Action, Environment, choose_environment
from strop.rollout import Example, Message, Outcome, make_example
from strop.spec import ArithmeticSpec
from strop.tasks import build_task
from strop.testing.scripted_environment import ScriptedEnvironment
from tests.environments.contract_suite import EnvironmentContract

SUM = make_example("arithmetic", {"a": 3, "b": 4}, "7")


class TestSingleTurn(EnvironmentContract):
    @pytest.fixture
    def make_environment(self) -> Callable[[], Environment]:
        return choose_environment(build_task(ArithmeticSpec()))

    @pytest.fixture
    def example(self) -> Example:
        return SUM


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
