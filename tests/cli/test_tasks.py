"""`strop tasks new` and `strop tasks check`: a task to start from, and what keeps one from training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE
from strop.user_code import reference
from tests.fixtures.commands import Run, run

__all__ = ["run"]

OWN = """
class Echo:
    def examples(self, split):
        numbers = range(4) if split == "train" else range(4, 6)
        return [{"n": n, "answer": str(n)} for n in numbers]

    def render(self, example):
        return f"Say {example.fields['n']}."

    def verify(self, example, text):
        return example.answer in text

    def gold_replies(self, example):
        return [example.answer]
"""


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_task_passes_its_own_check(folder: Path, run: Run) -> None:
    done = run("tasks", "new", "my_sums")
    assert done.code == EXIT_DONE
    names = ["my_sums.jsonl", "my_sums.py", "my_sums.toml", "test_my_sums.py"]
    assert sorted(path.name for path in folder.glob("*my_sums*")) == names
    assert len((folder / "my_sums.jsonl").read_text().splitlines()) == 10
    found = run("tasks", "check", "my_sums.toml")
    assert found.code == EXIT_DONE, found.err
    assert "rows: 9 train, 1 held_out examples" in found.out
    assert "Answer with the number." in found.out
    assert "verifier passes, audit green" in found.out
    said = json.loads(run("tasks", "check", "my_sums.toml", "--json").out)
    assert (said["task"], said["faults"]) == ("rows", [])
    (folder / "tasks").mkdir()
    placed = run("tasks", "new", "tasks/others")
    assert placed.out.splitlines()[-1] == "next: strop tasks check tasks/others.toml"
    assert (folder / "tasks" / "others.jsonl").is_file()


@pytest.mark.slow
def test_a_new_task_trains_as_it_stands(folder: Path, run: Run, tiny_model_dir: Path) -> None:
    """But for the model, which is a random one here: whose weights it says to accept."""
    run("tasks", "new", "my_sums")
    words = [f"model.uri={tiny_model_dir}", "train.accept=weights: random", "train.steps=1"]
    done = run("train", "my_sums.toml", *words, "eval.num_samples=none")
    assert done.code == EXIT_DONE, done.err
    assert "after" in done.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["new", "my-sums"], EXIT_USAGE, "letters, digits and underscores at most"),
        (["new", "taken"], EXIT_USAGE, "taken.py is there already"),
        (["check", "missing.toml"], EXIT_USAGE, "missing.toml does not exist"),
        (["check", "missing.py:Task"], EXIT_USAGE, "missing.py, which does not exist"),
        (["check", "own.py:Task"], EXIT_USAGE, "has no Task"),
        (["check", "own.py:Echo", "low=3"], EXIT_USAGE, "no settings: its __init__ takes none"),
    ],
)
def test_what_cannot_be_done_is_refused(
    folder: Path, run: Run, words: list[str], code: int, said: str
) -> None:
    (folder / "taken.py").touch()
    (folder / "own.py").write_text(OWN)
    done = run("tasks", *words)
    assert done.code == code
    assert said in done.err


def test_a_task_that_pays_for_an_echo_does_not_pass(folder: Path, run: Run) -> None:
    (folder / "own.py").write_text(OWN)
    done = run("tasks", "check", "own.py:Echo")
    assert done.code == EXIT_REFUSED
    assert "task Echo may not train a model: probe echo" in done.err


def test_an_installed_package_announces_tasks(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = folder / "site"
    (site / "say_it-1.0.dist-info").mkdir(parents=True)
    (site / "say_it.py").write_text(OWN.replace("in text", "== text.strip()").replace("Say {", "What is {"))
    (site / "say_it-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: say-it\nVersion: 1.0\n"
    )
    points = "[strop.tasks]\nsay-it = say_it:Echo\narithmetic = say_it:Echo\n"
    (site / "say_it-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(site))
    # The processes that pose and judge find the package as this one does.
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    reference.announced.cache_clear()
    try:
        assert "say-it" in run("tasks", "ls").out
        found = run("tasks", "check", "say-it")
        assert found.code == EXIT_DONE, found.err
        assert "say-it: 4 train, 2 held_out examples" in found.out
        twice = run("tasks", "check", "arithmetic")
        assert (twice.code, "two tasks are called arithmetic" in twice.err) == (EXIT_USAGE, True), twice.err
    finally:
        reference.announced.cache_clear()
