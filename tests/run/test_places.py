"""Where models and checkpoints are found, and what is taken out of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError
from strop.io import AtomicDirectory
from strop.plan.locate import find_checkpoint, find_model
from strop.record import RunDir
from strop.rollout import Split
from strop.run.inference import read_asking
from strop.run.runs import RunPhase, compare_runs, export_checkpoint, summarize_runs
from strop.store.models import SUBSTITUTES, converted_path
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

DEFAULT_URI = "HuggingFaceTB/SmolLM2-135M-Instruct"


def make_run(root: Path, steps: tuple[int, ...] = (1, 2)) -> RunDir:
    run = RunDir.create(root, "tiny", 'name = "tiny"\n', "digest", {})
    for step in steps:
        with AtomicDirectory(run.checkpoint_path(step)) as partial:
            tiny_tokenizer(partial / "model")
            (partial / "model" / "config.json").write_text("{}")
            (partial / "model" / "model.safetensors").write_bytes(b"weights %d" % step)
            (partial / "state").mkdir()
            (partial / "state" / "trainer.json").write_text("{}")
    return run


def test_a_directory_is_a_model_where_it_stands(tmp_path: Path) -> None:
    assert find_model(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


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


def test_a_run_without_a_complete_checkpoint_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=())
    with pytest.raises(StoreError, match="holds no complete checkpoint"):
        find_checkpoint(run.path)
    (run.checkpoints_path / "step-000001").mkdir()
    with pytest.raises(StoreError, match="holds no complete checkpoint"):
        find_checkpoint(run.checkpoints_path / "step-000001")


def test_an_export_has_the_checkpoints_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    export_checkpoint(run.path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights 2"
    export_checkpoint(run.checkpoint_path(1), tmp_path / "first")
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == b"weights 1"
    with pytest.raises(CheckRefused, match="out exists"):
        export_checkpoint(run.path, tmp_path / "out")
    with pytest.raises(ConfigError, match="is no run and no checkpoint"):
        export_checkpoint(tmp_path / "out", tmp_path / "again")


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


def test_a_run_that_was_not_evaluated_cannot_be_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(StoreError, match="has no evaluation"):
        compare_runs(run.path, run.path)


def test_words_of_asking() -> None:
    asking = read_asking(
        "arithmetic", ["max_value=5", "task.num_held_out=5", "seed=3", "model.dtype=float32"], Split.TRAIN
    )
    assert asking.spec.task.num_held_out == 5
    assert (asking.spec.seed, asking.spec.model.dtype) == (3, "float32")
    cut = read_asking("arithmetic", ["sampling.top_p=0.9", "sampling.top_k=none"], Split.TRAIN)
    assert (cut.sampling.top_p, cut.sampling.top_k, cut.sampling.temperature) == (0.9, None, 1.0)
    for word in ("train.steps=3", "model.uri=x", "output.root=x"):
        with pytest.raises(ConfigError, match="plays no part"):
            read_asking("arithmetic", [word], Split.TRAIN)
    with pytest.raises(ConfigError, match=r"sampling.temperature='hot'"):
        read_asking("arithmetic", ["sampling.temperature=hot"], Split.TRAIN)
    with pytest.raises(ConfigError, match="contradict"):
        read_asking("arithmetic", ["name=gsm8k"], Split.TRAIN)
