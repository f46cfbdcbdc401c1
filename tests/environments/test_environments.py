"""The environments that ship keep the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import strop
from strop.environments import Action, Environment, SingleTurn, choose_environment
from strop.environments.rollout import ENVIRONMENTS
from strop.errors import ConfigError
from strop.rollout import Example, Message, Outcome, make_example
from strop.tasks import build_task
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tasks.judging import InlineJudge
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


def test_an_environment_is_made_by_its_name() -> None:
    """With the task and the judge of the run, anew for each attempt."""
    task = build_task(ArithmeticSpec())
    for name, kind in ENVIRONMENTS.items():
        make_environment = choose_environment(task, InlineJudge(task), name=name)
        first, second = make_environment(), make_environment()
        assert type(first) is kind
        assert first is not second
    assert type(choose_environment(task)()) is SingleTurn


def test_an_unknown_environment_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"the environment 'frozen-lake'\. Allowed: single-turn"):
        choose_environment(build_task(ArithmeticSpec()), name="frozen-lake")


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
