"""Environments of verifiers 0.4.0, played by the real package; its calls are recorded as exact ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.agents.verifiers import VerifiersSpec, environment_of, to_outcome
from strop.environments import choose_environment, run_rollout
from strop.environments.guests import guest as guests
from strop.errors import ConfigError
from strop.rollout import CONVERSATION, RESTART, Rollout, Split
from strop.tasks import Task, build_task
from strop.tasks.task import TURN, TaskLimits
from strop.tokenizer import Tokenizer
from tests.conftest import require_system_part
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.judging import failed, verdict
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

TASKSET = """
import verifiers.v1 as vf

class GuessData(vf.TaskData):
    meant: int

class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def found(self, trace) -> float:
        replies = [one for one in trace.branches[-1].messages if one.role == "assistant"]
        if replies and "break" in str(replies[-1].content):
            raise RuntimeError("a bug of the taskset")
        return float(bool(replies) and str(self.data.meant) in str(replies[-1].content))

class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for n in range(12):
            data = GuessData(prompt=f"Say {n}.", system_prompt="Be short.", meant=n)
            yield GuessTask(data, self.config.task)

__all__ = ["Guess"]
"""
TURNS = """
import verifiers.v1 as vf
from guess import Guess as _Guess

class Again(_Guess):
    pass

class AgainConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class AgainEnv(vf.Env[AgainConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or str(task.data.meant) in segment.last_reply:
                    break
                segment = await interaction.turn("Again.")

__all__ = ["Again", "AgainEnv"]
"""


LEGACY = """
import verifiers as vf
from datasets import Dataset

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]

def found(completion, answer, **kwargs):
    replies = [one for one in completion if one["role"] == "assistant"]
    return float(answer in str(replies[-1]["content"]))

def load_environment(number: int = 8):
    rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(number)]
    return Again(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), max_turns=2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two tasksets as files; the package's processes end with the module."""
    require_system_part("the environment of verifiers (make guest-deps)", environment_of(()).is_ready())
    place = tmp_path_factory.mktemp("tasksets")
    (place / "guess.py").write_text(TASKSET)
    (place / "again.py").write_text(TURNS)
    (place / "older.py").write_text(LEGACY)
    yield place
    for one in guests.running.values():
        one.end()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer") / "model"))


def taskset(folder: Path, name: str, **settings: Any) -> Task:
    return build_task(VerifiersSpec(taskset=name, folder=str(folder), num_held_out=4, **settings))


def attempt(task: Task, tokenizer: Tokenizer, *replies: str) -> Rollout:
    plan = plan_for(task.examples(Split.TRAIN)[0], max_reply_tokens=64, max_positions=4096)
    engine = DummyEngine(tokenizer, list(replies))
    return asyncio.run(run_rollout(choose_environment(task)(), engine, tokenizer, plan))


@pytest.mark.slow
def test_a_taskset_is_read_and_its_task_played(folder: Path, tokenizer: Tokenizer) -> None:
    task = taskset(folder, "guess", num_train=5)
    assert [len(task.examples(split)) for split in (Split.HELD_OUT, Split.TRAIN)] == [4, 5]
    assert [one.text for one in task.render(task.examples(Split.TRAIN)[0])] == ["Be short.", "Say 4."]
    right = attempt(task, tokenizer, "It is 4")
    assert (right.outcome.parts, right.outcome.is_correct) == ({"found": 1.0}, True), right.outcome
    prompt, reply = right.turns
    assert "Be short." in prompt.text
    assert reply.text == "It is 4"
    assert reply.logprobs is not None
    assert np.isfinite(reply.logprobs).all()
    assert attempt(task, tokenizer, "It is 5").outcome.reward == 0.0


@pytest.mark.slow
def test_turns_of_an_environment_extend_the_ids(folder: Path, tokenizer: Tokenizer) -> None:
    task = taskset(folder, "again")
    rollout = attempt(task, tokenizer, "3", "5", "4")
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert [turn.text for turn in rollout.turns if turn.is_sampled] == ["3", "5", "4"]
    assert not any(turn.role in (CONVERSATION, RESTART) for turn in rollout.turns)
    assert "Again." in rollout.turns[2].text
    assert "Say 4." not in rollout.turns[2].text
    # Given replies are played without a model.
    example = task.examples(Split.TRAIN)[0]
    assert verdict(task, example, TURN.join(["3", "4"])).reward == 1.0
    assert verdict(task, example, "").reward == 0.0


@pytest.mark.slow
def test_an_environment_of_the_older_form_is_played(folder: Path, tokenizer: Tokenizer) -> None:
    require_system_part("the environment of verifiers 0.3.1", environment_of((), "v0").is_ready())
    task = taskset(folder, "older", form="v0", config={"number": 9})
    assert [len(task.examples(split)) for split in (Split.HELD_OUT, Split.TRAIN)] == [4, 5]
    rollout = attempt(task, tokenizer, "3", "4")
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert [turn.text for turn in rollout.turns if turn.is_sampled] == ["3", "4"]
    assert not any(turn.role in (CONVERSATION, RESTART) for turn in rollout.turns)
    assert "Again." in rollout.turns[2].text
    example = task.examples(Split.TRAIN)[0]
    assert verdict(task, example, TURN.join(["4", "5"])).reward == 0.0


@pytest.mark.slow
def test_a_fault_of_the_taskset_is_no_reward(folder: Path, tokenizer: Tokenizer) -> None:
    outcome = attempt(taskset(folder, "guess"), tokenizer, "break").outcome
    assert outcome.reward is None
    assert outcome.failure is not None
    assert outcome.failure.owner == "task"
    assert "a bug of the taskset" in outcome.failure.detail


@pytest.mark.slow
def test_calls_beyond_the_budget_leave_an_episode_without_a_score(folder: Path, tokenizer: Tokenizer) -> None:
    task = taskset(folder, "again", agent_tokens=3)
    outcome = attempt(task, tokenizer, "3333333333", "4").outcome
    assert (outcome.reward, outcome.failure, outcome.truncated) == (None, None, True), outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"taskset": "absent"}, "cannot begin: ModuleNotFoundError"),
        ({"agent": "python a.py"}, "have their own agents"),
    ],
)
def test_what_cannot_be_played_is_refused(folder: Path, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        taskset(
            folder, **{"name": "guess", **settings} if "agent" in settings else {"name": "absent"}
        ).examples(Split.TRAIN)


LIMITS = TaskLimits(max_reply_tokens=1)


def test_an_error_of_an_agent_leaves_an_episode_unscored() -> None:
    error = {"type": "SandboxError", "message": "the box is gone", "status": None}
    trace = {"rewards": {}, "metrics": {}, "errors": [error], "is_truncated": False}
    assert failed(to_outcome({"traces": [trace], "errors": []}, LIMITS)) == ("infra", "SandboxError")
    assert to_outcome({"traces": [], "errors": []}, LIMITS).reward is None
