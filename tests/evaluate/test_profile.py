"""The area under the performance profile of a suite: a mean over its tasks, in results, files and tables."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strop.cli.eval import show_results
from strop.environments.contract import PROFILE_AREA
from strop.evaluate import EvalResult, EvalSettings, evaluate_task, read_result, write_result
from strop.evaluate.table import list_rows
from strop.rollout import Example, Outcome, Split
from strop.tasks.generated.arithmetic import Arithmetic
from tests.evaluate.arithmetic_world import add, make_engine, make_spec, make_tokenizer


class Suite(Arithmetic):
    """Two tasks: sums of 1 lie close to their ceiling, of the others only those without a score."""

    def part_of(self, example: Example) -> str:
        return "ones" if example.fields["a"] == 1 else "others"

    def verify(self, example: Example, text: str) -> Outcome:
        judged = super().verify(example, text)
        if example.fields["a"] == 2:
            return Outcome(parts={"sum": None}, metrics={PROFILE_AREA: 1.0})
        area = 0.8 if example.fields["a"] == 1 else 0.25
        return Outcome(parts=judged.parts, is_correct=judged.is_correct, metrics={PROFILE_AREA: area})


def evaluate(tmp_path: Path, task: Arithmetic) -> EvalResult:
    tokenizer = make_tokenizer(tmp_path)
    return asyncio.run(
        evaluate_task(
            task=task,
            engine=make_engine(tokenizer, add),
            tokenizer=tokenizer,
            settings=EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT, num_samples=2),
            model_digest="m",
        )
    )


def test_each_task_counts_once_and_what_has_no_score_not_at_all(tmp_path: Path) -> None:
    result = evaluate(tmp_path, Suite(make_spec()))
    assert {len(part.example_ids) for part in result.parts.values()} != {5}
    for score in result.scores.values():
        assert score.profile_area == pytest.approx((0.8 + 0.25) / 2)
    assert result.parts["ones"].greedy.profile_area == pytest.approx(0.8)
    assert result.parts["others"].greedy.profile_area == pytest.approx(0.25)
    rows = {row.metric: row.value for row in list_rows([result])}
    assert rows["greedy AUP"] == rows["sampled AUP"] == pytest.approx(52.5)
    write_result(result, tmp_path / "result.json")
    assert read_result(tmp_path / "result.json").greedy.profile_area == result.greedy.profile_area


def test_what_is_no_suite_has_none(tmp_path: Path) -> None:
    result = evaluate(tmp_path, Arithmetic(make_spec()))
    assert result.greedy.profile_area is None
    assert [row.metric for row in list_rows([result])] == ["greedy", "sampled"]


def test_people_are_told_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strop.cli.output import Output

    show_results(Output(), [evaluate(tmp_path, Suite(make_spec()))], is_json=False)
    assert "greedy: area under the performance profile 0.525" in capsys.readouterr().out
