"""The loop from end to end in one process, on a small random model."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.errors import CheckRefused, CorruptRecord, Interrupted
from strop.io import verify_directory
from strop.policy.language_model import LanguageModel
from strop.policy.weights import weights_digest
from strop.record import RunDir
from strop.record.rollouts import read_rollouts
from strop.rollout import Split
from strop.spec import RunSpec
from strop.train import EvalSummary
from strop.train.watch.process import DiskWatch
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import (
    GATE_CHECKS,
    Composition,
    learner_of,
    new_run,
    read_curve,
    summary,
    tiny_spec,
)

METRICS = {
    "failed_frac",
    "duplicate_frac",
    "reward_mean",
    "truncated_frac",
    "timed_out_frac",
    "accuracy",
    "format_ok_frac",
    "reply_tokens_mean",
    "entropy_nats",
    "zero_variance_frac",
    "num_scored_tokens",
    "num_signal_tokens",
    "num_forwarded",
    "loss",
    "grad_norm",
    "lr",
    "changed_frac",
    "num_positions",
    "drift_mean_nats",
    "drift_p99_nats",
    "drift_max_nats",
    "seconds_generate",
    "seconds_verify",
    "seconds_learn",
    "seconds_compute",
    "seconds_sync",
    "seconds_other",
    "seconds_step",
    "scored_tokens_per_s",
    "policy_version",
    "peak_memory_bytes",
    "memory_bytes",
}


def train(root: Path, model_dir: Path, spec: RunSpec) -> Composition:
    made = Composition(spec, model_dir, new_run(root))
    made.run()
    return made


def resume(made: Composition, spec: RunSpec | None = None) -> Composition:
    """Compose the same run anew, as another process would, and take its lock."""
    run_dir = RunDir.open(made.run_dir.path)
    run_dir.acquire()
    return Composition(spec or made.spec, made.model_dir, run_dir, task=made.task)


def test_a_healthy_run_records_every_step_and_raises_no_alarm(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = train(tmp_path, tiny_model_dir, tiny_spec(train={"steps": 3, "checkpoint_every": 2}))
    lines = made.run_dir.metrics.read()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, told in zip(lines, made.notes.steps, strict=True):
        assert line == told
        assert set(line) >= METRICS
        # Part of learning; the stages and the rest make up the step.
        assert 0.0 < line["seconds_compute"] <= line["seconds_learn"]
        stages = METRICS - {"seconds_compute"}
        parts = [line[name] for name in stages if name.startswith("seconds_")]
        assert sum(parts) == pytest.approx(2 * line["seconds_step"], rel=1e-6)
        assert line["drift_mean_nats"] < 1e-5
    assert made.notes.causes("tripwire") == []
    assert made.notes.causes("gate") == GATE_CHECKS
    assert [event.cause for event in made.run_dir.events.read()] == [
        event.cause for event in made.notes.events
    ]
    assert made.notes.starts == [(str(made.run_dir.path), 0, 3)]
    assert made.run_dir.is_finished


def test_rollouts_of_a_step_are_those_that_the_metrics_sum_up(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = train(tmp_path, tiny_model_dir, tiny_spec())
    known = {example.example_id for example in made.task.examples(Split.TRAIN)}
    for line in made.run_dir.metrics.read():
        rollouts = read_rollouts(made.run_dir.rollouts_path(int(line["step"])))
        assert len(rollouts) == 3 * 4
        assert {rollout.example.example_id for rollout in rollouts} <= known
        rewards = [rollout.outcome.reward or 0.0 for rollout in rollouts]
        assert line["reward_mean"] == pytest.approx(sum(rewards) / 12)
        assert line["num_scored_tokens"] == sum(rollout.num_sampled_tokens for rollout in rollouts)
        # The step was sampled by the weights of the step before.
        assert {rollout.step for rollout in rollouts} == {line["step"] - 1}
        assert {turn.policy_version for r in rollouts for turn in r.turns if turn.is_sampled} == {
            line["step"] - 1
        }


def test_checkpoints_come_every_so_often_and_at_the_end(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"steps": 5, "checkpoint_every": 2, "keep_checkpoints": 2})
    made = train(tmp_path, tiny_model_dir, spec)
    # 5 is no multiple of 2; two are kept.
    assert made.run_dir.checkpoint_steps() == [4, 5]
    for step in (4, 5):
        manifest = verify_directory(made.run_dir.checkpoint_path(step))
        assert manifest.facts["step"] == step
        assert {"model/model.safetensors", "state/optimizer.safetensors"} <= set(manifest.files)


def test_a_signal_after_the_last_look_at_what_is_due_still_leaves_a_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_low(self: DiskWatch, step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(DiskWatch, "find_low", find_low)
    made = Composition(
        tiny_spec(train={"steps": 4, "checkpoint_every": 4}), tiny_model_dir, new_run(tmp_path)
    )
    with pytest.raises(Interrupted, match=r"after step 2\. .*goes on from checkpoint step-000002"):
        made.run()
    assert made.run_dir.checkpoint_steps() == [2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_is_the_trained_model(tmp_path: Path, tiny_model_dir: Path, dtype: str) -> None:
    made = Composition(tiny_spec(model={"dtype": dtype}), tiny_model_dir, new_run(tmp_path))
    roles = made.run()
    export = made.run_dir.checkpoint_path(3) / "model"
    plain = AutoModelForCausalLM.from_pretrained(export, dtype="auto", local_files_only=True)
    live = dict(learner_of(roles).model.named_parameters())
    stored = dict(plain.named_parameters())
    assert stored.keys() == live.keys()
    assert all(torch.equal(stored[name], live[name]) for name in live)
    assert plain.generation_config.eos_token_id == 260
    # And it is a model that strop itself can start from.
    again = LanguageModel.load(export, dtype=getattr(torch, dtype))
    assert weights_digest(again) == weights_digest(learner_of(roles).model)


def test_reward_rises(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"steps": 15, "prompts_per_step": 4, "group_size": 8, "checkpoint_every": 15})
    rewards = [line["reward_mean"] for line in train(tmp_path, tiny_model_dir, spec).notes.steps]
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3


def test_equal_runs_are_equal_and_seeds_matter(tmp_path: Path, tiny_model_dir: Path) -> None:
    first, again, other = (
        read_curve(train(tmp_path / name, tiny_model_dir, tiny_spec(seed=seed)).run_dir.path)
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert first == again
    assert first.rollouts != other.rollouts
    assert first.weights != other.weights


@pytest.mark.parametrize(("every", "expected"), [(2, [0, 2, 4, 5]), (None, [0, 5])])
def test_held_out_examples_are_looked_at_before_between_and_after(
    tmp_path: Path, tiny_model_dir: Path, every: int | None, expected: list[int]
) -> None:
    seen: list[tuple[int, int]] = []

    async def evaluate(step: int, on_progress: Callable[[], None]) -> EvalSummary:
        seen.append((step, len(made.run_dir.metrics.read())))
        # Who is killed meanwhile does the step again, and so repeats the evaluation.
        assert step not in made.run_dir.checkpoint_steps()
        return summary(step)

    spec = tiny_spec(train={"steps": 5}, eval={"every": every})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), evaluate=evaluate)
    made.run()
    # Each after the metrics of its step are on record.
    assert seen == [(step, step) for step in expected]
    assert [told.step for told in made.notes.summaries] == expected


@pytest.mark.slow
def test_a_long_evaluation_that_comes_further_is_no_hung_one(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only evaluations move: a pause of the machine would end the tests themselves."""
    now_s = 0.0
    monkeypatch.setattr("strop.train.watch.process.time", SimpleNamespace(monotonic=lambda: now_s))

    async def evaluate(step: int, on_progress: Callable[[], None]) -> EvalSummary:
        nonlocal now_s
        for _ in range(4):  # 6 s in all, with 1.5 s between two signs of life
            now_s += 1.5
            await asyncio.sleep(0.7)  # The watchdog looks every 0.5 s.
            on_progress()
        return summary(step)

    spec = tiny_spec(train={"steps": 1}, eval={"every": None}, tripwires={"max_stall_s": 2.0})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), evaluate=evaluate)
    # A stall ends this process.
    made.run()
    assert [told.step for told in made.notes.summaries] == [0, 1]


def test_another_number_of_threads_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = train(tmp_path, tiny_model_dir, tiny_spec())
    path = made.run_dir.checkpoint_path(3) / "state" / "trainer.json"
    assert '"num_threads": 1' in path.read_text()
    resumed = resume(made)

    def use_two_threads(roles: object) -> object:
        torch.set_num_threads(2)
        return roles

    try:
        with pytest.raises(CheckRefused, match=r"with 1 threads and would go on with 2\. .*threads=1"):
            resumed.run(use_two_threads)
    finally:
        torch.set_num_threads(1)


def test_a_damaged_checkpoint_is_refused_and_never_skipped(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = train(tmp_path, tiny_model_dir, tiny_spec())
    path = made.run_dir.checkpoint_path(3) / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match=r"step-000003/model/model\.safetensors has SHA-256"):
        resume(made).run()


def test_a_task_too_small_for_a_step_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = Composition(
        tiny_spec(train={"prompts_per_step": 13}), tiny_model_dir, new_run(tmp_path), task=SpellTask()
    )
    with pytest.raises(ValueError, match=r"has 12 training examples and a step asks for 13\. Allowed: "):
        made.run()
