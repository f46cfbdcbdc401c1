"""A folder with a small model and a run file, and commands that are run in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from strop.cli import main

RUN_TEXT = """name = "tiny"
[model]
uri = "{model}"
dtype = "float32"
[task]
name = "arithmetic"
[train]
steps = 2
prompts_per_step = 2
rollouts_per_prompt = 2
checkpoint_every = 1
accept = "weights: a random model for a test"
[eval]
num_examples = 4
num_samples = 2
[placement]
threads = 1
"""


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> Path:
    """The current folder: run.toml for the tiny model, and a cache of its own."""
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "run.toml").write_text(RUN_TEXT.format(model=tiny_model_dir))
    return work


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""

    def run_command(*words: object) -> Ended:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Ended(code=code, out=captured.out, err=captured.err)

    return run_command


@pytest.fixture
def finished_run(folder: Path, run: Run) -> Path:
    """A run of two steps that `strop train` has finished."""
    ended = run("train", "run.toml")
    assert ended.code == 0, ended.err
    (path,) = (found.parent for found in (folder / "runs").glob("*/run.json"))
    return path
