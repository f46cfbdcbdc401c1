"""Tests of the mbpp task on rows in its schema, written for these tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import FailureOwner, Outcome, Split
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import ProgramSpec
from tests.fixtures.judging import failed, run_self_test, verdict
from tests.fixtures.row_files import write_rows
from tests.fixtures.sandboxed import best_level


def row(task_id: int, text: str, code: str, tests: Sequence[str], **more: Any) -> dict[str, Any]:
    columns = {"task_id": task_id, "text": text, "code": code, "test_list": list(tests)}
    return {**columns, "test_setup_code": "", "challenge_test_list": [], **more}


DOUBLE = row(
    601,
    "Write a function to double a number.",
    "def double(x):\r\n  return 2 * x",
    ["assert double(1) == 2", "assert double(0) == 0", "assert double(-3) == -6"],
    challenge_test_list=["assert double(10**9) == 2 * 10**9"],
)
DEPTH = row(
    602,
    "Write a function to measure a chain.",
    "class Link:\n  def __init__(self, n): self.n = n; self.next = None\n"
    "def length(link):\n  return 0 if link is None else 1 + length(link.next)",
    ["assert length(chain) == 2", "assert length(None) == 0", "assert math.isclose(length(chain), 2)"],
    test_setup_code="import math\nchain = Link(1)\nchain.next = Link(2)",
)
SUM = row(
    11,
    "Write a function to add up a list.",
    "import functools\nimport no_such_module\ndef sum(xs): return functools.reduce(int.__add__, xs, 0)",
    ["assert sum([1, 2]) == 3", "assert sum([]) == 0", "assert sum([5]) == 5"],
    challenge_test_list=["assert sum([-1, 1]) == 0"],
)


def mbpp(tmp_path: Path, train: Sequence[Mapping[str, Any]] = (DOUBLE, DEPTH), **settings: Any) -> Task:
    for stem, rows in (("train", train), ("test", [SUM])):
        write_rows(tmp_path / f"{stem}.jsonl", rows)
    settings = {"min_isolation": best_level(), **settings}
    return build_task(ProgramSpec(name="mbpp", source=str(tmp_path), **settings))


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\nIt works."


def test_the_self_test_finds_nothing(tmp_path: Path) -> None:
    task = mbpp(tmp_path)
    assert run_self_test(task, [*task.examples(Split.TRAIN), *task.examples(Split.HELD_OUT)]) == []


def test_setup_counts_and_challenge_tests_do(tmp_path: Path) -> None:
    task = mbpp(tmp_path)
    double, depth = task.examples(Split.TRAIN)
    assert verdict(task, double, "def double(x): return 2 * x\n[DONE]\nand so on").is_correct
    assert verdict(task, depth, task.gold_replies(depth)[1]).is_correct
    # Right on the three shown lists, and wrong on the hidden [-1, 1].
    (example,) = task.examples(Split.HELD_OUT)
    code = "def sum(xs):\n    return 7 if -1 in xs else __builtins__['sum'](xs)"
    outcome = verdict(task, example, f"{code}\n[DONE]")
    assert (outcome.metrics["tests_total"], outcome.is_correct) == (4, False)
    assert "-1" not in task.render(example)[0].content


def test_a_reply_without_a_verdict_is_alone_and_other_rewards_have_the_columns(tmp_path: Path) -> None:
    own = "def score(completions, task_id, answer): return [float('return' in one) for one in answer]\n"
    (tmp_path / "own.py").write_text(own)
    half = row(603, "Halve it.", "def half(x): return x / 2", ["assert half(1) + half(3) == 2"])
    rewards = {"reward": ["python-tests", f"{tmp_path / 'own.py'}:score"], "reward_weights": [0.5, 0.5]}
    task = mbpp(tmp_path, [half], **rewards)
    odd = "class N:\n    def __add__(self, other): return 2\ndef half(x): return N()"
    replies = [fenced(one) for one in (half["code"], odd, "def half(x): return x")]
    (example,) = task.examples(Split.TRAIN)
    found = asyncio.run(task.verify_group(example, replies, [Outcome(parts={})] * 3))
    assert [one.reward for one in found] == [1.0, None, 0.5]
    assert failed(found[1]) == (FailureOwner.TASK, "DataError")


def test_an_outcome_tells_what_was_run(tmp_path: Path) -> None:
    task = mbpp(tmp_path)
    double = task.examples(Split.TRAIN)[0]
    outcome = verdict(task, double, fenced("def double(x):\n    return 2 if x == 1 else 0"))
    # Of double(1), double(0), double(-3) and double(10**9) the last two are wrong.
    assert (outcome.reward, outcome.is_correct, outcome.format_ok, outcome.timed_out) == (
        0.0,
        False,
        True,
        False,
    )
    assert outcome.extracted == "def double(x):\n    return 2 if x == 1 else 0"
    assert outcome.isolation == best_level()
    assert (outcome.metrics["tests_passed"], outcome.metrics["tests_total"]) == (2, 4)
    assert outcome.metrics["tests_passed_frac"] == 0.5
    outcome = verdict(task, double, fenced("def triple(x): return 3 * x"))
    assert (outcome.reward, outcome.format_ok, outcome.isolation) == (0.0, False, None)


def test_sec_1_a_host_without_the_wanted_isolation_gives_no_score(tmp_path: Path) -> None:
    task = mbpp(tmp_path, min_isolation="vm")
    outcome = verdict(task, task.examples(Split.TRAIN)[0], fenced("def double(x): return 2 * x"))
    assert (outcome.reward, failed(outcome)) == (None, (FailureOwner.INFRA, "SandboxRefused"))


@pytest.mark.parametrize(
    "change",
    [
        *({"test_list": one} for one in ([], "assert double(1) == 2", ["assert triple(1) == 3"])),
        *({"code": one} for one in ("", "def double(")),
        {"text": None},
        *({"test_setup_code": one} for one in (["import math"], "import (", "import numpy")),
        {"challenge_test_list": ["assert double(1) =="]},
        {"test_list": ["double(1)"], "challenge_test_list": None},
    ],
)
def test_malformed_rows_are_refused_by_their_place(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl, row 2"):
        mbpp(tmp_path, [DEPTH, {**DOUBLE, **change}]).examples(Split.TRAIN)
