"""Tests of the math tasks and mmlu, in the published schemas, on rows written for these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Example, Outcome, Split
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import PresetSpec
from strop.tasks.rows.row_task import RowTask
from tests.fixtures.judging import run_self_test, verdict
from tests.fixtures.row_files import write_parquet, write_rows

Row = dict[str, Any]
SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)


def math_row(problem: str, answer: str, level: str = "Level 2", subject: str = "Algebra") -> Row:
    solution = f"We find $2 \\cdot 1$, then \\boxed{{{answer}}}."
    return {"problem": problem, "level": level, "type": subject, "solution": solution}


MATH_TRAIN = [
    math_row("Find $x$ with $2x = -10$.", "-5"),
    math_row("Find one half of one.", r"\frac{1}{2}", "Level 1"),
    math_row("Factor $x^2 - 1$.", "(x-1)(x+1)", "Level 5"),
    math_row("Find the domain.", r"(-\infty, 3]", "Level 4", "Precalculus"),
    math_row("How much money?", r"\$1,\!234.50", "Level 3"),
    math_row("Unknown level.", "7", "Level ?"),
]
MATH_TEST = [math_row("Who is next?", r"\text{Evelyn}"), math_row("How many?", "1{,}000")]


def math(source: Path | str, **settings: Any) -> RowTask:
    task = build_task(PresetSpec(name="math", source=str(source), **settings))
    assert isinstance(task, RowTask)
    return task


@pytest.fixture
def math_folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl", MATH_TRAIN)
    write_rows(tmp_path / "test.jsonl", MATH_TEST)
    return tmp_path


@pytest.fixture
def symbolic() -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")


def answers(task: Task, split: Split) -> list[str | None]:
    return [example.answer for example in task.examples(split)]


def test_math_reads_the_hubs_seven_folders_in_order(tmp_path: Path) -> None:
    for index, subject in enumerate(SUBJECTS):
        for split, offset in (("train", 0), ("test", 10)):
            row = math_row(f"{subject} {split}", str(index + offset), subject=subject)
            write_parquet(tmp_path / subject / f"{split}-00000-of-00001.parquet", [row])
    task = math(tmp_path)
    assert answers(task, Split.TRAIN) == ["0", "1", "2", "3", "4", "5", "6"]
    assert answers(task, Split.HELD_OUT) == ["10", "11", "12", "13", "14", "15", "16"]
    assert [example.fields["type"] for example in task.examples(Split.TRAIN)] == list(SUBJECTS)


@pytest.mark.parametrize("reward", ["math", "strict-math"])
@pytest.mark.usefixtures("symbolic")
def test_math_passes_its_self_test(math_folder: Path, reward: str) -> None:
    task = math(math_folder, reward=reward)
    for split in Split:
        assert run_self_test(task, task.examples(split)) == []
    # Sympy may hang, and a worker that does is killed.
    assert (task.limits.verify_limit_s is not None) is (reward == "math")


def judge(task: Task, gold: str, text: str) -> Outcome:
    fields = {"problem": "?", "solution": ""}
    return verdict(task, Example(task=task.name, example_id="0", fields=fields, answer=gold), text)


@pytest.mark.parametrize(
    ("text", "is_alike", "is_equal", "format_ok", "extracted"),
    [
        (r"\boxed{\dfrac{1}{2}}", True, True, True, r"\dfrac{1}{2}"),
        (r"\boxed{\frac12}", False, True, True, r"\frac12"),
        (r"\boxed{3} then \boxed{1/2}", False, True, False, "1/2"),
        ("The answer is $1/2$.", False, True, True, "1/2"),
        (r"\boxed{0.5}", False, True, True, "0.5"),
        (r"\boxed{\sin^2x + \cos^2x - \frac{1}{2}}", False, True, True, None),
        (r"\boxed{-\frac{1}{2}}", False, False, True, None),
        (r"\boxed{\frac{1}{2}}" + "\nProblem: 1+1? \\boxed{2}", True, True, True, None),
        (r"<think>\boxed{2}</think>\boxed{\frac{1}{2}}", True, True, True, None),
        (r"<think>\boxed{\frac{1}{2}}", False, False, False, None),
        (r"so $x = \frac{1}{2}$ it is", False, True, False, r"x = \frac{1}{2}"),
        ("It is half", False, False, False, None),
    ],
)
@pytest.mark.usefixtures("symbolic")
def test_verdicts_of_both_rewards(
    text: str, is_alike: bool, is_equal: bool, format_ok: bool, extracted: str | None
) -> None:
    rewards = ("strict-math", "math")
    outcomes = [judge(math("unused.jsonl", reward=reward), r"\frac{1}{2}", text) for reward in rewards]
    assert [outcome.is_correct for outcome in outcomes] == [is_alike, is_equal]
    assert [outcome.reward for outcome in outcomes] == [float(is_alike), float(is_equal)]
    assert {outcome.format_ok for outcome in outcomes} == {format_ok}
    if extracted is not None:
        assert {outcome.extracted for outcome in outcomes} == {extracted}


def test_math500_is_held_out_only(tmp_path: Path) -> None:
    row = {
        "problem": "1+1?",
        "solution": r"\boxed{2}",
        "answer": "2",
        "subject": "A",
        "level": 1,
        "unique_id": "a",
    }
    write_rows(tmp_path / "test.jsonl", [row, {**row, "problem": "2+2?", "answer": "4"}])
    task = build_task(PresetSpec(name="math500", source=str(tmp_path), reward=("strict-math",)))
    assert answers(task, Split.HELD_OUT) == ["2", "4"]
    assert run_self_test(task, task.examples(Split.HELD_OUT)) == []
    with pytest.raises(DataError, match="math500"):
        task.examples(Split.TRAIN)


def test_deepscaler_is_one_json_list_held_out_by_content(tmp_path: Path) -> None:
    rows = [{"problem": f"{n} + 1?", "answer": str(n + 1), "solution": ""} for n in range(20)]
    path = tmp_path / "deepscaler.json"
    path.write_text(json.dumps([*rows, {"problem": "?", "answer": "", "solution": None}]))
    task = build_task(PresetSpec(name="deepscaler", source=str(path), reward=("strict-math",)))
    # A tenth of 21 rows, rounded down.
    assert len(task.examples(Split.HELD_OUT)) + len(task.examples(Split.TRAIN)) == 20
    assert len(task.examples(Split.HELD_OUT)) in (1, 2)
    assert isinstance(task, RowTask)
    assert task.counts == {"rows left out, without an answer": 1}
    assert run_self_test(task, task.examples(Split.TRAIN)) == []
    assert task.limits.max_reply_tokens == 4096


@pytest.mark.parametrize("content", ["[1]", "[{", '[{"problem": "?"} '])
def test_a_broken_json_list_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "deepscaler.json"
    path.write_text(content)
    task = build_task(PresetSpec(name="deepscaler", source=str(path)))
    with pytest.raises(DataError, match=r"deepscaler\.json"):
        task.examples(Split.TRAIN)


def aime(source: Path | str) -> Task:
    return build_task(PresetSpec(name="aime", source=str(source)))


@pytest.mark.parametrize(
    "rows",
    [
        [{"problem": "A?", "answer": "025", "id": "1"}, {"problem": "B?", "answer": "7", "id": "2"}],
        [{"ID": "1", "Problem": "A?", "Solution": "-", "Answer": 25}, {"Problem": "B?", "Answer": 7}],
    ],
)
def test_aime_reads_the_published_schemas(tmp_path: Path, rows: list[Row]) -> None:
    task = aime(write_rows(tmp_path / "aime.jsonl", rows))
    assert [int(answer or "") for answer in answers(task, Split.HELD_OUT)] == [25, 7]
    assert run_self_test(task, task.examples(Split.HELD_OUT)) == []
    with pytest.raises(DataError, match="training examples of task aime"):
        task.examples(Split.TRAIN)


MMLU_ROWS = [
    {"question": "Which is odd?", "subject": "number_theory", "choices": ["2", "4", "5", "6"], "answer": 2},
    {"question": "Which is odd?", "subject": "number_theory", "choices": ["7", "4", "8", "6"], "answer": 0},
    {"question": "Which is red?", "subject": "art", "choices": ["sky", "a rose", "sea", "sun"], "answer": 1},
]


@pytest.fixture
def mmlu_folder(tmp_path: Path) -> Path:
    train = {"question": "Up?", "subject": "", "choices": ["no", "yes", "so", "la"], "answer": 3}
    write_parquet(tmp_path / "all" / "auxiliary_train-00000-of-00001.parquet", [train, MMLU_ROWS[0]])
    write_parquet(tmp_path / "all" / "test-00000-of-00001.parquet", MMLU_ROWS)
    return tmp_path


def test_mmlu_reads_the_hubs_files(mmlu_folder: Path) -> None:
    task = build_task(PresetSpec(name="mmlu", source=str(mmlu_folder)))
    assert answers(task, Split.HELD_OUT) == ["C", "A", "B"]
    assert answers(task, Split.TRAIN) == ["D"]
    assert run_self_test(task, task.examples(Split.HELD_OUT)) == []
    assert isinstance(task, RowTask)
    assert task.counts == {"rows left out, held out too": 1}


ROW = {"level": "Level 1", "answer": 0, "choices": list("abcd")}
BROKEN_ROWS: list[tuple[type[Any], str, Row]] = [
    *(
        (PresetSpec, "math", {**MATH_TRAIN[0], "solution": solution})
        for solution in ("It is 5.", r"\boxed{}", r"\boxed{5", r"\boxed{ \, }")
    ),
    *(
        (PresetSpec, "math500", {"problem": "?", "solution": "!", "answer": answer})
        for answer in ("$", r"\boxed{}", "\\,")
    ),
    *(
        (PresetSpec, "mmlu", {**MMLU_ROWS[0], **change})
        for change in (*({"choices": ["1", "2"]}, {"choices": "1234"}, {"answer": 4}, {"answer": "E"}),)
    ),
    *((PresetSpec, "gsm8k", {"question": "1?", "answer": one}) for one in ("two", "2", "#### two", "####")),
    *((PresetSpec, "gsm8k", {"question": one, "answer": "#### 2"}) for one in (" ", 3, None)),
    *((PresetSpec, "deepscaler", ROW), (PresetSpec, "math500", ROW), (PresetSpec, "math", ROW)),
    *((PresetSpec, "aime", ROW), (PresetSpec, "mmlu", ROW), (PresetSpec, "gsm8k", ROW)),
]


@pytest.mark.parametrize(("spec", "name", "row"), BROKEN_ROWS)
def test_a_row_that_cannot_be_judged_is_named(tmp_path: Path, spec: Any, name: str, row: Row) -> None:
    path = write_rows(tmp_path / "all.jsonl", [row, {**row, "subject": "b", "id": 2}])
    with pytest.raises(DataError, match=r"all\.jsonl, row [12]"):
        build_task(spec(name=name, source=str(path))).examples(Split.HELD_OUT)
