"""What a task asks and its version, to the letter: whoever changes one of them does so on purpose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Split
from strop.spec import (
    AimeSpec,
    AppsSpec,
    ArithmeticSpec,
    BlendSpec,
    Gsm8kSpec,
    HumanEvalSpec,
    IfEvalSpec,
    IfMultiSpec,
    MathSpec,
    MbppSpec,
    RlvrMixedSpec,
)
from strop.spec.task import MixtureSpec, TaskSpec
from strop.tasks import Task, build_task
from strop.tasks.traits import describe_counts

Rows = list[dict[str, Any]]


def mbpp_row(number: int) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": f"Add {number}.",
        "code": f"def f(x):\n    return x + {number}",
        "test_list": [f"assert f({n}) == {n + number}" for n in range(3)],
        "test_setup_code": "import math",
        "challenge_test_list": [f"assert f(9) == {9 + number}"],
    }


def apps_row(question: str, tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    columns = {"question": question, "solutions": '["pass"]', "input_output": json.dumps(tests)}
    return {**columns, "difficulty": "interview", "starter_code": "", **more}


PAIRS = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}
CALLS = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]}
WORDS = [{"role": "user", "content": "Write 'so'."}]
MATH = {"level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{3}$."}
IFEVAL = {
    "key": 1,
    "prompt": "Write without commas.",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
}
ROWS: dict[str, dict[str, Rows]] = {
    "mbpp": {
        "prompt": [mbpp_row(n) for n in (1, 2, 3, 4)],
        "train": [mbpp_row(n) for n in (601, 602, 603)],
        "test": [mbpp_row(n) for n in (11, 12)],
    },
    "apps": {
        "train": [
            apps_row("Copy a line.", PAIRS),
            apps_row("Copy it.", CALLS, starter_code="def f(x):"),
            apps_row("Copy one.", {"inputs": [""], "outputs": [""]}, difficulty="introductory"),
        ],
        "test": [apps_row("Copy two lines.", PAIRS)],
    },
    "humaneval": {
        "test": [
            {
                "prompt": f"def f(x):\n    'Add {n}.'\n",
                "canonical_solution": f"    return x + {n}\n",
                "test": f"def check(g):\n    assert g(1) == {1 + n}",
                "entry_point": "f",
            }
            for n in (1, 2)
        ],
    },
    "gsm8k": {
        "train": [{"question": f"{n} and {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(1, 4)],
        "test": [{"question": "9 and 9?", "answer": "Twice.\n#### 18"}],
    },
    "math": {"train": [{"problem": "Find 1.", **MATH}], "test": [{"problem": "Find 3.", **MATH}]},
    "aime": {"test": [{"ID": "a", "Problem": "Find 7.", "Solution": "7", "Answer": 7}]},
    "ifeval": {"test": [IFEVAL]},
    "if-multi": {
        "train": [
            {
                "messages": WORDS,
                "ground_truth": "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
            },
            {
                "messages": [{"role": "user", "content": "Write 'no'."}],
                "ground_truth": "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
            },
        ],
    },
    "rlvr-mixed": {
        "train": [
            {
                "dataset": "gsm8k",
                "messages": [{"role": "user", "content": f"So the answer is 1. {n}?"}],
                "ground_truth": str(n),
                "constraint_type": "",
                "constraint": "",
            }
            for n in range(4)
        ],
    },
}


def gsm8k(source: str, **more: Any) -> Gsm8kSpec:
    return Gsm8kSpec(name="gsm8k", source=source, **more)


def mbpp(source: str, **more: Any) -> MbppSpec:
    return MbppSpec(name="mbpp", source=source, **more)


SUMS: dict[str, Any] = {"name": "arithmetic", "min_value": 1, "max_value": 4, "num_held_out": 4}
PARTS = {"sums": SUMS, "more": {**SUMS, "min_value": 5, "max_value": 8}}
CASES: dict[str, Callable[[str], TaskSpec]] = {
    "arithmetic": lambda _: ArithmeticSpec(),
    "mixture": lambda _: MixtureSpec(name="mixture", parts=PARTS),
    "blend": lambda _: BlendSpec(name="blend", parts={"sums": SUMS}, format_weight=0.1),
    "mbpp": mbpp,
    "mbpp 2 shots": lambda source: mbpp(source, num_few_shot=2, num_train=2),
    "mbpp lm-eval": lambda source: mbpp(source, rules="lm-eval", num_held_out=1),
    "mbpp thinking": lambda source: mbpp(source, thinking="on", max_reply_tokens=99),
    "apps": lambda source: AppsSpec(name="apps", source=source),
    "apps introductory": lambda source: AppsSpec(name="apps", source=source, num_train=1, num_held_out=1),
    "humaneval": lambda source: HumanEvalSpec(name="humaneval", source=source),
    "humaneval 1": lambda source: HumanEvalSpec(name="humaneval", source=source, num_held_out=1),
    "gsm8k": gsm8k,
    "gsm8k hash": lambda source: gsm8k(source, mode="hash"),
    "gsm8k 2 shots": lambda source: gsm8k(source, mode="flex", num_few_shot=2),
    "math": lambda source: MathSpec(name="math", source=source, strictness="strict"),
    "aime": lambda source: AimeSpec(name="aime", source=source),
    "ifeval": lambda source: IfEvalSpec(name="ifeval", source=source),
    "if-multi": lambda source: IfMultiSpec(name="if-multi", source=source),
    "rlvr-mixed": lambda source: RlvrMixedSpec(name="rlvr-mixed", source=source, strictness="strict"),
}
KNOWN: dict[str, tuple[str, str, str]] = {
    "arithmetic": ("3ba1aed2c397e835", "d0807997976d683b", ""),
    "mixture": ("57f17989b0fc87db", "6d5d2c5497647bfd", ""),
    "blend": ("326b420033859876", "29b4ebbbeb1ce433", ""),
    "mbpp": ("1d0dfe95aba855bf", "169c99527478834f", ""),
    "mbpp 2 shots": ("c7fb37acc7958fb1", "7087e7257ef3ac2a", ""),
    "mbpp lm-eval": ("a8d8e3d04780b314", "cfcdd9e7d6dc136b", ""),
    "mbpp thinking": ("15ed522096f31976", "169c99527478834f", ""),
    "apps": (
        "3224a5a7da7c2f70",
        "ad836e032cd79cb4",
        "programs: 2, functions: 1, items left out, fewer than 2 tests: 1",
    ),
    "apps introductory": (
        "f3c1336d5c82a762",
        "1bafcbbe760fa0a3",
        "programs: 2, items left out, fewer than 2 tests: 1",
    ),
    "humaneval": ("34048315562d2b00", "450613904fdc13fe", ""),
    "humaneval 1": ("54ecd046aae3e1b3", "2be63778740c487f", ""),
    "gsm8k": ("e055001c70fac418", "243186fec7920a7e", ""),
    "gsm8k hash": ("77ee694af03dd675", "4272c738aff3ca49", ""),
    "gsm8k 2 shots": ("2c781062009dbe83", "46d919c7477f67e1", ""),
    "math": ("3d9f490d3e44516f", "214496d1674ad99d", ""),
    "aime": ("e9e6224dae737f57", "fd624950ccd25df4", ""),
    "ifeval": ("c54b4517898cb999", "0a2a644171d56a3d", ""),
    "if-multi": ("ac59a36ae9575712", "d4434ccd15c77228", ""),
    "rlvr-mixed": ("37e76d2b21907f75", "9b0efd9fb1f01459", "gsm8k: 4"),
}
"""By case: the version, a hash over all prompts, and what was counted in the data."""


def prompts_digest(task: Task) -> str:
    """Hash what a model is asked, as a chat and in plain text, for all examples."""
    splits = [Split.HELD_OUT] if task.name == "aime" else list(Split)
    asked = [
        [split, message.role, message.content, getattr(message, "base", None)]
        for split in splits
        for example in task.examples(split)
        for message in task.render(example)
    ]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


@pytest.mark.parametrize("case", CASES)
def test_versions_and_prompts_are_as_they_were(tmp_path: Path, case: str) -> None:
    """If a change is meant, scores before and after it are not comparable: say so in CHANGELOG.md."""
    name = case.partition(" ")[0]
    for stem, rows in ROWS.get(name, {}).items():
        (tmp_path / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    task = build_task(CASES[case](str(tmp_path)))
    assert (task.version, prompts_digest(task), describe_counts(task)) == KNOWN[case]
