"""The programs of docs/environments.md that play environments of other libraries, as they stand there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.rollout import Split
from tests.environments.test_worlds import build, call, play
from tests.faults.test_examples import code

WORDLE = '''
class Wordle:
    """In the form of TRL's environment_factory."""

    def reset(self, secret: str = "crane", **kwargs) -> str | None:
        self.reward, self.secret = 0.0, secret
        return f"It has {len(secret)} letters."

    def guess(self, word: str) -> str:
        if len(word) != len(self.secret):
            raise ValueError(f"{word} has {len(word)} letters.")
        self.reward = float(word == self.secret)
        return "right" if self.reward else "wrong"

    def get_reward(self) -> float:
        return self.reward
'''


def test_gymnasium() -> None:
    task = build(code("environments.md", "FrozenLakeEnv"), name="Lake")
    told, outcome = play(
        task, task.examples(Split.TRAIN)[0], "I go down: 1", "1", "left or right?", "2", "2", "1", "2"
    )
    assert "[S]FFF" in told[0]
    assert "[F]" in told[1]
    assert outcome.reward == 1.0
    assert outcome.turn_rewards == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    assert play(task, task.examples(Split.TRAIN)[0], "1", "2")[1].reward == 0.0


def test_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wordle.py").write_text(WORDLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = build(code("environments.md", "Wordle"), name="Words")
    told, outcome = play(
        task,
        task.examples(Split.TRAIN)[0],
        call("guess", word="so"),
        call("guess", word="slate"),
        call("guess", word="crane"),
    )
    assert told[0].endswith("It has 5 letters.")
    assert [text.startswith("error: ") for text in told[-3:]] == [True, False, False]
    assert (outcome.reward, outcome.metrics["num_tool_errors"]) == (1.0, 1.0)


def test_textarena() -> None:
    task = build(code("environments.md", "textarena"), name="Arena")
    told, outcome = play(task, task.examples(Split.TRAIN)[0], *(f"[{number}]" for number in range(1, 11)))
    assert "between 1 and 20" in told[0]
    # What was shown is not shown again.
    assert "between 1 and 20" not in "".join(told[1:])
    assert outcome.reward is not None
    assert 0.0 <= outcome.reward <= 1.0
