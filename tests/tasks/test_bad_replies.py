"""Replies that mean harm or nothing: what each task makes of them, as docs/tasks.md says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.code.mbpp import MbppSpec
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tasks.generated.reasoning_gym import ReasoningGymSpec
from strop.tasks.generated.reverse_text import ReverseTextSpec
from strop.tasks.instructions.tasks import IfMultiSpec
from strop.tasks.mathematics.boxed_math import MathSpec
from strop.tasks.mathematics.gsm8k import Gsm8kSpec
from tests.fixtures.sandboxed import best_level

MEGABYTE = 1_000_000


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k(folder: Path) -> Task:
    rows = [{"question": f"{n} + 1?", "answer": f"So:\n#### {n + 1}"} for n in range(20)]
    return build_task(Gsm8kSpec(name="gsm8k", source=write(folder / "rows.jsonl", *rows)))


def mathematics(folder: Path) -> Task:
    pytest.importorskip("math_verify")
    rows = [
        {"problem": f"What is ${n} + x$?", "solution": f"\\boxed{{{n} + x}}", "level": "Level 1", "type": "A"}
        for n in range(20)
    ]
    return build_task(MathSpec(name="math", source=write(folder / "rows.jsonl", *rows)))


def mbpp(folder: Path) -> Task:
    row = {"text": "Double a number.", "code": "def double(x): return 2 * x", "test_setup_code": ""}
    for stem, number in (("train", 1), ("test", 2)):
        tests = [f"assert double({n}) == {2 * n}" for n in (number, 7)]
        write(folder / f"{stem}.jsonl", row | {"task_id": number, "test_list": tests})
    return build_task(MbppSpec(name="mbpp", source=str(folder), min_isolation=best_level()))


def instructions(folder: Path) -> Task:
    truth = {
        "instruction_id": ["punctuation:no_comma", "detectable_format:number_bullet_lists"],
        "kwargs": [None, {"num_bullets": 2}],
    }
    rows = [
        {
            "messages": [{"role": "user", "content": f"Write about the sea without a comma, {n} words."}],
            "ground_truth": repr([truth]),
        }
        for n in range(2)
    ]
    source = write(folder / "rows.jsonl", *rows)
    return build_task(IfMultiSpec(name="if-multi", source=source, all_or_nothing=True))


def reasoning_gym(folder: Path) -> Task:
    pytest.importorskip("reasoning_gym")
    spec = {"name": "reasoning-gym", "dataset": "chain_sum", "num_train": 2, "num_held_out": 2}
    return build_task(ReasoningGymSpec.model_validate(spec))


MAKERS: dict[str, Callable[[Path], Task]] = {
    "arithmetic": lambda folder: build_task(ArithmeticSpec()),
    "reverse-text": lambda folder: build_task(ReverseTextSpec(name="reverse-text")),
    "gsm8k": gsm8k,
    "math": mathematics,
    "mbpp": mbpp,
    "if-multi": instructions,
    "reasoning-gym": reasoning_gym,
}
PIECES = ["x", "1, ", "( ", "\\boxed{", "#### ", "<answer>", "```python\n", "* a\n", "\u00e9\u4e2d", "\n"]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_completion_of_a_megabyte_is_a_wrong_answer_in_bounded_time(name: str, tmp_path: Path) -> None:
    """Every task judges it within 10 s of processor time for all pieces, and pays next to nothing."""
    task = MAKERS[name](tmp_path)
    example = task.examples(Split.HELD_OUT)[0]
    for piece in PIECES:
        started_at = time.process_time()
        outcome = task.verify(example, piece * (MEGABYTE // len(piece)))
        assert time.process_time() - started_at < 10.0, piece
        assert outcome.is_correct is False, piece
        assert outcome.reward is not None
        assert outcome.reward <= 0.1, piece


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize(
    "text", ["", " \n", "\0", "\ud800", "\\boxed{", "####", "```python", "<answer>", "1/0"]
)
def test_a_reply_that_nothing_can_be_read_from_is_wrong_and_scored(
    name: str, text: str, tmp_path: Path
) -> None:
    """Unparsable is the model's doing: a score of 0, never an exception and never unscored.

    A graded task, which compares letters, may see some likeness; here at most 3 of 14.
    """
    task = MAKERS[name](tmp_path)
    outcome = task.verify(task.examples(Split.HELD_OUT)[0], text)
    assert (outcome.is_correct, outcome.failure) == (False, None)
    assert outcome.reward is not None
    assert outcome.reward <= (0.02 if name == "reverse-text" else 0.0)


ATTACKS = {
    "forks": "import os\ndef double(x):\n  while True: os.fork()",
    "fills the disk": "def double(x):\n  with open('a', 'wb') as a:\n    while 1: a.write(b'x' * 10**6)",
    "prints forever": "def double(x):\n  while True: print('x' * 10**5)",
    "kills its parent": (
        "import os, signal\ndef double(x):\n  os.kill(os.getppid(), signal.SIGKILL)\n  return 2 * x"
    ),
    "kills everybody": "import os, signal\ndef double(x):\n  os.kill(-1, signal.SIGKILL)\n  return 2 * x",
    "imports network": (
        "import socket\ndef double(x):\n"
        "  socket.create_connection(('192.0.2.1', 80), timeout=1)\n  return 2 * x"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_code_that_attacks_its_judge_is_a_wrong_answer(attack: str, tmp_path: Path) -> None:
    """It costs its own rollout alone: the next reply is judged as ever, and nothing is left behind."""
    task = mbpp(tmp_path)
    example = task.examples(Split.HELD_OUT)[0]
    outcome = task.verify(example, f"```python\n{ATTACKS[attack]}\n```")
    assert (outcome.reward, outcome.is_correct, outcome.failure) == (0.0, False, None)
    assert outcome.isolation == best_level()
    honest = task.verify(example, "```python\ndef double(x): return x + x\n```")
    assert (honest.reward, honest.is_correct) == (1.0, True)
