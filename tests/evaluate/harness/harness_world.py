"""Rows and replies of strop's own for every task that the harness is asked for, and runs over them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.evaluate.harness import GENERATING, LM_EVAL, PROTOCOLS, HarnessJob
from strop.evaluate.harness.result import HarnessOutput, read_output
from strop.evaluate.harness.staging import (
    harness_command,
    harness_variables,
    stage_rows,
    write_code_metric,
    write_task_files,
)
from strop.launch.inference import read_asking
from strop.rollout import Split
from strop.spec import TaskSpec
from strop.tasks import build_task
from tests.fixtures.sandboxed import best_level

Row = Mapping[str, Any]
SUBJECTS = (
    *("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory"),
    *("Prealgebra", "Precalculus"),
)


def gsm8k_row(number: int) -> Row:
    question = f"Ann has {number} hats and buys {number} more.\nHow many hats has she, at $1,000 each?"
    return {"question": question, "answer": f"{number} + {number} = {2 * number}\n#### {2 * number:,}"}


def math_row(subject: str, number: int, answer: str) -> Row:
    return {
        "problem": f"Let $x = {number}$. What is the answer, as in {subject}?",
        "level": "Level 3",
        "type": subject,
        "solution": f"We look at ${number}$, and find $\\boxed{{{answer}}}$.",
    }


def mbpp_row(task_id: int, name: str, factor: int) -> Row:
    return {
        "task_id": task_id,
        "text": f"Write a function to multiply by {factor}.",
        "code": f"def {name}(x):\n    return {factor} * x",
        "test_list": [f"assert {name}({n}) == {factor * n}" for n in (0, 1, -3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def humaneval_row(number: int, name: str, summand: int) -> Row:
    doc = f'    """Add {summand}.\n    >>> {name}(1)\n    {1 + summand}\n    """\n'
    checks = f"    assert candidate(1) == {1 + summand}\n    assert candidate(-5) == {summand - 5}\n"
    return {
        "task_id": f"Own/{number}",
        "prompt": f"\n\ndef {name}(x: int) -> int:\n{doc}",
        "canonical_solution": f"    return x + {summand}\n",
        "test": f"\ndef check(candidate):\n{checks}",
        "entry_point": name,
    }


def ifeval_row(key: int, calls: Mapping[str, Row]) -> Row:
    return {
        "key": key,
        "prompt": f"Write about the sea, please. Number {key}: {', '.join(calls)}.",
        "instruction_id_list": list(calls),
        "kwargs": list(calls.values()),
    }


MATH_ANSWERS = (r"\frac{1}{2}", "-5", r"2\sqrt{3}", "10", "(1,2)", "x^2-1", r"50\%")
IFEVAL_CALLS: Sequence[Mapping[str, Row]] = (
    {"punctuation:no_comma": {}},
    {"keywords:frequency": {"keyword": "sea", "frequency": 2, "relation": "at least"}},
    {"length_constraints:number_words": {"num_words": 5, "relation": "less than"}},
    {"startend:quotation": {}, "punctuation:no_comma": {}},
    {"change_case:english_lowercase": {}, "keywords:existence": {"keywords": ["salt", "tide"]}},
    {"detectable_format:title": {}},
)
FORMULA_FORMS = (
    "Final Answer: The final answer is ${}$. I hope it is correct.",
    r"So it is $\boxed{{{}}}$.",
    "I think that it is {}",
    "Final Answer: The final answer is $7$. I hope it is correct.",
    "",
)
NUMBER_FORMS = (
    "The answer is {}.",
    "The answer is {}",
    "So it is so.\n#### {}",
    "#### {}.00",
    "It is ${} ... done",
    "It is 10-{}",
    "The answer is 3.\n\nQ: And now? A: The answer is {}.",
    "",
)
IFEVAL_REPLIES = (
    "The sea is wide.",
    "sea, salt, tide",
    '"the sea has salt and a tide and is a sea"',
    "* First line\n<<The sea>>\nlast, line",
    "salt tide sea sea",
    "",
)


def write_data(folder: Path) -> dict[str, Path]:
    """Write the data set of each of our tasks; return their folders or files by task."""
    splits: dict[str, dict[str, Sequence[Row]]] = {
        "gsm8k": {
            "train": [gsm8k_row(number) for number in range(1, 9)],
            "test": [gsm8k_row(100 + number) for number in range(24)],
        },
        "math": {
            "train": [math_row(subject, 9 + n, f"{n}") for subject in SUBJECTS for n in range(5)],
            "test": [
                math_row(subject, 100 * first + second, answer)
                for first, subject in enumerate(SUBJECTS)
                for second, answer in enumerate(MATH_ANSWERS[: 2 if first else None])
            ],
        },
        "mbpp": {
            "train": [mbpp_row(601, "double", 2)],
            "test": [mbpp_row(11 + n, f"times{n}", n) for n in range(3, 11)],
        },
        "aime": {"test": [{"Problem": f"What is {n} + 0?", "Answer": n} for n in (25, 7, 999, 100, 0)]},
        "humaneval": {"test": [humaneval_row(n, f"add{n}", n) for n in range(2, 9)]},
        "ifeval": {"test": [ifeval_row(1000 + n, calls) for n, calls in enumerate([*IFEVAL_CALLS] * 6)]},
    }
    found = {}
    for task, parts in splits.items():
        place = folder / task
        place.mkdir(parents=True)
        for split, rows in parts.items():
            path = place / f"{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            found[task] = path if len(parts) == 1 else place
    return found


def make_spec(name: str, data: Mapping[str, Path], **settings: str) -> TaskSpec:
    """Return the section of the task behind one of the harness's, on our data."""
    protocol = PROTOCOLS[name]
    words = [f"task.source={data[protocol.own_task]}"]
    if protocol.runs_code:
        words.append(f"task.min_isolation={best_level()}")
    words += [f"task.{key}={value}" for key, value in settings.items()]
    spec = read_asking(protocol.own_task, words, Split.HELD_OUT).spec.task
    return spec.model_copy(update=dict(protocol.own_settings))


def make_job(name: str, data: Mapping[str, Path], model_path: Path, **changes: Any) -> HarnessJob:
    fields: dict[str, Any] = {
        "protocol": PROTOCOLS[name],
        "task": build_task(make_spec(name, data)),
        "model_path": model_path,
        "model_digest": "m",
        "step": 0,
        "dtype": "float32",
        "max_positions": 65536,
        "num_examples": None,
    }
    return HarnessJob(**(fields | changes))


def write_replies(job: HarnessJob) -> dict[str, str]:
    """Return a reply for each example, right and wrong in many forms, by example id."""
    replies = {}
    for number, example in enumerate(job.examples):
        gold = (example.answer or "").rstrip("\n")
        own_task = job.protocol.own_task
        if own_task == "ifeval":
            reply = IFEVAL_REPLIES[number // len(IFEVAL_CALLS)]
        elif own_task in ("mbpp", "humaneval"):
            reply = code_forms(gold)[number % len(code_forms(gold))]
        else:
            forms = NUMBER_FORMS if own_task == "gsm8k" else FORMULA_FORMS
            reply = forms[number % len(forms)].format(gold)
        replies[example.example_id] = reply
    return replies


def code_forms(gold: str) -> tuple[str, ...]:
    """Return replies around a right program, or a right body."""
    return (
        gold,
        f"{gold}\n[DONE]\nAnd more.",
        gold.replace("return", "return 1 +"),
        gold.replace("return", "while True: pass #"),
        gold.replace("return", "import sys; sys.exit(0); return"),
        "I do not know.",
        f"```python\n{gold}\n```",
    )


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What the harness made of recorded replies."""

    job: HarnessJob
    output: HarnessOutput
    samples: Sequence[Mapping[str, Any]]

    def verdicts(self, metric: str, filter_name: str = "none") -> dict[str, Any]:
        """Return the harness's verdict of each example."""
        return {row["doc"]["example_id"]: row[metric] for row in self.samples if row["filter"] == filter_name}

    @property
    def replies(self) -> dict[str, str]:
        """Return what was judged, as the harness stored it."""
        return {row["doc"]["example_id"]: row["resps"][0][0] for row in self.samples}

    @property
    def prompts(self) -> dict[str, str]:
        return {row["doc"]["example_id"]: row["arguments"]["gen_args_0"]["arg_0"] for row in self.samples}


def run_recorded(folder: Path, model_path: Path, python: Path) -> dict[tuple[str, int], RecordedRun]:
    """Run every protocol over our rows and replies, with its own number of shown examples and with none."""
    data = write_data(folder / "data")
    staged: dict[tuple[str, int], tuple[HarnessJob, Path, list[str]]] = {}
    runs = []
    for name, protocol in GENERATING.items():
        for num_fewshot in sorted({protocol.num_fewshot, 0}):
            job = make_job(name, data, model_path)
            job = replace(job, protocol=replace(protocol, num_fewshot=num_fewshot))
            work_dir = folder / f"{name}-{num_fewshot}"
            work_dir.mkdir()
            stage_rows(job, work_dir)
            names = write_task_files(job.protocol, work_dir, LM_EVAL.path)
            write_code_metric(work_dir)
            replies_path = work_dir / "replies.json"
            replies_path.write_text(json.dumps(write_replies(job)), encoding="utf-8")
            words = harness_command(job, work_dir, python)[3:]
            words[words.index("--model") + 1] = "recorded"
            words[words.index("--model_args") + 1] = json.dumps({"path": str(replies_path)})
            runs.append({"arguments": words, "cwd": str(work_dir)})
            staged[name, num_fewshot] = (job, work_dir, names)
    (folder / "runs.json").write_text(json.dumps(runs))
    script = Path(__file__).with_name("recorded_replies.py")
    command = [str(python), str(script), str(folder / "runs.json")]
    done = subprocess.run(
        command, env=harness_variables(folder), capture_output=True, text=True, check=False, errors="replace"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {key: _read(*parts) for key, parts in staged.items()}


def _read(job: HarnessJob, work_dir: Path, names: list[str]) -> RecordedRun:
    output = read_output(job, work_dir / "out", names, "d")
    return RecordedRun(
        job=job, output=output, samples=[json.loads(line) for line in output.samples.splitlines()]
    )
