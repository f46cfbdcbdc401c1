"""Incidents of the checkpoint group, as far as files can cause or prevent them.

That a resumed run equals an uninterrupted one is shown where runs are trained.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.errors import ConfigError, StoreError
from strop.io import AtomicDirectory, verify_directory
from strop.policy.learner import Learner
from strop.policy.lora import merge_adapters
from strop.policy.weights import export_tensors, own_tensors, weights_digest
from strop.record import RunDir
from strop.spec.model import LoraSpec
from strop.spec.train import OptimizerSpec
from strop.store import get_model
from strop.tokenizer import Tokenizer
from strop.train.gate_models import check_tensors, check_weights
from tests.fixtures.attempts import fork, wait_for_end
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_run import learner_of
from tests.fixtures.write_points import write_and_die, write_checkpoint
from tests.incidents.faulty_engines import build_gate
from tests.policy.worlds import World, load_model, make_model, reinforce

NORM = "model.norm.weight"
MAX_WRITE_POINTS = 200


def save(run: RunDir, step: int) -> Path:
    return write_checkpoint(run.checkpoint_path(step), str(step))


def reaches_its_end(target: Path, countdown: int, *, replace: bool) -> bool:
    """Return whether a writer that dies at a touch of the file system had no such touch to make."""
    code = wait_for_end(fork(write_and_die, target, countdown, replace))
    assert code in {0, -signal.SIGKILL}
    return code == 0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", "", "d1", {})


def test_ckp_4_a_kill_at_any_write_point_leaves_the_previous_checkpoint(run: RunDir) -> None:
    """Incident: the newest directory was chosen without a completeness marker; a torn save looked whole."""
    save(run, 10)
    target = run.checkpoint_path(20)
    num_died = num_published = 0
    for countdown in range(MAX_WRITE_POINTS):
        if reaches_its_end(target, countdown, replace=False):
            break
        num_died += 1
        latest = run.latest_checkpoint()
        assert latest is not None
        step, path = latest
        verify_directory(path)
        # Once the name is there, the rest is tidying: the new checkpoint counts, whole.
        assert step == (20 if target.exists() else 10)
        num_published += step == 20
        run.release()
        run.acquire()
        assert {entry.name for entry in run.checkpoints_path.iterdir()} == {
            f"step-{known:06d}" for known in run.checkpoint_steps()
        }
        shutil.rmtree(target, ignore_errors=True)
    # Two directories and two files made, four files read back or sealed, a manifest and two renames.
    assert num_died >= 10
    assert num_died < MAX_WRITE_POINTS
    assert num_published <= 2
    run.release()


def test_ckp_4_a_kill_while_replacing_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for countdown in range(MAX_WRITE_POINTS):
        with AtomicDirectory(target, replace=True) as partial:
            (partial / "old.bin").write_bytes(b"old")
        if reaches_its_end(target, countdown, replace=True):
            break
        # At no point is there nothing, or a mixture.
        names = set(verify_directory(target).files)
        assert names in ({"old.bin"}, {"model/part.bin", "state/part.bin"})
    assert set(verify_directory(target).files) == {"model/part.bin", "state/part.bin"}
    assert countdown >= 10


def test_ckp_1_an_empty_model_folder_is_refused(tmp_path: Path) -> None:
    """Incident: loading was skipped without an error and random weights were trained."""
    (tmp_path / "model").mkdir()
    with pytest.raises(
        ConfigError, match=r"config\.json, tokenizer\.json, weights .* missing; found nothing"
    ):
        get_model(str(tmp_path / "model"), cache_dir=tmp_path / "cache")


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # A parameter under another name is missing, and what is left over has no place.
        (lambda t: t.__setitem__("norm.scale", t.pop(NORM)), rf"missing_keys.*{NORM}.*norm\.scale"),
        (lambda t: t.__delitem__(NORM), rf"missing_keys.*{NORM}"),
        (lambda t: t.__setitem__("extra.bias", t[NORM].clone()), r"unexpected_keys.*extra\.bias"),
        (shorten, rf"mismatched_keys.*{NORM}.*31.*32"),
    ],
    ids=["renamed", "dropped", "left over", "mis-shaped"],
)
def test_ckp_1_weights_that_do_not_fill_the_model_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    """Incident: parameters that were not loaded kept their random values, with a KL of about 15."""
    path = make_model(tmp_path)
    edit_weights(path / "model.safetensors", change)
    with pytest.raises(ConfigError, match=named):
        load_model(path)


def test_ckp_1_a_shard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    module.save_pretrained(path, max_shard_size="20KB")
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    load_model(path)
    shards[1].unlink()
    with pytest.raises(ConfigError, match=re.escape(shards[1].name)):
        load_model(path)


def test_ckp_1_every_tensor_made_anew_after_loading_is_refused_by_name(tmp_path: Path) -> None:
    """Incident: as above; a model of which one layer in six was random trained like any other."""
    gate = build_gate(make_model(tmp_path), DummyEngine(Tokenizer.load(tmp_path), []))
    model = learner_of(gate.roles).model
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            torch.nn.init.normal_(parameter, std=0.1)
        check = asyncio.run(check_tensors(gate))
        assert not check.is_passed
        assert f"1 of 20 tensors of the policy are not those of {tmp_path}: {name}; they were" in check.detail
        with torch.no_grad():
            parameter.copy_(kept)
    assert asyncio.run(check_tensors(gate)).is_passed


def test_ckp_1_tensors_made_anew_after_loading_are_refused(tmp_path: Path) -> None:
    """Incident: as above; weights that know no language are seen by their loss on plain text."""
    gate = build_gate(make_model(tmp_path), DummyEngine(Tokenizer.load(tmp_path), []))
    check = asyncio.run(check_weights(gate))
    assert not check.is_passed
    assert "the weights look random: were they loaded, and from the right file?" in check.detail


class FaultyExport:
    """Damages what transformers has just written, as a full or failing disk would."""

    def __init__(self, module: Any, damage: Callable[[Path], None]) -> None:
        self.save = module.save_pretrained
        self.damage = damage

    def __call__(self, target: Path, **options: Any) -> None:
        self.save(target, max_shard_size="20KB", **options)
        self.damage(target)


def flip_value(target: Path) -> None:
    path = next(shard for shard in sorted(target.glob("*.safetensors")) if NORM in load_file(shard))
    edit_weights(path, lambda tensors: tensors.__setitem__(NORM, tensors[NORM] + 1e-3))


def drop_tensor(target: Path) -> None:
    path = next(shard for shard in sorted(target.glob("*.safetensors")) if NORM in load_file(shard))
    edit_weights(path, lambda tensors: tensors.__delitem__(NORM))


def cut_shard(target: Path) -> None:
    path = sorted(target.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-4])


def name_other_shards(target: Path) -> None:
    index = target / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "model-00001-out-of"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_value, f"{NORM} has other values"),
        (drop_tensor, f"it cannot be read back .*{NORM}"),
        (cut_shard, "it cannot be read back"),
        (name_other_shards, "it cannot be read back .*model-00001-out-of"),
    ],
)
def test_ckp_2_an_export_that_is_not_the_live_policy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], named: str
) -> None:
    """Incident: an index named other shards than were written, and merges silently did nothing."""
    path = make_model(tmp_path / "source")
    model = load_model(path)
    monkeypatch.setattr(model.module, "save_pretrained", FaultyExport(model.module, damage))
    with pytest.raises(
        StoreError, match=f"is not the live policy: {named}.*the previous checkpoint is intact"
    ):
        export_tensors(model.module, own_tensors(model), path, tmp_path / "target")


def adapted_learner(path: Path, dtype: str) -> Learner:
    """Return a learner whose adapters have learned something that its number format can hold."""
    spec = LoraSpec(rank=2)
    model = load_model(path, dtype)
    model.adapt(spec, seed=1)
    learner = Learner(model, OptimizerSpec(lr=0.05))
    for seed in range(2):
        learner.step([World(seed).packed(3, [4, 2])], temperature=1.0, token_terms=reinforce)
    return learner


def merge_with_scale_0(tensors: Mapping[str, torch.Tensor], spec: LoraSpec) -> dict[str, torch.Tensor]:
    return merge_adapters(tensors, spec.model_copy(update={"alpha": 0.0}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ckp_2_a_merge_that_does_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Incident: a LoRA merge silently did nothing, and the base model was shipped as the trained one."""
    path = make_model(tmp_path / "source")
    learner = adapted_learner(path, dtype)
    for name in ("sound", "broken"):
        (tmp_path / name).mkdir()
    learner.export(tmp_path / "sound", path)
    monkeypatch.setattr("strop.policy.weights.merge_adapters", merge_with_scale_0)
    refused = r"the merged weights are not the live policy: model\.layers\.0\..*_proj adds"
    with pytest.raises(StoreError, match=refused):
        learner.export(tmp_path / "broken", path)
    assert list((tmp_path / "broken").iterdir()) == []
    # Engines get merged weights as well.
    with pytest.raises(StoreError, match=refused):
        learner.write_weights(tmp_path / "weights.safetensors")


def test_ckp_2_a_layer_that_is_scaled_otherwise_than_the_spec_says_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path / "source")
    learner = adapted_learner(path, "float32")
    layer: Any = learner.model.module.model.layers[1].self_attn.q_proj
    layer.scaling *= 2.0
    (tmp_path / "target").mkdir()
    with pytest.raises(StoreError, match=r"model\.layers\.1\.self_attn\.q_proj adds"):
        learner.export(tmp_path / "target", path)


def test_ckp_2_adapters_that_have_learned_nothing_are_merged(tmp_path: Path) -> None:
    path = make_model(tmp_path / "source")
    model = load_model(path, "bfloat16")
    model.adapt(LoraSpec(rank=2), seed=1)
    (tmp_path / "target").mkdir()
    Learner(model, OptimizerSpec()).export(tmp_path / "target", path)
    assert weights_digest(load_model(tmp_path / "target", "bfloat16")) == weights_digest(model)


def test_ckp_2_sharded_exports_are_read_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "source")
    model = load_model(path)
    monkeypatch.setattr(model.module, "save_pretrained", FaultyExport(model.module, lambda target: None))
    export_tensors(model.module, own_tensors(model), path, tmp_path / "target")
    assert weights_digest(load_model(tmp_path / "target")) == weights_digest(model)


def test_ckp_2_stop_settings_are_exported(tmp_path: Path) -> None:
    """Incident: stop settings were not exported, and the served model never ended."""
    path = make_model(tmp_path / "source")
    settings = {"eos_token_id": [260, 261], "temperature": 0.6, "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(settings))
    policy = load_model(path)
    export_tensors(policy.module, own_tensors(policy), path, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "generation_config.json").read_text()) == settings
    assert Tokenizer.load(tmp_path / "target").stop_token_ids == {260, 261}


def test_ckp_2_an_export_that_stops_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "source")
    model = load_model(path)
    (path / "generation_config.json").unlink()

    def name_another_end(target: Path) -> None:
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))

    monkeypatch.setattr(model.module, "save_pretrained", FaultyExport(model.module, name_another_end))
    with pytest.raises(StoreError, match=r"it stops at \[7, 260\], not at \[260\]"):
        export_tensors(model.module, own_tensors(model), path, tmp_path / "target")
