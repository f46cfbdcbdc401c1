"""What the driver keeps of lm-eval's task files, shown to a module of the same form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.evaluate.harness import driver


def list_tasks(own: Path, other: Path) -> tuple[dict[str, Any], list[str]]:
    """List tasks in a new process, as lm-eval does; return what they are, and which files were read."""
    read: list[str] = []

    def list_files(root: Path) -> Iterator[Path]:
        return iter(sorted(root.glob("*.yaml")))

    def load_yaml(path: Path, *, resolve_func: bool, recursive: bool) -> Any:
        assert (resolve_func, recursive) == (False, True)
        read.append(path.stem)
        return json.loads(path.read_text())

    index = SimpleNamespace(TaskIndex=SimpleNamespace(_iter_yaml_files=list_files), load_yaml=load_yaml)
    driver._keep_tasks(index, own)
    found = {}
    for root in (own, other):
        for path in index.TaskIndex._iter_yaml_files(root):
            found[path.stem] = index.load_yaml(path, resolve_func=False, recursive=True)
    return found, read


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    own, other = tmp_path / "lm_eval" / "tasks", tmp_path / "include"
    for folder, name in ((own, "a"), (own, "b"), (other, "c")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name}))
    (own / "broken.yaml").write_text("{")
    return own, other


def test_its_own_task_files_are_read_once_and_others_each_time(folders: tuple[Path, Path]) -> None:
    expected = {name: {"task": name} for name in "abc"}
    assert list_tasks(*folders) == (expected, ["a", "b", "broken", "c"])
    assert list_tasks(*folders) == (expected, ["c"])
    (kept,) = folders[0].parent.glob("*.pickle*")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert list_tasks(*folders) == (expected, ["a", "b", "broken", "c"])
    assert list_tasks(*folders) == (expected, ["c"])


def test_where_nothing_can_be_kept_they_are_read(folders: tuple[Path, Path]) -> None:
    (folders[0].parent / "strop-tasks.pickle").mkdir()
    for _ in range(2):
        assert list_tasks(*folders)[1] == ["a", "b", "broken", "c"]
    assert len(list(folders[0].parent.iterdir())) == 2
