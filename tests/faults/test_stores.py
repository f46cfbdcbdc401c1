"""Data that stands in a store is found by every command that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.cli import main
from strop.store import open_store


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
