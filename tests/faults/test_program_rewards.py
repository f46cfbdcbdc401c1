"""Rewards of `python-tests` scored right programs 0 and wrong ones 1: which tests are judged, and how."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import FailureOwner, Outcome, Split
from strop.spec import load_spec
from strop.tasks import build_task
from tests.fixtures.judging import failed, verdict


def judge(folder: Path, tests: Any, program: str) -> Outcome:
    """Score a program by the tests of a row, as a run file names them."""
    rows = [{"question": f"{number}?", "tests": tests} for number in range(2)]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps(rows.pop()) + "\n")
    run_file = folder / "run.toml"
    run_file.write_text(
        f'name = "rows"\n[model]\nuri = "toy"\n[task]\nname = "rows"\nsource = "{folder}"\n'
        'prompt = "question"\nanswer = "tests"\nreward = "python-tests"\n'
        'sandbox = "process"\nmin_isolation = "rlimit"\n'
    )
    task = build_task(load_spec(run_file).spec.task)
    (example,) = task.examples(Split.TRAIN)
    return verdict(task, example, f"```python\n{program}\n```")


TABLES = tomllib.loads(Path(__file__).with_name("program_rewards.toml").read_text())
DOUBLE = "def double(x):\n    return 2 * x"
QUICK = {
    *("a list with a common variable", "an import", "test functions", "changes in place"),
    *("a class named like a module", "membership alone", "an exit where an exception is expected"),
    "a function as an argument",
}
"""Those that are tried each time: a program takes a tenth of a second."""


def cases(table: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TABLES[table]]


@pytest.mark.parametrize("style", cases("styles"))
def test_a_right_program_passes_and_a_wrong_one_fails_in_every_style(tmp_path: Path, style: str) -> None:
    case = TABLES["styles"][style]
    assert judge(tmp_path, case["tests"], case["program"]).reward == 1.0
    wrong = f"\n{case['name']} = lambda *_, **__: None" if "name" in case else "\nprint(1)"
    assert judge(tmp_path, case["tests"], case["program"] + wrong).reward == 0.0


@pytest.mark.parametrize("attack", cases("forgeries"))
def test_no_forgery_earns_anything(tmp_path: Path, attack: str) -> None:
    case = TABLES["forgeries"][attack]
    assert judge(tmp_path, case["tests"], f"{TABLES['every']}\n{case['program']}").reward == 0.0


@pytest.mark.parametrize("style", TABLES["refused"])
def test_tests_that_cannot_be_judged_are_refused_with_their_row(tmp_path: Path, style: str) -> None:
    with pytest.raises(DataError) as refusal:
        judge(tmp_path, TABLES["refused"][style]["tests"], DOUBLE)
    assert "row 1" in str(refusal.value)


@pytest.mark.parametrize("style", cases("unscored"))
def test_tests_that_pass_the_program_no_plain_value_give_no_score(tmp_path: Path, style: str) -> None:
    outcome = judge(tmp_path, TABLES["unscored"][style]["tests"], TABLES["takes_anything"])
    assert (outcome.reward, failed(outcome)) == (None, (FailureOwner.TASK, "DataError"))
