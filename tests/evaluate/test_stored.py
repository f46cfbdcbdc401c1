"""A score beside the user's own stored ones: a difference for the same protocol, else what differs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, CorruptRecord
from strop.evaluate import EvalResult, Validity, compare_results, write_result
from strop.evaluate.harness import HarnessMetric, HarnessPart, HarnessResult
from strop.evaluate.stored import ScoreRow, StoredBaseline, list_rows, read_stored, write_table
from strop.rollout import Split
from strop.run import baselines as room
from strop.run.baselines import read_baselines
from strop.run.inference import open_model
from tests.evaluate.stored_results import (
    make_harness_result,
    make_result,
)

BEFORE = {"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0}
AFTER = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}


def beside(before: EvalResult | HarnessResult, after: EvalResult | HarnessResult) -> list[ScoreRow]:
    return list_rows([after], [StoredBaseline(name="base", results={Path("b.json"): before})])


def write_harness(path: Path, result: HarnessResult) -> None:
    path.write_text(json.dumps(result.model_dump(mode="json")))


def test_the_same_protocol_gives_a_paired_difference() -> None:
    before, after = make_result(BEFORE, model_digest="m0", step=0), make_result(AFTER)
    (row,) = beside(before, after)
    change = compare_results(before, after).greedy
    assert change is not None
    assert (row.value, row.baseline, row.baseline_of, row.same_protocol) == (75.0, 50.0, "base", True)
    assert (row.difference, row.difference_low, row.difference_high) == pytest.approx(
        (25.0, 100 * change.low, 100 * change.high)
    )
    assert row.note == ""


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (make_result, {"task_version": "v0"}, "task_version"),
        (make_result, {"max_reply_tokens": 16}, "max_reply_tokens"),
        (make_result, {"validity": Validity.TRUNCATION}, "truncation"),
        (make_harness_result, {"num_fewshot": 8}, "num_fewshot"),
        (make_harness_result, {"data_digest": "other"}, "data_digest"),
        (make_harness_result, {"arguments": ("include=x",)}, "arguments"),
    ],
)
def test_another_protocol_gives_what_differs_instead(make: Any, changes: dict[str, Any], named: str) -> None:
    for row in beside(make(**changes), make()):
        assert row.baseline is not None
        assert (row.difference, row.difference_low, row.same_protocol) == (None, None, False)
        assert named in row.note


def test_numbers_of_the_harness_are_compared_by_their_errors() -> None:
    before = make_harness_result(
        model_digest="m0", metrics={"acc,none": HarnessMetric(value=0.5, stderr=0.03)}, engine="vllm"
    )
    after = make_harness_result(metrics={"acc,none": HarnessMetric(value=0.6, stderr=0.04)})
    (row,) = beside(before, after)
    half = 1.959963984540054 * 5
    assert (row.difference, row.difference_low, row.difference_high) == pytest.approx(
        (10.0, 10.0 - half, 10.0 + half)
    )
    assert row.note == "engine vllm there and hf here"
    unsure = after.model_copy(update={"metrics": {"acc,none": HarnessMetric(value=0.6, stderr=None)}})
    (row,) = beside(before, unsure)
    assert row.difference == pytest.approx(10.0)
    assert row.difference_low is None


def test_no_interval_is_without_width_where_all_examples_came_out_alike() -> None:
    """lm-eval's standard error is 0 there."""
    metric = {"acc,none": HarnessMetric(value=0.0, stderr=0.0)}
    result = make_harness_result(metrics=metric, num_examples=40)
    (row,) = beside(result, result)
    # As if 1.5 of 43 were right: 1.5 / 43 = 0.0349, and its error 0.0283.
    assert row.low == 0.0
    assert row.high == pytest.approx(1.96 * 2.83, abs=0.01)
    assert row.difference_low == pytest.approx(-1.96 * 2.83 * 2**0.5, abs=0.02)
    assert row.difference_high == pytest.approx(1.96 * 2.83 * 2**0.5, abs=0.02)


def test_what_is_no_share_is_no_percentage_and_parts_stand_beside_parts() -> None:
    metric = {"word_perplexity,none": HarnessMetric(value=0.9, stderr=None)}
    part = {"parts": {"p": HarnessPart(num_examples=3, metrics=metric)}}
    whole, part_row = beside(
        make_harness_result(metrics=metric, **part), make_harness_result(metrics=metric, **part)
    )
    assert (whole.value, whole.baseline, whole.difference) == (0.9, 0.9, 0.0)
    assert (part_row.task, part_row.baseline) == ("p", 0.9)


def test_a_baseline_without_the_task_leaves_the_row_alone() -> None:
    (row,) = beside(make_result(task="guess-number"), make_result(AFTER))
    assert (row.baseline, row.same_protocol) == (None, None)
    # lm-eval's numbers on a task of that name are no scores of strop's.
    (row,) = beside(make_harness_result(task="arithmetic"), make_result(AFTER))
    assert row.baseline is None


def test_the_last_step_stands_beside_and_of_it_the_same_protocol() -> None:
    stored = StoredBaseline(
        name="base",
        results={
            Path("1.json"): make_result(BEFORE, step=10),
            Path("2.json"): make_result(BEFORE, step=20, max_reply_tokens=8),
            Path("3.json"): make_result(BEFORE, step=20),
            Path("4.json"): make_result(BEFORE, step=40, split=Split.TRAIN),
        },
    )
    assert stored.choose(make_result(AFTER)) == make_result(BEFORE, step=20)


def test_a_table_is_written(tmp_path: Path) -> None:
    first = StoredBaseline(name="first", results={Path("a"): make_result(BEFORE, model_digest="m0")})
    second = StoredBaseline(name="second", results={Path("a"): make_result(BEFORE, task_version="v0")})
    path = write_table(list_rows([make_result(AFTER)], [first, second]), tmp_path, "t")
    with path.open() as file:
        rows = [(row["baseline_of"], row["same_protocol"], row["difference"]) for row in csv.DictReader(file)]
    assert rows == [("first, step 20", "True", "25.0"), ("second, step 20", "False", "")]


def test_results_are_read_from_a_file_a_folder_and_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    write_result(make_result(), run / "eval" / "arithmetic-step-000020.json")
    write_harness(run / "eval" / "lm-eval-gsm8k_cot-step-000000.json", make_harness_result())
    (run / "eval" / "other.json").write_text("[1]")
    (run / "eval" / "t.csv").write_text("task")
    assert {type(one) for one in read_stored(run).values()} == {EvalResult, HarnessResult}
    assert read_stored(run / "eval") == read_stored(run)
    (found,) = read_stored(run / "eval" / "arithmetic-step-000020.json").values()
    assert found == make_result()
    with pytest.raises(CorruptRecord, match=r"other\.json is no result\. Allowed: a file that `strop eval`"):
        read_stored(run / "eval" / "other.json")
    (run / "eval" / "bad.json").write_text('{"harness": "x", "metrics": {}}')
    with pytest.raises(CorruptRecord, match=r"bad\.json is no complete result of lm-eval"):
        read_stored(run)


@pytest.fixture
def evals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of results that all evaluations share."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(room, "EVALS_ROOT", tmp_path / "evals")
    (tmp_path / "evals").mkdir()
    return tmp_path / "evals"


def read(
    *words: str, tasks: tuple[str, ...] = ("arithmetic",), by_harness: bool = False
) -> list[StoredBaseline]:
    return read_baselines(words, tasks, Split.HELD_OUT, by_harness=by_harness, out_dir=None)


def test_places_and_names_of_baselines(evals: Path) -> None:
    write_result(make_result(), evals / "arithmetic-step-000020-aaaa.json")
    write_result(make_result(model_digest="m2"), evals / "short.arithmetic-step-000020-bbbb.json")
    path = evals / "arithmetic-step-000020-aaaa.json"
    one, named, evaluation = read(str(path), f"mine={path}", "short")
    assert (one.name, named.name, evaluation.name) == ("arithmetic-step-000020-aaaa", "mine", "short")
    assert one.results == named.results
    assert {result.model_digest for result in evaluation.results.values()} == {"m2"}
    write_harness(evals / "lm-eval-gsm8k_cot-step-000000.json", make_harness_result())
    (harness,) = read(
        f"base={evals / 'lm-eval-gsm8k_cot-step-000000.json'}", tasks=("gsm8k_cot",), by_harness=True
    )
    assert list(harness.results.values()) == [make_harness_result()]


def test_a_model_stands_for_its_results(evals: Path, tiny_model_dir: Path) -> None:
    digest = open_model(str(tiny_model_dir)).digest
    write_result(make_result(model_digest="m2"), evals / "arithmetic-step-000020-aaaa.json")
    with pytest.raises(ConfigError, match=r"has no results\. Allowed: a result, a folder .* evaluate that"):
        read(str(tiny_model_dir))
    write_result(make_result(model_digest=digest), evals / "arithmetic-step-000020-bbbb.json")
    (found,) = read(f"it={tiny_model_dir}")
    assert [result.model_digest for result in found.results.values()] == [digest]


@pytest.mark.parametrize(
    ("words", "tasks", "message"),
    [
        (("nowhere",), ("arithmetic",), r"the baseline 'nowhere' has no results"),
        (("",), ("arithmetic",), r"the baseline '' has no results"),
        (
            ("x=evals/a.json", "x=evals/b.json"),
            ("arithmetic",),
            "x has results of several models on arithmetic",
        ),
        (("evals/a.json",), ("gsm8k",), r"a has no held_out result on gsm8k\. .*; it has arithmetic"),
        (
            ("evals",),
            ("arithmetic",),
            r"evals has results of several models on arithmetic: .*a\.json, .*b\.json",
        ),
    ],
)
def test_baselines_that_say_nothing_are_refused(
    words: tuple[str, ...], tasks: tuple[str, ...], message: str, evals: Path
) -> None:
    write_result(make_result(), evals / "a.json")
    write_result(make_result(model_digest="m2"), evals / "b.json")
    with pytest.raises(ConfigError, match=message):
        read(*words, tasks=tasks)
