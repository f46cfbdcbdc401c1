"""A result is of a commit: what no commit holds is not measured to be kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import harness, run
from benchmarks.harness import write_result
from benchmarks.machine import NotCommitted, require_commit
from tests.fixtures.git_tree import commit_files

FILES = {"src/strop/loop.py": "1", "benchmarks/run.py": "1", "README.md": "1"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of one commit, in which the benchmarks believe to be."""
    root = tmp_path / "tree"
    commit_files(root, FILES)
    for module in (harness, run):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(harness, "RESULTS_DIR", root / "benchmarks" / "results")
    return root


@pytest.mark.parametrize("name", ["README.md", "docs/new.md", "benchmarks/results/demo-2026-11-23.json"])
def test_what_no_result_depends_on_may_differ(root: Path, name: str) -> None:
    commit = require_commit(root)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("2", encoding="utf-8")
    assert require_commit(root) == commit


@pytest.mark.parametrize("name", ["src/strop/loop.py", "benchmarks/run.py", "src/strop/new.py"])
def test_a_tree_with_changes_is_refused_by_the_file(root: Path, name: str) -> None:
    (root / name).write_text("2", encoding="utf-8")
    with pytest.raises(NotCommitted, match=rf"^{name} differ from the commit\. .* Next: commit first"):
        require_commit(root)
    (root / "src/strop/other.py").write_text("3", encoding="utf-8")
    with pytest.raises(NotCommitted, match=r"and 1 more differ"):
        require_commit(root)


def test_where_no_commit_is_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted, match="no commit is checked out here"):
        require_commit(tmp_path)


def test_nothing_is_measured_that_could_not_be_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[int] = []

    def measure() -> list[int]:
        measured.append(1)
        return []

    monkeypatch.setattr(run, "measure_start_ups", measure)
    (root / "src/strop/loop.py").write_text("2", encoding="utf-8")
    assert run.main(["start-up"]) == 2
    assert measured == []
    assert "src/strop/loop.py differ from the commit" in capsys.readouterr().err
    # A look that keeps nothing may be had of any tree.
    assert run.main(["start-up", "--quick"]) == 0
    assert measured == [1]
    assert not (root / "benchmarks/results").exists()


def test_every_result_names_its_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_start_ups", list)
    assert run.main(["start-up"]) == 0
    (path,) = (root / "benchmarks/results").iterdir()
    assert json.loads(path.read_text(encoding="utf-8"))["git_rev"] == require_commit(root)


def test_a_commit_that_came_while_it_was_measured_is_refused(root: Path) -> None:
    commit = require_commit(root)
    commit_files(root, {"src/strop/loop.py": "2"})
    with pytest.raises(NotCommitted, match=r"demo was measured at .* is checked out by now"):
        write_result("demo", {}, commit)
    assert not (root / "benchmarks/results").exists()
