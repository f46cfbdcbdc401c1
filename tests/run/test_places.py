"""Where models and checkpoints are found, and what is taken out of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError
from strop.io import AtomicDirectory
from strop.plan.known import find_checkpoint
from strop.record import RunDir
from strop.rollout import Split
from strop.run.export import export_checkpoint as export_model
from strop.run.export import prove_loading
from strop.run.inference import read_setup
from strop.run.runs import RunPhase, summarize_runs
from strop.spec import load_spec
from strop.store.models import SUBSTITUTES, converted_path, find_model, get_model
from tests.conftest import require_system_part
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.store.test_models import weights

DEFAULT_URI = "HuggingFaceTB/SmolLM2-135M-Instruct"


def export_checkpoint(source: Path, target: Path) -> None:
    """Export a model whose files are no real ones."""
    export_model(source, target, load=lambda path: ())


def make_run(root: Path, steps: tuple[int, ...] = (1, 2)) -> RunDir:
    run = RunDir.create(root, "tiny", 'name = "tiny"\n', "digest", {})
    for step in steps:
        with AtomicDirectory(run.checkpoint_path(step)) as partial:
            tiny_tokenizer(partial / "model")
            (partial / "model" / "config.json").write_text("{}")
            (partial / "model" / "model.safetensors").write_bytes(weights(step))
            (partial / "state").mkdir()
            (partial / "state" / "trainer.json").write_text("{}")
    return run


def test_a_package_is_found_once_it_is_converted(tmp_path: Path) -> None:
    uri = SUBSTITUTES[DEFAULT_URI]
    assert find_model(uri, tmp_path) is None
    with AtomicDirectory(converted_path(uri, "float32", tmp_path)) as partial:
        (partial / "config.json").write_text("{}")
    assert find_model(uri, tmp_path) == converted_path(uri, "float32", tmp_path)


def test_the_stand_in_counts_where_the_hub_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find_model(DEFAULT_URI, tmp_path) is None
    with AtomicDirectory(converted_path(SUBSTITUTES[DEFAULT_URI], "float32", tmp_path)) as partial:
        (partial / "config.json").write_text("{}")
    assert find_model(DEFAULT_URI, tmp_path) is not None
    # A revision of the hub's own weights is not what stands in for them.
    assert find_model(f"{DEFAULT_URI}@main", tmp_path) is None
    assert not (tmp_path / "hub").exists()


def test_a_checkpoint_is_found_from_its_run_itself_and_its_model(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    newest = find_checkpoint(run.path)
    assert newest is not None
    assert (newest.step, newest.run_path, newest.path) == (2, run.path, run.checkpoint_path(2))
    for path in (run.checkpoint_path(1), run.checkpoint_path(1) / "model"):
        found = find_checkpoint(path)
        assert found is not None
        assert (found.step, found.path) == (1, run.checkpoint_path(1))
    assert find_checkpoint(tmp_path) is None


def test_every_place_that_takes_a_model_takes_a_run_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cache = make_run(tmp_path / "runs"), tmp_path / "cache"
    newest, first = run.checkpoint_path(2) / "model", run.checkpoint_path(1) / "model"
    assert get_model(str(run.path), cache_dir=cache).path == find_model(str(run.path), cache) == newest
    assert get_model(str(run.checkpoint_path(1)), cache_dir=cache).path == first
    assert get_model(str(first), cache_dir=cache).path == find_model(str(first), cache) == first
    export_checkpoint(run.path, tmp_path / "out")
    assert get_model(str(tmp_path / "out"), cache_dir=cache).path == tmp_path / "out"
    # A run file says it with a path that looks like a hub's id; jobs start in other folders.
    monkeypatch.chdir(tmp_path)
    name = f"runs/{run.path.name}"
    words = ["name=next", "task.name=arithmetic", f"model.uri={name}", f"reference.model={name}"]
    words += ["reference.kl_beta=0.1"]
    spec = load_spec(None, words).spec
    assert (spec.model.uri, spec.reference.model) == (str(run.path), str(run.path))
    assert load_spec(None, [*words[:2], "model.uri=no/such"]).spec.model.uri == "no/such"
    run.checkpoint_path(2).joinpath("model", "model.safetensors").write_bytes(b"other")
    with pytest.raises(CorruptRecord):
        get_model(str(run.path), cache_dir=cache)
    empty = make_run(tmp_path / "empty", steps=())
    (empty.checkpoints_path / "step-000001").mkdir()
    for find in (get_model, find_model, lambda name: find_checkpoint(Path(name))):
        for path in (empty.path, empty.checkpoints_path / "step-000001"):
            with pytest.raises(StoreError, match="complete"):
                find(str(path))


def test_an_export_has_the_checkpoints_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    export_checkpoint(run.path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights(2)
    export_checkpoint(run.checkpoint_path(1), tmp_path / "first")
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == weights(1)
    with pytest.raises(CheckRefused, match="out exists"):
        export_checkpoint(run.path, tmp_path / "out")
    with pytest.raises(ConfigError, match="is no run and no checkpoint"):
        export_checkpoint(tmp_path / "out", tmp_path / "again")


def test_an_export_that_does_not_load_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(CorruptRecord, match="out"):
        export_model(run.path, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.slow
@pytest.mark.usefixtures("frugal_vllm")
def test_an_export_is_loaded_by_transformers_and_by_vllm(tmp_path: Path) -> None:
    # Heads of a width that vLLM computes.
    model = tiny_model(tmp_path / "model", head_dim=32)
    said = prove_loading(model)
    assert said[0].startswith("loaded by transformers: ")
    require_system_part("vLLM (make vllm-deps)", "not installed" not in said[-1])
    assert said[1].startswith("loaded by vLLM: scores within ")
    # One name in the index that no file has: loaded with weights made up, it would be another model.
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(broken / "model.safetensors")
    first = next(name for name in sorted(tensors) if "layers.0" in name)
    tensors[f"other.{first}"] = tensors.pop(first)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptRecord, match="the names of tensors are not those"):
        prove_loading(broken)


def test_a_damaged_checkpoint_leaves_no_export(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.checkpoint_path(2) / "state" / "trainer.json").write_text("[]")
    with pytest.raises(CorruptRecord, match=r"trainer\.json"):
        export_checkpoint(run.path, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_phases_of_runs(tmp_path: Path) -> None:
    working, stopped, finished = (make_run(tmp_path, steps=()) for _ in range(3))
    finished.mark_finished()
    finished.release()
    # As a process that was killed leaves it: the holder's name stays, and no such process lives.
    stopped.release()
    holder = (stopped.path / "lock").read_text().replace(str(os.getpid()), str(2**22 + 1))
    (stopped.path / "lock").write_text(holder)
    phases = {run.path: run.phase for run in summarize_runs(tmp_path)}
    assert phases == {
        working.path: RunPhase.RUNNING,
        stopped.path: RunPhase.STOPPED,
        finished.path: RunPhase.FINISHED,
    }
    working.release()


def test_words_of_asking() -> None:
    setup = read_setup(
        "arithmetic", ["max_value=5", "task.num_held_out=5", "seed=3", "model.dtype=float32"], Split.TRAIN
    )
    assert setup.spec.task.num_held_out == 5
    assert (setup.spec.seed, setup.spec.model.dtype) == (3, "float32")
    cut = read_setup("arithmetic", ["sampling.top_p=0.9", "sampling.top_k=none"], Split.TRAIN)
    assert (cut.sampling.top_p, cut.sampling.top_k, cut.sampling.temperature) == (0.9, None, 1.0)
    for word in ("train.steps=3", "model.uri=x", "output.root=x"):
        with pytest.raises(ConfigError, match="plays no part"):
            read_setup("arithmetic", [word], Split.TRAIN)
    with pytest.raises(ConfigError, match=r"sampling.temperature='hot'"):
        read_setup("arithmetic", ["sampling.temperature=hot"], Split.TRAIN)
    with pytest.raises(ConfigError, match="contradict"):
        read_setup("arithmetic", ["name=gsm8k"], Split.TRAIN)
