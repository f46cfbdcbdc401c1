"""What tasks ask and their versions, to the letter: whoever changes one of them does so on purpose."""

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
    SftJsonlSpec,
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


def code_rows() -> dict[str, dict[str, Rows]]:
    return {
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
    }


def text_rows() -> dict[str, dict[str, Rows]]:
    return {
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
        "sft-jsonl": {
            "train": [{"prompt": f"{n}?", "completion": f"It is {n}.", "gold": str(n)} for n in range(2)]
            + [{"prompt": "9?", "completion": "9"}],
            "test": [{"prompt": "7?", "completion": "7", "gold": "7"}],
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


ROWS = code_rows() | text_rows()


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
    "sft-jsonl": lambda source: SftJsonlSpec(name="sft-jsonl", source=source),
    "rlvr-mixed": lambda source: RlvrMixedSpec(name="rlvr-mixed", source=source, strictness="strict"),
}
KNOWN: dict[str, list[str]] = json.loads(Path(__file__).with_name("known_versions.json").read_text("utf-8"))
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
    assert [task.version, prompts_digest(task), describe_counts(task)] == KNOWN[case]
