"""A run whose rollouts have several turns: every reply of them is trained on, and it learns."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import pytest

from strop.environments import run_rollout
from strop.environments.worlds import BuiltInWorld
from strop.record.rollouts import read_rollouts
from strop.rollout import Example, FailureOwner, Outcome, Rollout, Split
from strop.spec.task import EnvironmentSection
from strop.tasks import TaskLimits, build_task
from strop.tasks.generated import ArithmeticSpec
from strop.tokenizer import Tokenizer
from strop.train.batch import build_batch
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.spell import GOLD, STOPS, SpellTask
from tests.fixtures.tiny_run import ACCEPTED, Composition, new_run, tiny_spec


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


class EarningLetters(Letters):
    """The same, which says what each turn earned."""

    def score(self) -> Outcome:  # type: ignore[override]
        earned = tuple(one / self.max_turns for one in self._earned)
        return Outcome(parts={"share": sum(earned)}, turn_rewards=earned)


class Miscounting(Letters):
    """The same, which says so of one turn alone."""

    def score(self) -> Outcome:  # type: ignore[override]
        return Outcome(parts={"share": 1.0}, turn_rewards=(1.0,))


def test_a_run_gives_credit_to_single_turns(tmp_path: Path, tiny_model_dir: Path) -> None:
    task = BuiltInWorld(LettersSpec(), EarningLetters)
    spec = tiny_spec(
        task={"name": "guess-number"},
        algorithm={"credit": "turn", "turn_discount": 0.9},
        train={"steps": 2, "prompts_per_step": 2, "group_size": 4},
    )
    made = Composition(spec=spec, model_dir=tiny_model_dir, run_dir=new_run(tmp_path), task=task)
    made.run()
    (line, _) = made.notes.steps
    assert line["num_optimizer_steps"] == 1.0
    # A third turn that no other attempt of the group has is compared with none.
    assert 0.0 < line["num_signal_tokens"] <= line["num_scored_tokens"]
    one, *_ = read_rollouts(made.run_dir.rollouts_files()[0])
    assert len(one.outcome.turn_rewards) == one.outcome.metrics["num_turns"]
    assert one.outcome.reward == pytest.approx(sum(one.outcome.turn_rewards))


def test_rewards_of_other_turns_than_those_of_the_attempt_are_no_score(tiny_model_dir: Path) -> None:
    task = BuiltInWorld(LettersSpec(), Miscounting)
    plan = plan_for(task.examples(Split.TRAIN)[0], max_reply_tokens=4)
    tokenizer = Tokenizer.load(tiny_model_dir)
    engine = DummyEngine(tokenizer, ["A", "B", "C"])
    found = asyncio.run(run_rollout(task.world.make_environment(), engine, tokenizer, plan))
    assert found.outcome.failure is not None
    assert found.outcome.failure.owner is FailureOwner.TASK
    assert "in an attempt of" in found.outcome.failure.detail


def test_an_attempt_may_say_as_much_as_all_its_turns() -> None:
    """What is overlong, and the constant of a constant normaliser, are those of the attempt."""
    for section, tokens in ((LettersSpec(), 3 * 32), (LettersSpec(max_turns=2, max_attempt_tokens=50), 50)):
        task = BuiltInWorld(section, Letters)
        assert task.attempt_tokens(task.limits) == tokens
    agent = build_task(ArithmeticSpec(agent="true", agent_tokens=70))
    assert agent.attempt_tokens(agent.limits) == 70
    plain = build_task(ArithmeticSpec())
    assert plain.attempt_tokens(plain.limits) == plain.limits.max_reply_tokens


def test_a_run_learns_from_all_turns(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def build(algorithm: Any, groups: Any, *limits: Any) -> Any:
        asked.append(limits)
        return build_batch(algorithm, groups, *limits)

    monkeypatch.setattr("strop.train.step.build_batch", build)
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
    assert asked == [(96, [96] * 4)] * 6


# A task of several parts: each has its own limit, and numbers of its own.

SHORT, LONG = 3, 64


class Halves(SpellTask):
    """Every reply earns the same; those to even examples are cut at 3 tokens, the others at 64."""

    def limits_of(self, example: Example) -> TaskLimits:
        limit = SHORT if self.part_of(example) == "short" else LONG
        return TaskLimits(max_reply_tokens=limit, stop_strings=self.limits.stop_strings)

    def part_of(self, example: Example) -> str:
        return "odd" if example.fields["n"] % 2 else "short"

    async def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"there": 0.5, "form": 0.1 * text.isascii()}, is_correct=text.isascii())


class ShortParts(Halves):
    """All examples are of the part with the low limit."""

    def part_of(self, example: Example) -> str:
        return "short"

    async def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"there": 0.5})


def test_a_reply_that_is_cut_loses_reward_by_the_limit_of_its_own_part(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: a reply cut at its 16 tokens kept its full reward in a mixture whose widest limit was 64.

    The rewards are all equal, so that only the shaping can tell replies apart. By the widest limit no group
    would show a difference, and all would be sampled again for ever.
    """
    spec = tiny_spec(
        algorithm={"overlong": "shape", "zero_variance": "resample"},
        train={"steps": 1, "accept": f"{ACCEPTED}"},
    )
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=ShortParts())
    made.run()
    (line,) = made.notes.steps
    assert line["truncated_frac"] > 0.0
    assert line["zero_variance_frac"] == 0.0
    assert line["num_signal_tokens"] == line["num_scored_tokens"] > 0.0
    assert set(made.notes.causes("tripwire")) <= {"truncation"}


def expect_parts(rollouts: list[Rollout], task: Halves) -> dict[str, float]:
    by_label: Mapping[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_label[task.part_of(rollout.example)].append(rollout)
    found: dict[str, float] = {}
    for label, members in by_label.items():
        found |= {
            f"reward_mean_{label}": fmean(one.outcome.reward or 0.0 for one in members),
            f"accuracy_{label}": fmean(bool(one.outcome.is_correct) for one in members),
            f"truncated_frac_{label}": fmean(one.outcome.truncated for one in members),
            f"reply_tokens_mean_{label}": fmean(one.num_sampled_tokens for one in members),
        }
    for name in ("there", "form"):
        found[f"reward_part_{name}"] = fmean(one.outcome.parts[name] or 0.0 for one in rollouts)
    return found


def test_a_run_records_the_reward_and_the_length_of_every_part(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"accept": f"{ACCEPTED}"})
    task = Halves()
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run()
    begins = ("reward_mean_", "accuracy_", "truncated_frac_", "reply_tokens_mean_", "reward_part_")
    seen: set[str] = set()
    for line in made.run_dir.metrics.read():
        rollouts = read_rollouts(made.run_dir.rollouts_path(int(line["step"])))
        found = {name: value for name, value in line.items() if name.startswith(begins)}
        assert found == pytest.approx(expect_parts(rollouts, task))
        seen |= found.keys()
    assert {"reward_mean_odd", "reward_mean_short", "reply_tokens_mean_odd", "reward_part_form"} <= seen
    # The sum over the parts of the reward is the reward.
    assert line["reward_part_there"] + line["reward_part_form"] == pytest.approx(line["reward_mean"])
