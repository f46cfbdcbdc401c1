"""Figures that are older than what they measure are told, those without a result too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.git_tree import commit_files
from tools.figures import ROOMS, list_paths, main

DEMO = "benchmarks/results/demo-2026-11-23.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    commit_files(tmp_path, {"src/strop/train/loop.py": "1", "src/strop/view/page.py": "1"})
    return tmp_path


def measure(root: Path, *, changes: str = "") -> str:
    """Keep a result of the commit that is checked out; return what a link to it says."""
    commit = commit_files(root, {})
    commit_files(root, {DEMO: json.dumps({"git_rev": commit + changes})})
    return commit[:7] + changes[:1]


def check(root: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    (root / "page.md").write_text(text, encoding="utf-8")
    code = main([str(root)])
    return code, capsys.readouterr().out.splitlines()


def test_a_figure_of_what_is_there_now_is_fine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = measure(root)
    # Nothing that the demo's figures depend on.
    commit_files(root, {"src/strop/view/page.py": "2"}, "view: another page")
    code, said = check(root, f"Measured on Monday: 0.84 ([{label}]({DEMO})).\n", capsys)
    assert (code, said) == (0, ["figures: 1 results named, 0 not there; 0 notices"])


def test_later_commits_that_change_what_is_measured_are_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = measure(root)
    commit_files(root, {"src/strop/train/loop.py": "2"}, "train: another step")
    commit_files(root, {"recipes/arithmetic.toml": "x"}, "recipes: another demo")
    text = f"0.84 ([{label}]({DEMO})) and 0.85 ([{label}]({DEMO}))\n"
    code, (notice, total) = check(root, text, capsys)
    assert code == 0
    assert notice == (
        f"notice: page.md:1 and 1 more: demo-2026-11-23.json, {label}: 2 commits since changed what it"
        " measures, the last: recipes: another demo"
    )
    assert total == "figures: 2 results named, 0 not there; 1 notices"


def test_a_result_of_a_tree_with_changes_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = measure(root, changes="+changes")
    assert label.endswith("+")
    code, said = check(root, f"[{label}]({DEMO})\n", capsys)
    assert code == 0
    assert "a tree with changes that no commit holds" in said[0]


def test_a_commit_that_is_not_here_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit_files(root, {DEMO: json.dumps({"git_rev": "f" * 40})})
    code, said = check(root, f"[{'f' * 7}]({DEMO})\n", capsys)
    assert (code, said[0].endswith("its commit is not in the history here")) == (0, True)


def test_a_result_that_is_not_there_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = measure(root)
    code, said = check(root, f"[{label}](benchmarks/results/demo-2020-01-01.json)\n", capsys)
    assert (code, len(said)) == (1, 2)
    assert said[0].startswith("page.md:1: there is no benchmarks/results/demo-2020-01-01.json. Next: ")
    code, said = check(root, f"[abcdef0]({DEMO})\n", capsys)
    assert code == 1
    assert said[0].startswith(f"page.md:1: demo-2026-11-23.json is of commit {label}, not abcdef0. Next: ")


TABLE = """# Page

| case | 95 % |
|---|---|
| a | 1 |

## Results so far

| case | 95 % |
|---|---|
| a | 1 |
| words alone | none |

### Of the same

| case | time |
|---|---|
| b | 2 s |

Some words. Measured on Monday
over two lines: 0.84.
"""


def test_figures_that_name_no_result_are_told_by_their_line(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(root, TABLE, capsys)
    assert code == 0
    assert said[:-1] == [f"notice: page.md:{line}: a figure names no result" for line in (11, 18, 20)]


def test_the_longest_name_says_what_a_result_depends_on() -> None:
    assert "src/strop/cluster" in list_paths("ray-demo-2026-11-22")
    assert "src/strop/cluster" not in list_paths("demo-2026-11-23")
    assert "src/strop/" in list_paths("kills-2026-11-21")
    rooms = {path.name for path in (Path(__file__).parents[2] / "src/strop").iterdir()}
    named = {room for some in ROOMS.values() for room in some if room}
    assert {room for room in named if room not in rooms and f"{room}.py" not in rooms} == set()
