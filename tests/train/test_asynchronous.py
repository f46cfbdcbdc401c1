"""Runs whose rollouts are sampled while the learner works: bounds, versions, fates, and resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.engine import WeightUpdate
from strop.engine.contract import ReplyScore
from strop.engine.native import NativeEngine
from strop.errors import Interrupted, RunStopped, WeightMismatch
from strop.record import RunDir
from strop.record.rollouts import read_rollouts
from strop.rollout import IntArray, Outcome, Rollout
from strop.tasks import Task
from tests.fixtures.apart import ApartPlacement
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, Notes, new_run, read_curve, reopen, tiny_spec

NUM_STEPS = 6


def compose(
    root: Path, model_dir: Path, *, task: Task | None = None, run_dir: RunDir | None = None, **settings: Any
) -> Composition:
    """Return a run that samples one step ahead, unless `settings` of its train section say otherwise."""
    algorithm = settings.pop("algorithm", {"zero_variance": settings.pop("zero_variance", None)})
    mode = settings.pop("update_mode", "drain")
    train = {"steps": NUM_STEPS, "max_staleness": 1, "checkpoint_every": 2, "keep_checkpoints": 9, **settings}
    spec = tiny_spec(
        train=train, placement={"kind": "ray"}, engine={"update_mode": mode}, algorithm=algorithm
    )
    placement = ApartPlacement(spec, model_dir, root / "weights")
    run_dir = run_dir or new_run(root)
    return Composition(spec, model_dir, run_dir, placement=placement, task=task or SpellTask())


def rollouts_of(made: Composition, step: int) -> list[Rollout]:
    return read_rollouts(made.run_dir.rollouts_path(step))


def versions_of(rollouts: list[Rollout]) -> set[int]:
    return {turn.policy_version for r in rollouts for turn in r.turns if turn.policy_version is not None}


def test_rollouts_are_sampled_one_step_ahead_and_never_further(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose(tmp_path, tiny_model_dir, mini_batches=3, epochs=2, deterministic=True)
    made.run()
    # Versions count batches, and not optimizer steps.
    assert [line["policy_version"] for line in made.notes.steps] == list(range(1, NUM_STEPS + 1))
    assert {line["num_optimizer_steps"] for line in made.notes.steps} == {6.0}
    assert not any("num_evicted_groups" in line for line in made.notes.steps)
    # Batches 1 and 2 are of the first weights; batch k of those that were published one step before.
    assert [versions_of(rollouts_of(made, step)) for step in range(1, NUM_STEPS + 1)] == [
        {0},
        {0},
        {1},
        {2},
        {3},
        {4},
    ]
    assert [line["staleness_max"] for line in made.notes.steps] == [0, 1, 1, 1, 1, 1]
    # The last step has nothing behind it to sample for.
    ahead = [line["num_groups_ahead"] for line in made.notes.steps]
    assert ahead[-1] == 0
    assert all(count == made.spec.train.prompts_per_step for count in ahead[:-1])
    # What the weights have moved is no disagreement between engine and learner.
    assert ["drift_mean_nats" in line for line in made.notes.steps] == [True, *[False] * 5]
    assert made.notes.causes("tripwire").count("logprob_drift") == 0
    # The event loop is free while the learner works, and every step says whether it kept up.
    for line in made.notes.steps:
        assert line["loop_lag_s"] >= 0.0
        assert 0.0 <= line["loop_late_frac"] <= 1.0


def test_every_example_is_trained_in_the_order_of_the_synchronous_run(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Staleness changes which weights sample, never what is sampled when."""
    orders = []
    for staleness in (0, 2):
        root = tmp_path / str(staleness)
        made = compose(root, tiny_model_dir, max_staleness=staleness)
        made.run()
        orders.append(
            [
                [(r.example.example_id, r.step, r.sample_index) for r in rollouts_of(made, step)]
                for step in range(1, NUM_STEPS + 1)
            ]
        )
    assert orders[0] == orders[1]


@dataclass
class StopsAfter(Notes):
    """Sends this process SIGTERM after a step, with groups of the next one under way."""

    stop_step: int = 0

    def on_step(self, metrics: Mapping[str, float]) -> None:
        super().on_step(metrics)
        if metrics["step"] == self.stop_step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_deterministic_run_that_is_interrupted_goes_on_to_the_same_curve(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole = compose(tmp_path / "whole", tiny_model_dir, deterministic=True)
    whole.run()
    first = compose(tmp_path / "parts", tiny_model_dir, deterministic=True)

    first.notes = StopsAfter(stop_step=3)
    with pytest.raises(Interrupted):
        first.run()
    assert first.run_dir.checkpoint_steps()[-1] == 3
    again = reopen(first.run_dir.path)
    compose(tmp_path / "parts", tiny_model_dir, deterministic=True, run_dir=again).run()
    assert read_curve(first.run_dir.path) == read_curve(whole.run_dir.path)


class FlatOnEven(SpellTask):
    """Pays every wrong reply to an even example the same."""

    async def verify(self, example: Any, text: str) -> Outcome:
        if int(example.fields["n"]) % 2 == 0 and text != example.answer:
            return Outcome(parts={"spelled": 0.25}, is_correct=False)
        return await super().verify(example, text)


class Flat(SpellTask):
    """Pays every wrong reply the same, as a task does that is far too hard."""

    async def verify(self, example: Any, text: str) -> Outcome:
        return Outcome(parts={"spelled": float(text == example.answer)}, is_correct=text == example.answer)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_without_any_group_trains_nothing_and_is_counted(
    tmp_path: Path, tiny_model_dir: Path, staleness: int
) -> None:
    """Incident: a run whose groups were all discarded ended with ZeroDivisionError."""
    made = compose(
        tmp_path,
        tiny_model_dir,
        task=Flat(),
        zero_variance="resample",
        max_staleness=staleness,
        prompts_per_step=2,
        steps=9,
    )
    with pytest.raises(RunStopped, match="in a row without an update"):
        made.run()
    assert made.notes.causes("tripwire")[0] == "short_batch"
    for line in made.notes.steps:
        # What was not computed is absent.
        assert not {"failed_frac", "reward_mean", "loss"} & line.keys()
        assert (line["num_filtered_groups"] > 0, line["num_scored_tokens"]) == (True, 0.0)


def test_continued_replies_are_recorded_with_the_version_of_each_token(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    made = compose(tmp_path, tiny_model_dir, update_mode="continue", max_staleness=2)
    made.run()
    turns = [turn for step in range(1, NUM_STEPS + 1) for r in rollouts_of(made, step) for turn in r.turns]
    for turn in turns:
        if turn.segments:
            assert turn.policy_version == turn.segments[0].version
            assert [one.version for one in turn.segments] == sorted({one.version for one in turn.segments})
            assert turn.segments[-1].start < len(turn.token_ids)
    assert max(line["staleness_max"] for line in made.notes.steps) <= 2


class KeepsOldWeights(NativeEngine):
    """Acknowledges every update and goes on with the weights that it has."""

    def _load(self, update: WeightUpdate) -> None:
        return


def test_an_engine_that_silently_keeps_old_weights_ends_the_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    """SMP-6: rollouts of base weights throughout, because updates were acknowledged and dropped."""
    made = compose(tmp_path, tiny_model_dir)
    weights_dir = tmp_path / "weights"
    made.placement = ApartPlacement(made.spec, tiny_model_dir, weights_dir, make_engine=KeepsOldWeights)
    with pytest.raises(WeightMismatch, match=r"no engine serves version 1: .*weight_canary: its scores"):
        made.run()
    # The first step was sampled under the weights that it said. Nothing was trained on what came afterwards.
    assert [line["step"] for line in made.notes.steps] == [1]
    assert made.run_dir.rollouts_files() == [made.run_dir.rollouts_path(1)]


class RoundsOtherwise(NativeEngine):
    """Has kernels of its own, which put single tokens further off than the parity gate allows on average."""

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        found = await super().score(prompt_ids, reply_ids, temperature)
        off = np.where(np.arange(len(reply_ids)) % 2, 0.002, -0.002).astype(np.float32)
        return replace(found, logprobs=found.logprobs + off)


def test_an_engine_that_rounds_otherwise_is_not_taken_for_one_with_other_weights(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """A run on vLLM ended at its 43rd update: the canary was held to what thousands of tokens reach."""
    made = compose(tmp_path, tiny_model_dir)
    weights_dir = tmp_path / "weights"
    made.placement = ApartPlacement(made.spec, tiny_model_dir, weights_dir, make_engine=RoundsOtherwise)
    made.run()
    assert len(made.notes.steps) == NUM_STEPS
