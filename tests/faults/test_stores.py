"""Data that stands in a store is found by every command that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.cli import main
from strop.store import open_store
from tests.fixtures.saved_data import save_split


@pytest.mark.parametrize("command", [("tasks", "check"), ("audit",)])
def test_commands_on_a_run_file_use_its_store(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`strop tasks check RUN.toml` ignored the file's `[store]` and asked the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows, root = tmp_path / "sums", str(tmp_path / "store")
    rows.mkdir()
    lines = [json.dumps({"question": f"{n} + {n}?", "answer": str(2 * n)}) for n in range(40)]
    (rows / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "store").mkdir()
    open_store(root).put(rows, f"{root}/datasets/own/sums")
    Path("run.toml").write_text(
        f'[store]\nuri = "{root}"\n[task]\nname = "rows"\nsource = "own/sums"\nprompt = "question"\n'
        'answer = "answer"\nreward = "exact"\ngold = "{answer}"\n[train]\nprompts_per_step = 2\n'
    )
    assert main([*command, "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "rows"


def test_the_only_split_of_an_evaluation_is_found_by_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bucket's `datasets/ifeval_train` was not found: IFEval has no other split."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_STORE_URI", str(tmp_path / "store"))
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [
        {
            "key": n,
            "prompt": f"Write about {n}. Answer in JSON.",
            "instruction_id_list": ["detectable_format:json_format"],
            "kwargs": [{"num_words": None}],
        }
        for n in range(8)
    ]
    save_split(rows, tmp_path / "store" / "datasets" / "ifeval_train")
    assert main(["tasks", "check", "ifeval", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []
