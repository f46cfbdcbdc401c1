"""Questions are answered from what runs recorded, whole or torn, here or in S3, and reach nothing else."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from strop.errors import ConfigError, CorruptRecord
from strop.record import RunDir
from strop.record.files import DirectoryRecord, RecordFiles
from strop.record.rollouts import read_rollouts, write_rollouts
from strop.store.record_store import Objects
from strop.store.s3_objects import S3Objects
from strop.view.places import find_runs
from tests.conftest import require_system_part
from tests.evaluate.stored_results import make_harness_result
from tests.fixtures.records import RecordSize, make_record
from tests.view.synthetic_run import make_lost_rollout, make_rollouts

if TYPE_CHECKING:
    from strop.view.query import RunsDatabase

SIZE = RecordSize(num_steps=4, num_rollouts=16, num_reply_tokens=6, num_evaluations=2, num_examples=5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, each step's file its own."""
    root = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 0), ("b", 1)):
        make_record(root, SIZE, name=name, seed=seed)
    return root


def records_of(root: Path) -> dict[str, RecordFiles]:
    paths = [root] if (root / "run.json").exists() else sorted(root.iterdir())
    return {path.name: DirectoryRecord(path) for path in paths}


def open_runs(records: dict[str, RecordFiles]) -> RunsDatabase:
    require_system_part("the package duckdb (make venv)", find_spec("duckdb") is not None)
    from strop.view.query import RunsDatabase

    return RunsDatabase(records)


def ask_records(records: dict[str, RecordFiles], sql: str) -> list[tuple[Any, ...]]:
    with open_runs(records) as database:
        return list(database.ask(sql).rows)


def ask(root: Path, sql: str) -> list[tuple[Any, ...]]:
    return ask_records(records_of(root), sql)


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    """A run of its own, that a test may damage."""
    source = sorted(runs.iterdir())[0]
    return Path(shutil.copytree(source, tmp_path / source.name, symlinks=True))


def test_rewards_per_step_are_those_of_the_files(runs: Path) -> None:
    rows = ask(runs, "SELECT run, step, avg(reward), count(*) FROM rollouts GROUP BY ALL ORDER BY ALL")
    expected = []
    for path in sorted(runs.iterdir()):
        for step, file in enumerate(RunDir.open(path).rollouts_files(), start=1):
            rewards = [one.outcome.reward for one in read_rollouts(file)]
            known = [reward for reward in rewards if reward is not None]
            expected.append((path.name, step, pytest.approx(sum(known) / len(known)), len(rewards)))
    assert rows == expected


def test_every_table_tells_run_and_step(runs: Path) -> None:
    names = {path.name for path in runs.iterdir()}
    for table, num_rows in {
        "runs": 2,
        "metrics": 2 * 4,
        "rollouts": 2 * 4 * 16,
        "evals": 2 * 2 * 5,
        "timeline": 2 * 4 * (5 + 2),
    }.items():
        rows = ask(runs, f"SELECT run, step FROM {table}")
        assert len(rows) == num_rows, table
        assert {run for run, _ in rows} == names
        assert {step for _, step in rows} <= set(range(5))
    assert ("gate", "audit") in ask(runs, "SELECT kind, cause FROM events")


def test_nested_columns_are_asked_in_place(runs: Path) -> None:
    (path,) = sorted(runs.iterdir())[:1]
    (rollout, *_) = read_rollouts(path / "rollouts" / "step-000002.parquet")
    sql = (
        f"SELECT prompt, turns[2].logprobs[1], failure.owner, asked_step, len(turns) FROM rollouts"
        f" WHERE run = '{path.name}' AND step = 2 AND sample_index = 0 AND example_id ="
        f" '{rollout.example.example_id}' LIMIT 1"
    )
    (row,) = ask(runs, sql)
    assert rollout.turns[1].logprobs is not None
    logprob = pytest.approx(float(rollout.turns[1].logprobs[0]))
    assert row == (rollout.turns[0].text, logprob, None, 1, len(rollout.turns))


def test_what_failed_has_no_reward_and_says_why(copy: Path) -> None:
    write_rollouts(copy / "rollouts" / "step-000004.parquet", [make_lost_rollout(4)])
    rows = ask(copy, "SELECT reward, failure.owner, failure.kind FROM rollouts WHERE step = 4")
    assert rows == [(None, "infra", "timeout")]


def test_what_was_discarded_has_a_table_of_its_own(copy: Path) -> None:
    assert ask(copy, "SELECT count(*) FROM discarded") == [(0,)]
    (copy / "discarded").mkdir(exist_ok=True)
    write_rollouts(copy / "discarded" / "step-000002.parquet", make_rollouts(2, ["12", "11"]))
    assert ask(copy, "SELECT step, reply_text, reward FROM discarded ORDER BY reward") == [
        (2, "11", 0.0),
        (2, "12", 1.0),
    ]
    assert ask(copy, "SELECT count(*) FROM rollouts WHERE step = 2") == [(16,)]


def test_replies_of_evaluations_have_a_table_of_their_own(copy: Path) -> None:
    assert ask(copy, "SELECT count(*) FROM replies") == [(0,)]
    for first in (0, 2):
        shard = copy / "eval" / "arithmetic-step-000004" / f"examples-{first:06d}-{first + 1:06d}.parquet"
        shard.parent.mkdir(exist_ok=True)
        write_rollouts(shard, make_rollouts(4, ["12", "11"]))
    rows = ask(copy, "SELECT step, count(*), sum(reward), max(temperature) FROM replies GROUP BY step")
    assert rows == [(4, 4, 2.0, 1.0)]
    assert ask(copy, "SELECT count(*) FROM evals WHERE step = 4") == [(5,)]


def test_a_run_that_has_just_begun_has_empty_tables(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "new", 'name = "new"\n', "d", {}) as run:
        records: dict[str, RecordFiles] = {"new": DirectoryRecord(run.path)}
    for table in ("metrics", "rollouts", "evals", "events", "timeline"):
        assert ask_records(records, f"SELECT run, step FROM {table}") == []
    assert ask_records(records, "SELECT reply_text, reward FROM rollouts") == []
    assert ask_records(records, "SELECT run, step, settings['name'] FROM runs") == [("new", 0, "new")]


def test_a_line_that_a_kill_tore_is_left_out_and_what_is_being_written_does_not_count(copy: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl"):
        with (copy / name).open("ab") as file:
            file.write(b'{"step":5,"reward_m')
    (copy / "rollouts" / ".step-000005.parquet.partial-1").write_bytes(b"PAR1")
    assert ask(copy, "SELECT max(step), count(*) FROM metrics") == [(4, 4)]
    assert ask(copy, "SELECT max(step) FROM rollouts") == [(4,)]
    assert ask(copy, "SELECT max(step) FROM timeline") == [(4,)]


def test_a_damaged_record_is_named(copy: Path) -> None:
    file = copy / "rollouts" / "step-000002.parquet"
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(CorruptRecord, match=r"step-000002\.parquet"):
        ask(copy, "SELECT avg(reward) FROM rollouts")
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(lines[0] + b"{]\n" + lines[1])
    with pytest.raises(CorruptRecord, match=r"metrics\.jsonl"):
        ask(copy, "SELECT * FROM metrics")
    (copy / "eval" / "arithmetic-step-000004.json").write_text("{")
    with pytest.raises(CorruptRecord, match=r"arithmetic-step-000004\.json"):
        ask(copy, "SELECT * FROM evals")
    (copy / "run.json").write_text("{}")
    with pytest.raises(CorruptRecord, match=r"run\.json"):
        ask(copy, "SELECT * FROM runs")


def test_a_link_out_of_a_run_is_no_file_of_it(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    write_rollouts(outside / "step-000004.parquet", make_rollouts(4, ["a secret"]))
    inside = copy / "rollouts" / "step-000004.parquet"
    inside.unlink()
    inside.symlink_to(outside / "step-000004.parquet")
    assert ask(copy, "SELECT max(step) FROM rollouts") == [(3,)]


def test_numbers_of_lm_eval_are_asked_too(copy: Path) -> None:
    result = make_harness_result(step=4)
    (copy / "eval" / "lm-eval-gsm8k_cot-step-000004.json").write_text(result.model_dump_json())
    sql = "SELECT task, replies, example_id, value FROM evals WHERE replies = 'lm-eval' ORDER BY value"
    assert ask(copy, sql) == [
        ("gsm8k_cot", "lm-eval", "exact_match,strict-match", 0.5),
        ("gsm8k_cot", "lm-eval", "exact_match,flexible-extract", 0.75),
    ]


WAYS_OUT = [
    "SELECT * FROM read_csv('{place}')",
    "SELECT * FROM read_text('{place}')",
    "SELECT * FROM read_parquet('{place}')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM query('SELECT * FROM read_text(''{place}'')')",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''{place}'')'))",
    "SELECT (SELECT content FROM read_text('{place}')) FROM metrics",
    "SELECT * FROM read_text('http://127.0.0.1:1/x')",
    "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM secret",  # A Python variable of the caller.
    "SELECT getenv('HOME')",
    "COPY metrics TO '{new}'",
    "EXPLAIN ANALYZE COPY metrics TO '{new}'",
    "ATTACH '{new}' AS other",
    "INSTALL httpfs",
    "SET enable_external_access = true",
    "SET temp_directory = '{folder}'",
    "SELECT * FROM enable_logging('QueryLog', storage := 'file', storage_path := '{new}')",
    "CREATE TABLE x AS SELECT 1",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY metrics TO '{new}'",
    "",
    "-- nothing",
]


@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_question_reaches_beyond_the_record(
    runs: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "secret.txt"
    place.write_text("step\n42\n")
    secret = pa.table({"a": [1]})
    before = sorted(tmp_path.iterdir())
    sql = way.format(place=place, folder=tmp_path, new=tmp_path / "new")
    with pytest.raises(ConfigError) as refused:
        ask(runs, sql)
    assert "42" not in str(refused.value)
    # Nothing was written, and what was there is as it was.
    assert sorted(tmp_path.iterdir()) == before
    assert place.read_text() == "step\n42\n"
    assert secret.num_rows == 1


def test_a_wrong_question_is_answered_with_what_there_is(runs: Path) -> None:
    for sql, told in {
        "SELECT foo FROM rollouts": 'column "foo" not found',
        "SELEC 1": "syntax error",
        "SELECT * FROM rollout": "Table with name rollout does not exist",
        "SELECT avg(reply_text) FROM rollouts": "avg",
    }.items():
        with pytest.raises(ConfigError) as refused:
            ask(runs, sql)
        assert told in str(refused.value)
        assert "rollouts" in str(refused.value)


def test_errors_quote_no_escape_codes(copy: Path) -> None:
    hostile = "\x1b[2J\u202e<script>"
    write_rollouts(copy / "rollouts" / "step-000004.parquet", make_rollouts(4, [hostile]))
    assert ask(copy, "SELECT reply_text FROM rollouts WHERE step = 4") == [(hostile,)]
    with pytest.raises(ConfigError) as refused:
        ask(copy, "SELECT reply_text::INT FROM rollouts WHERE step = 4")
    assert "\x1b" not in str(refused.value)
    assert "\u202e" not in str(refused.value)
    assert "<script>" in str(refused.value)


def test_columns_of_one_name_stay_apart_and_values_have_a_form_in_json(runs: Path) -> None:
    from strop.view.query import to_json

    with open_runs(records_of(runs)) as database:
        answer = database.ask(
            "SELECT 1 AS a, 2 AS a, 'nan'::DOUBLE, DATE '2026-01-02', {'x': [1.5, NULL]},"
            " MAP {'k': 0.5}, 2::HUGEINT"
        )
        assert answer.columns[:2] == ("a", "a_1")
        (row,) = answer.rows
    assert json.dumps([to_json(value) for value in row]) == (
        '[1, 2, null, "2026-01-02", {"x": [1.5, null]}, {"k": 0.5}, 2]'
    )


def no_job(name: str) -> tuple[str, RecordFiles]:
    raise AssertionError(name)


def mirror(runs: Path, objects: Objects, root: str) -> None:
    """Put the runs where their mirrors would be."""
    for path in sorted(runs.iterdir()):
        for file in sorted(path.rglob("*")):
            if file.is_file() and "latest" not in file.parts:
                name = file.relative_to(path).as_posix()
                objects.write(f"{root}/{path.name}/{name}", file.read_bytes())


def ask_place(place: str, sql: str) -> list[tuple[Any, ...]]:
    return ask_records({run.key: run.record for run in find_runs(place, no_job).list()}, sql)


QUESTIONS = (
    "SELECT run, step, avg(reward), max(turns[1].text) FROM rollouts GROUP BY ALL ORDER BY ALL",
    "SELECT count(*), max(step) FROM rollouts WHERE step > 2 AND run LIKE 'a-%'",
    "SELECT * FROM metrics ORDER BY ALL",
    "SELECT run, step, kind, cause FROM events ORDER BY ALL",
    "SELECT * FROM evals ORDER BY ALL",
    "SELECT run, step, seed FROM runs ORDER BY ALL",
)


def test_mirrors_in_s3_answer_as_the_runs_themselves(runs: Path, s3_root: str) -> None:
    mirror(runs, S3Objects(), s3_root)
    for sql in QUESTIONS:
        assert ask_place(s3_root, sql) == ask(runs, sql), sql
    (first, _) = sorted(path.name for path in runs.iterdir())
    assert ask_place(f"{s3_root}/{first}", "SELECT DISTINCT run FROM rollouts") == [(first,)]
