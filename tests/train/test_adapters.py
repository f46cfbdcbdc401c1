"""A run that trains adapters: the same loop, checkpoints with adapters in them, and a resume bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.policy.language_model import LanguageModel
from strop.policy.weights import weights_digest
from strop.record import RunDir
from strop.run.export import export_checkpoint
from strop.store.model_files import digest_model
from tests.fixtures.tiny_run import Composition, learner_of, new_run, read_curve, tiny_spec


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
    again = Composition(tiny_spec(**sections), tiny_model_dir, RunDir.open(first.run_dir.path))
    again.run_dir.acquire()
    again.run()
    assert read_curve(again.run_dir.path).weights == read_curve(whole.run_dir.path).weights
