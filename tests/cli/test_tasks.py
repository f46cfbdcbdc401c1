"""`strop tasks`, `strop envs` and `strop audit`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from strop.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE
from strop.user_code import reference
from tests.environments.test_worlds import COUNTING
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
    assert "audit green" in found.out
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
    ("words", "said"),
    [
        ("tasks new my-sums", "my-sums"),
        ("tasks new taken", "taken.py"),
        ("tasks check missing.toml", "missing.toml"),
        ("tasks check missing.py:Task", "missing.py"),
        ("tasks check own.py:Task", "Task"),
        ("tasks check own.py:Echo low=3", "__init__"),
        ("envs run no-such-thing", "no-such-thing"),
        ("envs run guess-number agent=agent.py", "task.agent=agent.py"),
        ("audit guess-number num=0", "num=0"),
        ("audit", "'task'"),
        ("audit all --out x.json", "--out"),
        ("audit all max_value=3", "max_value"),
        ("audit arithmetic seed=x", "seed='x'"),
    ],
)
def test_what_cannot_be_done_is_refused(folder: Path, run: Run, words: str, said: str) -> None:
    (folder / "taken.py").touch()
    (folder / "own.py").write_text(OWN)
    done = run(*words.split())
    assert done.code == EXIT_USAGE
    assert said in done.err


def test_a_task_that_pays_for_an_echo_does_not_pass(folder: Path, run: Run) -> None:
    (folder / "own.py").write_text(OWN)
    done = run("tasks", "check", "own.py:Echo")
    assert done.code == EXIT_REFUSED
    assert "task Echo may not train a model: echo fail" in done.err


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


def test_environments_are_listed_beside_tasks(run: Run) -> None:
    rows = [line.split()[:2] for line in run("tasks", "ls").out.splitlines()]
    lines = dict(row for row in rows if len(row) == 2)
    assert (lines["guess-number"], lines["gsm8k"]) == ("several", "one")
    assert {"guess-number", "gsm8k", "FILE.py:CLASS"} <= set(json.loads(run("tasks", "ls", "--json").out))


def test_a_game_is_played_by_piped_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{guess}\n" for guess in (2, 1, 3))))
    ended = run("envs", "run", "guess-number", "max_value=3", "seed=1")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[2].startswith("user: Right. I think of a number from 1 to 3.")
    assert lines[-1].startswith("score: 1, right")


def test_tools_are_called_by_words_by_json_and_by_blocks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(COUNTING)
    block = '```tool\n{"name": "add", "arguments": {"number": 1}}\n```'
    said = ["/add number=1", '/add {"number": 1}', block, "/go x=", ""]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(said)))
    ended = run("envs", "run", f"{tmp_path}/own.py:Counting")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "user: Count to 3."
    assert "tool: /add number= times=  Add a number, perhaps several times." in lines
    assert [line for line in lines if line.startswith("add: ")] == [
        f"add: The total is {n}." for n in (1, 2, 3)
    ]
    assert lines[-1].startswith("score: 1, right, num_tool_calls 4, num_format_errors 1")


def test_a_green_task_ends_with_0_and_leaves_its_report(run: Run, tmp_path: Path) -> None:
    ended = run("audit", "arithmetic", "max_value=50", "num=8", "--out", str(tmp_path / "audit.json"))
    assert (ended.code, ended.err) == (0, "")
    assert "arithmetic green in " in ended.out
    report = json.loads((tmp_path / "audit.json").read_text())
    assert (report["verdict"], report["num_examples"]) == ("green", 8)


def test_a_red_task_ends_with_76_and_names_its_probes(run: Run) -> None:
    ended = run("audit", "reasoning-gym", "dataset=boxnet", "num_train=8", "num_held_out=1", "--json")
    assert ended.code == 76
    assert "task reasoning-gym is red: constant, gold" in ended.err
    assert json.loads(ended.out)["verdict"] == "red"
