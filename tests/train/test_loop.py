"""The loop from end to end in one process, on a small random model."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.errors import CheckRefused, Interrupted
from strop.policy.language_model import LanguageModel
from strop.policy.weights import weights_digest
from strop.record.fence import NUMBER_VARIABLE, raise_fence
from strop.record.rollouts import read_rollouts
from strop.rollout import Split
from strop.run.export import export_checkpoint
from strop.spec import RunSpec
from strop.store.model_files import digest_model
from strop.train import EvalSummary
from strop.train.watch.process import DiskWatch, Watchdog
from tests.fixtures.families import family_model
from tests.fixtures.tiny_run import (
    GATE_CHECKS,
    Composition,
    Notes,
    learner_of,
    new_run,
    read_curve,
    summary,
    take_up,
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


def test_a_healthy_run_records_every_step_and_raises_no_alarm(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = train(tmp_path, tiny_model_dir, tiny_spec(train={"steps": 3, "checkpoint_every": 2}))
    lines = made.run_dir.metrics.read()
    assert [line["step"] for line in lines] == [1, 2, 3]
    known = {example.example_id for example in made.task.examples(Split.TRAIN)}
    for line, told in zip(lines, made.notes.steps, strict=True):
        assert line == told
        assert set(line) >= METRICS
        # Of a task of one part there are no numbers by part.
        assert not [name for name in line if name.startswith(("reward_mean_", "reward_part_", "accuracy_"))]
        # Part of learning; the stages and the rest make up the step.
        assert 0.0 < line["seconds_compute"] <= line["seconds_learn"]
        stages = METRICS - {"seconds_compute"}
        parts = [line[name] for name in stages if name.startswith("seconds_")]
        assert sum(parts) == pytest.approx(2 * line["seconds_step"], rel=1e-6)
        assert line["drift_mean_nats"] < 1e-5
        rollouts = read_rollouts(made.run_dir.rollouts_path(int(line["step"])))
        assert len(rollouts) == 3 * 4
        assert {rollout.example.example_id for rollout in rollouts} <= known
        rewards = [rollout.outcome.reward or 0.0 for rollout in rollouts]
        assert line["reward_mean"] == pytest.approx(sum(rewards) / 12)
        assert line["num_scored_tokens"] == sum(rollout.num_sampled_tokens for rollout in rollouts)
        # The step was sampled by the weights of the step before.
        versions = {turn.policy_version for r in rollouts for turn in r.turns if turn.is_sampled}
        assert versions == {rollout.step for rollout in rollouts} == {line["step"] - 1}
    assert made.notes.causes("tripwire") == []
    assert made.notes.causes("gate") == GATE_CHECKS
    assert [event.cause for event in made.run_dir.events.read()] == [
        event.cause for event in made.notes.events
    ]
    assert made.notes.starts == [(str(made.run_dir.path), 0, 3)]
    assert made.run_dir.is_finished


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
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int | None,
    expected: list[int],
) -> None:
    seen: list[tuple[int, int]] = []
    signs: list[object] = []
    monkeypatch.setattr(Watchdog, "progress", lambda self, *stage: signs.append(stage))

    async def evaluate(step: int, on_progress: Callable[[], None]) -> EvalSummary:
        seen.append((step, len(made.run_dir.metrics.read())))
        # A long evaluation that comes further is no hung one.
        num_signs = len(signs)
        on_progress()
        assert len(signs) == num_signs + 1
        # Who is killed meanwhile does the step again, and so repeats the evaluation.
        assert step not in made.run_dir.checkpoint_steps()
        return summary(step)

    spec = tiny_spec(train={"steps": 5}, eval={"every": every})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), evaluate=evaluate)
    made.run()
    # Each after the metrics of its step are on record.
    assert seen == [(step, step) for step in expected]
    assert [told.step for told in made.notes.summaries] == expected


def test_another_number_of_threads_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = train(tmp_path, tiny_model_dir, tiny_spec())
    path = made.run_dir.checkpoint_path(3) / "state" / "trainer.json"
    assert '"num_threads": 1' in path.read_text()
    resumed = take_up(made)

    def use_two_threads(roles: object) -> object:
        torch.set_num_threads(2)
        return roles

    try:
        with pytest.raises(CheckRefused, match=r"with 1 threads and would go on with 2\. .*threads=1"):
            resumed.run(use_two_threads)
    finally:
        torch.set_num_threads(1)


# A checkpoint is written by the living attempt alone, after the logs that belong to it.


class Overtaken(Notes):
    """Has a later attempt begin elsewhere after the second step."""

    run_path: Path

    def on_step(self, metrics: Mapping[str, float]) -> None:
        super().on_step(metrics)
        if metrics["step"] == 2:
            raise_fence(self.run_path, 1, "17-1")


def test_an_attempt_that_was_overtaken_writes_no_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER_VARIABLE, "0")
    spec = tiny_spec(train={"steps": 4, "checkpoint_every": 2})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), notes=Overtaken())
    raise_fence(made.run_dir.path, 0, "17-0")
    made.notes.run_path = made.run_dir.path  # type: ignore[attr-defined]
    with pytest.raises(CheckRefused, match=r"attempt 0 of .* was overtaken by attempt 1 \(17-1\)"):
        made.run()
    assert list(made.run_dir.checkpoints_path.iterdir()) == []
    assert made.notes.causes("checkpoint") == []


def test_logs_are_on_the_disk_before_the_checkpoint_that_continues_them(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a checkpoint of step k with metrics of fewer steps would be a curve with a gap."""
    made = Composition(tiny_spec(train={"checkpoint_every": 1}), tiny_model_dir, new_run(tmp_path))
    logs = [made.run_dir.path / name for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl")]
    durable: dict[Path, int] = {}
    at_seal: list[list[tuple[int, int]]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        durable[path] = os.fstat(descriptor).st_size
        if path.name.startswith("COMPLETE") or ".COMPLETE" in path.name:
            at_seal.append([(durable.get(log, 0), log.stat().st_size) for log in logs])

    monkeypatch.setattr(os, "fsync", note)
    made.run()
    assert len(at_seal) == 3
    for sizes in at_seal:
        assert all(synced == written > 0 for synced, written in sizes), sizes


# A run that trains adapters: the same loop, checkpoints with adapters in them, and a resume bit by bit.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_trained_sampled_from_and_exported(
    tmp_path: Path, tiny_model_dir: Path, dtype: str
) -> None:
    spec = tiny_spec(lora={"rank": 4}, model={"dtype": dtype}, optimizer={"lr": 0.01})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path))
    roles = made.run()
    # The engine samples with the adapters that the learner trains: their values differ by rounding.
    drifts = [line["drift_mean_nats"] for line in made.notes.steps]
    assert max(drifts) < (1e-4 if dtype == "float32" else 0.03)
    export = made.run_dir.checkpoint_path(3) / "model"
    base = LanguageModel.load(tiny_model_dir, dtype=getattr(torch, dtype))
    exported = load_file(export / "model.safetensors")
    moved = {name for name, copy in base.named_parameters() if not torch.equal(copy, exported[name])}
    assert moved == {name for name in exported if "_proj" in name}
    plain = LanguageModel.load(export, dtype=getattr(torch, dtype))
    assert weights_digest(plain) == weights_digest(learner_of(roles).model)
    assert AutoModelForCausalLM.from_pretrained(export, local_files_only=True) is not None
    assert json.loads((export / "adapter" / "adapter_config.json").read_text())["r"] == 4
    # What is taken out of the run is the same model, adapters beside it.
    # vLLM has no attention for heads of 16 on a CPU; real models are loaded by it elsewhere.
    export_checkpoint(made.run_dir.path, tmp_path / "out", load=lambda path: ())
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
    digests = {digest_model(place, tmp_path / "digests") for place in (export, tmp_path / "out")}
    assert len(digests) == 1
    state = load_file(made.run_dir.checkpoint_path(3) / "state" / "optimizer.safetensors")
    assert all("lora_" in name for name in state)


def test_a_resumed_run_of_adapters_is_the_same_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    sections = {"lora": {"rank": 4}}
    whole = Composition(tiny_spec(**sections), tiny_model_dir, new_run(tmp_path, "whole"))
    whole.run()
    train = {"steps": 2, "checkpoint_every": 2}
    first = Composition(tiny_spec(**sections, train=train), tiny_model_dir, new_run(tmp_path, "cut"))
    first.run()
    again = take_up(first, spec=tiny_spec(**sections))
    again.run()
    assert read_curve(again.run_dir.path).weights == read_curve(whole.run_dir.path).weights


# A run of a model whose sequences are computed by themselves: gate, steps, reference, checkpoint.


@pytest.fixture(scope="module")
def states_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with a state and layers with attention."""
    specials: dict[str, Any] = {"bos_token_id": None, "pad_token_id": 260}
    return family_model(tmp_path_factory.mktemp("model"), "qwen3_next", **specials)


@pytest.mark.filterwarnings("ignore:.*each sequence is computed by itself:RuntimeWarning")
def test_a_run_with_a_reference_trains_and_keeps_a_model(tmp_path: Path, states_dir: Path) -> None:
    spec = tiny_spec(reference={"kl_beta": 0.01})
    made = Composition(spec, states_dir, new_run(tmp_path))
    roles = made.run()
    (said,) = [event.detail for event in made.notes.events if event.cause == "parity"]
    assert "each sequence is computed by itself, prompts once for every reply" in said
    assert "because its layers carry a state from token to token" in said
    metrics = made.run_dir.metrics.read()
    assert [int(step["step"]) for step in metrics] == [1, 2, 3]
    assert max(step["drift_max_nats"] for step in metrics) < 1e-3
    export = made.run_dir.checkpoint_path(3) / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        kept = LanguageModel.load(export, dtype=torch.float32)
    trained = dict(learner_of(roles).model.named_parameters())
    assert all(torch.equal(weight, trained[name]) for name, weight in kept.named_parameters())
    first = LanguageModel.load(states_dir, dtype=torch.float32)
    assert not all(torch.equal(weight, trained[name]) for name, weight in first.named_parameters())
