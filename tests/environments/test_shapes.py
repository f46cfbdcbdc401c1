"""Classes written for Gymnasium and for TRL, as environments."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from strop.environments import choose_environment
from strop.environments.contract import Action
from strop.rollout import Example, FinishReason, Outcome, Split
from strop.tasks import Task
from tests.conftest import require_system_part
from tests.environments.test_worlds import attempt, build, call, tokenizer_of

LAKE = """
from gymnasium.envs.toy_text import FrozenLakeEnv

class Lake(FrozenLakeEnv):
    max_turns = 8
    instructions = "Cross the lake. 0 is left, 1 down, 2 right, 3 up."

    def __init__(self):
        super().__init__(render_mode="ansi", is_slippery=False)

    def gold_replies(self, example):
        return [["1", "1", "2", "2", "1", "2"]]
"""
POLE = """
from gymnasium.envs.classic_control import CartPoleEnv, Continuous_MountainCarEnv
from strop.tasks import TaskLimits

class Pole(CartPoleEnv):
    max_turns = 3
    limits = TaskLimits(max_reply_tokens=32, max_reward=3.0)

class Car(Continuous_MountainCarEnv):
    max_turns = 2
    limits = TaskLimits(max_reply_tokens=32, min_reward=-10.0)
"""
PLAIN = """
class Corridor:
    '''Written for Gymnasium, without a base class.'''

    max_turns = 5

    def reset(self, seed=None, options=None):
        self.place, self.goal = 0, (options or {}).get("goal", 2)
        return {"place": self.place, "goal": self.goal}, {}

    def step(self, action):
        self.place += action
        is_there = self.place == self.goal
        return {"place": self.place}, float(is_there), is_there, self.place < 0, {}

    def read(self, text):
        return {"forth": 1, "back": -1}.get(text.strip())

    def examples(self, split):
        return [{"seed": 1, "goal": 2 if split == "train" else 3}]
"""
WORDS = """
class Wordle:
    instructions = "Guess a word. "
    max_turns = 4

    def __init__(self):
        self.reward = 0.0

    def reset(self, secret: str = "crane", **kwargs) -> str | None:
        self.reward, self.secret, self.over = 0.0, secret, False
        return f"It has {len(secret)} letters."

    def guess(self, word: str) -> str:
        '''
        Make a guess.

        Args:
            word: The word that is guessed.

        Returns:
            What is right about it.
        '''
        if len(word) != len(self.secret):
            raise ValueError(f"{word} has {len(word)} letters.")
        self.reward = float(word == self.secret)
        return "right" if self.reward else "wrong"

    def get_reward(self) -> float:
        return self.reward
"""


@pytest.fixture
def _gymnasium() -> None:
    require_system_part("the package gymnasium", find_spec("gymnasium") is not None)


def say(task: Task, *replies: str) -> tuple[list[str], Outcome]:
    """Attempt the first training example; return what the world says, and the outcome."""

    async def act() -> tuple[list[str], Outcome]:
        environment = choose_environment(task)()
        example: Example = task.examples(Split.TRAIN)[0]
        told = [message.text for message in await environment.reset(example, seed=3)]
        for reply in replies:
            result = await environment.step(Action(text=reply, finish_reason=FinishReason.EOS))
            told += [message.text for message in result.messages]
        outcome = await environment.score()
        await environment.close()
        return told, outcome

    return asyncio.run(act())


@pytest.mark.usefixtures("_gymnasium")
def test_a_gymnasium_environment_is_played_in_words() -> None:
    task = build(LAKE, "environment.num_train=20", "environment.num_held_out=3", name="Lake")
    assert [len(task.examples(split)) for split in Split] == [20, 3]
    told, outcome = say(task, "I go down: 1", "1", "2", "2", "1", "2")
    assert told[0].startswith(
        "Cross the lake. 0 is left, 1 down, 2 right, 3 up.\n\nReply with a number from 0 to 3."
    )
    assert "[S]FFF" in told[0]
    assert "(Down)" in told[1]
    assert (outcome.reward, outcome.is_correct, outcome.format_ok) == (1.0, True, True)
    assert (outcome.metrics["terminated"], outcome.metrics["truncated_by_world"]) == (1.0, 0.0)
    gold = task.gold_replies(task.examples(Split.TRAIN)[0])
    assert task.verify(task.examples(Split.TRAIN)[0], gold[0]).reward == 1.0


@pytest.mark.usefixtures("_gymnasium")
def test_a_reply_without_an_action_costs_a_turn_and_is_told() -> None:
    task = build(LAKE, "environment.num_train=20", "environment.num_held_out=3", name="Lake")
    told, outcome = say(task, "left", "7", "1.5")
    assert told[1:] == ["That is no action. Reply with a number from 0 to 3."] * 3
    assert (outcome.reward, outcome.format_ok, outcome.metrics["num_invalid_actions"]) == (0.0, False, 3.0)


@pytest.mark.usefixtures("_gymnasium")
def test_observations_of_numbers_and_rewards_of_every_step() -> None:
    words = ("environment.num_train=8", "environment.num_held_out=3")
    told, outcome = say(build(POLE, *words, name="Pole"), "0", "1", "0")
    assert told[0].startswith("Reply with a number from 0 to 1.\n\n[0.0")
    assert (outcome.reward, outcome.is_correct) == (3.0, True)
    told, outcome = say(build(POLE, *words, name="Car"), "Push by 1.0", "-0.5 it is")
    assert told[0].startswith("Reply with 1 number.")
    assert outcome.reward == pytest.approx(-0.125)
    assert say(build(POLE, *words, name="Car"), "2.5")[1].metrics["num_invalid_actions"] == 1.0


def test_a_class_of_gymnasium_s_form_needs_no_base() -> None:
    task = build(PLAIN, name="Corridor")
    told, outcome = say(task, "forth", "nowhere", "forth")
    assert told == ["place: 0\ngoal: 2", "place: 1", "That is no action."]
    assert (outcome.reward, outcome.is_correct) == (1.0, True)
    _, outcome = say(task, "back")
    assert (outcome.reward, outcome.metrics["truncated_by_world"], outcome.metrics["terminated"]) == (0, 1, 0)


def test_a_class_of_trl_is_called_by_its_tools(tmp_path: Path) -> None:
    task = build(WORDS, "environment.num_train=8", "environment.num_held_out=2", name="Wordle")
    rollout = attempt(
        task, tokenizer_of(tmp_path), [call("guess", word="plan"), call("guess", word="crane"), "Done."]
    )
    opening, _, refused, _, right = [turn.text for turn in rollout.turns[:5]]
    assert "Guess a word. It has 5 letters." in opening
    assert "error: plan has 4 letters." in refused
    assert "right" in right
    assert rollout.outcome.reward == 1.0
    assert rollout.outcome.metrics["num_tool_errors"] == 1.0
    assert "get_reward" not in opening


def test_a_row_of_trl_is_its_prompt_and_what_reset_takes() -> None:
    rows = """
    def examples(self, split):
        asked = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go. "}]
        return [{"prompt": asked, "secret": "abc" if split == "train" else "abcd"}]
    """
    task = build(WORDS + rows, name="Wordle")
    told, outcome = say(task, call("guess", word="abc"), "Done.")
    assert told[0] == "Play."
    assert told[1].startswith("Go. It has 3 letters.")
    assert outcome.reward == 1.0


def test_the_schema_of_a_tool_has_the_types_that_trl_reads() -> None:
    """TRL reads tools by transformers' get_json_schema."""
    from transformers.utils.chat_template_utils import get_json_schema

    task = build(WORDS, "environment.num_train=8", "environment.num_held_out=2", name="Wordle")
    own = task.tools["guess"]  # type: ignore[attr-defined]
    namespace: dict[str, type] = {}
    exec(WORDS, namespace)
    theirs = get_json_schema(namespace["Wordle"]().guess)["function"]
    ours = json.loads(own)["function"]
    assert ours["name"] == theirs["name"]
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    assert (
        ours["parameters"]["properties"]["word"]["type"] == theirs["parameters"]["properties"]["word"]["type"]
    )


def test_a_class_of_neither_form_is_told_what_it_lacks() -> None:
    from strop.errors import ConfigError

    with pytest.raises(ConfigError, match="has no examples and no score"):
        build("class Half:\n    def reset(self, example, seed): return 'Go.'\n", name="Half")
