"""A run whose rollouts have several turns: every reply of them is trained on, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from strop.environments.worlds import BuiltInWorld
from strop.record.rollouts import read_rollouts
from strop.rollout import Example, Split
from strop.spec.task import EnvironmentSection
from strop.tasks import TaskLimits
from tests.fixtures.spell import GOLD, STOPS
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec


class LettersSpec(EnvironmentSection):
    """A world for a random model."""

    name: Literal["letters"] = "letters"
    num_train: int = 8
    num_held_out: int = 2


class Letters:
    """Three times `Q7Z` is wanted; other replies earn by their share of ASCII characters."""

    name = "letters"
    version = "1"
    max_turns = 3
    limits = TaskLimits(max_reply_tokens=32, stop_strings=STOPS)

    def __init__(self, spec: LettersSpec) -> None:
        self._earned: list[float] = []

    def examples(self, split: Split) -> list[dict[str, Any]]:
        return [{"split": split, "number": number} for number in range(8 if split is Split.TRAIN else 2)]

    def reset(self, example: Example, seed: int) -> str:
        return f"#{example.fields['number']}"

    def step(self, text: str) -> str:
        share = sum(character.isascii() for character in text) / max(len(text), 1)
        self._earned.append(1.0 if text == GOLD else 0.4 * share)
        return "More."

    def score(self) -> float:
        return sum(self._earned) / self.max_turns

    def gold_replies(self, example: Example) -> list[tuple[str, ...]]:
        return [(GOLD,) * 3]


def test_a_run_learns_from_all_turns(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"steps": 6, "prompts_per_step": 4, "group_size": 8})
    task = BuiltInWorld(LettersSpec(), Letters)
    made = Composition(spec=spec, model_dir=tiny_model_dir, run_dir=new_run(tmp_path), task=task)
    made.run()
    rollouts = [one for path in made.run_dir.rollouts_files() for one in read_rollouts(path)]
    assert {sum(turn.is_sampled for turn in one.turns) for one in rollouts} == {1, 2, 3}
    whole = next(one for one in rollouts if sum(turn.is_sampled for turn in one.turns) == 3)
    assert [turn.role for turn in whole.turns] == ["prompt", "assistant"] * 3
    assert whole.outcome.metrics["num_turns"] == 3.0
    rewards = [metrics["reward_mean"] for metrics in made.notes.steps]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]), rewards
