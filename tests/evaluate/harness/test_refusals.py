"""What `strop eval --harness lm-eval` says to a user who asks for what cannot be had, in offline mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cli import main
from tests.evaluate.harness.harness_rows import write_data
from tests.fixtures.tiny_model import tiny_model

FLAGS = ("--harness", "lm-eval", "--split", "held_out", "--confirm-run-unsafe-code")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for prompts and budgets."""
    return tiny_model(tmp_path_factory.mktemp("model") / "model", max_position_embeddings=8192)


def refusal(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    """Return the exit code and what was said, in an empty folder with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("STROP_OFFLINE", "1")
    code = main(["eval", *words])
    said = capsys.readouterr()
    assert said.out == ""
    assert not (tmp_path / "evals").exists()
    return code, " ".join(said.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("gsm8k_cot,no task", "--harness lm-eval with task 'no task'. Allowed: lm-eval's names of tasks, "),
        ("gsm8k_cot, gsm8k_cot", "a task is named twice in gsm8k_cot,gsm8k_cot. Allowed: each task once."),
        ("", "--harness lm-eval with task ''. Allowed: lm-eval's names of tasks, groups and tags; gsm8k, "),
    ],
)
def test_tasks_that_the_harness_is_not_asked_for(
    tasks: str,
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = refusal((str(model), "--task", tasks, *FLAGS), tmp_path, monkeypatch, capsys)
    assert code == 2
    assert message in said


def test_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("./no/model", "--task", "gsm8k_cot", *FLAGS)
    code, said = refusal(words, tmp_path, monkeypatch, capsys)
    assert code == 2
    assert "model directory no/model does not exist. Allowed: a model directory, a run or" in said
    assert "Next: check the spelling" in said


def test_a_data_set_that_is_not_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(model), "--task", "gsm8k_cot", *FLAGS)
    code, said = refusal(words, tmp_path, monkeypatch, capsys)
    assert code == 2
    assert "task.source=openai/gsm8k: main/train-00000-of-00001.parquet is not to be had" in said
    assert "offline mode forbids to ask the hub" in said
    assert "Next: download the data set elsewhere, copy it here and name its folder in task.source" in said
    code, said = refusal((*words, "source=./no/data"), tmp_path, monkeypatch, capsys)
    assert code == 2
    assert f"task.source={tmp_path}/no/data does not exist. Allowed: a folder or a file" in said
    assert "Next: correct the path in task.source" in said


def test_an_environment_that_is_not_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_data(tmp_path / "data")
    words = (str(model), "--task", "gsm8k_cot, mbpp", *FLAGS)
    settings = (f"gsm8k.source={data['gsm8k']}", f"mbpp.source={data['mbpp']}")
    code, said = refusal((*words, *settings), tmp_path, monkeypatch, capsys)
    assert code == 1
    assert "the environment of lm-eval-0.4.13 is not in" in said
    assert "Next: start the same command once where pip may fetch packages, without STROP_OFFLINE" in said
