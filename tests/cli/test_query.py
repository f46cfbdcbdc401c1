"""`strop query` on the command line: tables for people, JSON for programs, refusals that tell the way."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from strop.cli.runs import MOST_ROWS
from strop.evaluate import result_name, write_result
from strop.record.rollouts import write_rollouts
from strop.store.opening import open_objects
from tests.conftest import require_system_part
from tests.fixtures.commands import Run
from tests.fixtures.records import RecordSize, make_eval_result, make_record
from tests.view.synthetic_run import make_rollouts

SIZE = RecordSize(num_steps=3, num_rollouts=16, num_reply_tokens=6, num_evaluations=2, num_examples=40)
PAGE = Path(__file__).parents[2] / "docs" / "view.md"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the runs `base`, `fast` and `slow` in `runs/`."""
    require_system_part("the package duckdb (make venv)", find_spec("duckdb") is not None)
    for name, gain in (("base", 0.0), ("fast", 0.3), ("slow", -0.1)):
        made = make_record(tmp_path / "made", SIZE, name=name)
        result = make_eval_result(3, SIZE, gain=gain)
        write_result(result, made.path / "eval" / result_name(result))
        (tmp_path / "runs").mkdir(exist_ok=True)
        made.path.rename(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_an_answer_is_a_table_or_json(place: Path, run: Run) -> None:
    sql = "SELECT run, step, count(*) AS n FROM rollouts WHERE step < 3 GROUP BY ALL ORDER BY ALL"
    shown = run("query", sql)
    assert (shown.code, shown.err) == (0, "")
    assert [line.split() for line in shown.out.splitlines() if "base" in line] == [
        ["base", "1", "16"],
        ["base", "2", "16"],
    ]
    told = json.loads(run("query", sql, "runs/slow", "--json").out)
    assert told == [{"run": "slow", "step": 1, "n": 16}, {"run": "slow", "step": 2, "n": 16}]
    assert json.loads(run("query", "SELECT 1 AS a WHERE false", "--json").out) == []


def test_without_a_question_tables_and_columns_are_listed(place: Path, run: Run) -> None:
    for words in (("query",), ("query", "runs"), ("query", "", "runs/base")):
        rows = [line.split() for line in run(*words).out.splitlines()]
        for row in (["metrics", "accuracy", "DOUBLE"], ["rollouts", "reward", "DOUBLE"]):
            assert row in rows
    told = json.loads(run("query", "--json").out)
    assert {"table": "rollouts", "name": "step", "kind": "BIGINT"} in told


def test_refusals(place: Path, run: Run) -> None:
    for words, code, told in (
        (("SELECT foo FROM metrics",), 2, 'column "foo" not found'),
        (("SELECT 1", "."), 1, ". holds no run"),
        (("SELECT 1", "made"), 1, "made holds no run"),
        (("COPY metrics TO 'x'",), 2, "is not one SELECT"),
        (("SELECT * FROM read_text('runs/base/run.json')",), 2, "Permission Error"),
    ):
        refused = run("query", *words)
        assert (refused.code, refused.out) == (code, ""), words
        assert told in refused.err
        assert " Allowed: " in refused.err
    assert not Path("x").exists()


def test_a_missing_package_is_named(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = run("query", "SELECT 1")
    assert refused.code == 2
    assert "pip install 'strop[query]'" in refused.err


def test_hostile_and_endless_texts_stay_in_their_cells(place: Path, run: Run) -> None:
    replies = ["\x1b]0;title\x07\x1b[2J", "abc\u202edef", "y" * 1_000_000]
    write_rollouts(place / "base" / "rollouts" / "step-000003.parquet", make_rollouts(3, replies))
    sql = 'SELECT reply_text AS "\x1b[1m" FROM rollouts WHERE step = 3'
    shown = run("query", sql, "runs/base")
    assert shown.code == 0
    assert not re.search("[\x1b\x07\u202e]", shown.out)
    assert "\u241b[2J" in shown.out
    assert "1000000 characters" in " ".join(shown.out.split())
    assert len(shown.out) < 5000
    told = json.loads(run("query", sql, "runs/base", "--json").out)
    assert [row["\x1b[1m"] for row in told] == replies


def test_a_long_answer_says_that_it_goes_on(place: Path, run: Run) -> None:
    sql = f"SELECT * FROM range({MOST_ROWS + 1})"
    shown = run("query", sql)
    assert f"these are the first {MOST_ROWS} rows" in shown.err
    assert str(MOST_ROWS) not in shown.out
    assert len(json.loads(run("query", sql, "--json").out)) == MOST_ROWS + 1
    assert run("query", f"SELECT * FROM range({MOST_ROWS})").err == ""


def examples(section: str) -> list[str]:
    """Return the commands of a section of docs/view.md."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, section
    blocks = re.findall(r"^```bash\n(.*?)^```", found[1], re.DOTALL | re.MULTILINE)
    # A command goes on in the lines that follow it further in.
    lines = "".join(blocks).replace("\n  ", " ").splitlines()
    return [line for line in lines if line.startswith("strop ") and "s3://" not in line]


@pytest.mark.parametrize(("section", "num_examples"), [("Query", 5), ("Compare", 2), ("Report", 2)])
def test_the_examples_of_the_page_run(place: Path, run: Run, section: str, num_examples: int) -> None:
    commands = examples(section)
    assert len(commands) >= num_examples
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        ended = run(*words)
        assert ended.code == 0, (command, ended.err)
        assert len(ended.out.splitlines()) >= (1 if words[0] == "report" else 4), command


def test_a_report_of_a_mirror_is_written_here(place: Path, run: Run, s3_root: str) -> None:
    for path in sorted((place / "slow").rglob("*")):
        if path.is_file():
            name = path.relative_to(place).as_posix()
            open_objects(s3_root).write(f"{s3_root}/{name}", path.read_bytes())
    shutil.rmtree(place / "slow")
    ended = run("report", f"{s3_root}/slow")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "slow-report.html\n"
    assert "before" in Path("slow-report.html").read_text(encoding="utf-8")
    several = run("report", "runs/")
    assert several.code == 2
    assert "runs/ holds 2 runs" in several.err
    assert "base, fast" in several.err
