"""Rows in the published schema of every task that the harness is asked for, of these tests' own making.

Texts hold what prompts are spoiled by: quotes, braces, LaTeX, line breaks, blanks at the end, code, the
tasks' own markers, and characters outside of ASCII.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
SUBJECTS = (
    *("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory"),
    *("Prealgebra", "Precalculus"),
)
HARD_TEXTS = (
    "",
    "She said \"no\" and 'yes', then `maybe`.",
    "{question} {{ question }} {% raw %} {0} {} {# no #} ${x} %s %(a)d 100%",
    r"$\frac{1}{2}\cdot\left\{a,b\right\}$, \(x\), \[y\], \\ and \n",
    "Cost: $1,000.50 & <b>bold</b> &amp; 5 < 6 > 4.",
    "naïve café, 東京, Ж, 🙂, e\u0301, \u200b, \u00a0, \ufeff, and '\u2019'",
    "one line\nanother\n\nand a third",
    "carriage\r\nreturns\rand\ttabs",
    "blanks at the end   ",
    "a line break at the end\n",
    "def f(x: dict) -> str:\n    return f\"{x['a']!r}\\n\"  # code",
    "Q: A: Question: Answer: Problem: Solution: [BEGIN] [DONE] ``` </s> <|im_end|>",
    "The answer is 13.\n#### 13\n\\boxed{13}",
    "separators \u2028 and \u2029 and \u0085 and \x0b and \x0c end",
    '\\u0041 \\x41 \\" \\\\ ~ ^ _ * # | ;',
    "  blanks  in  front  and\t\tbetween",
)
"""16 of them, and 13 and 19 answers below: in 210 rows most meet each other."""
GSM8K_ANSWERS = ("72", "1,234", "-5", "0", "7", "2.5", "12,345,678", "100", "3", "18", "-1,000", "0.75", "9")
MATH_ANSWERS = (
    *(r"\frac{1}{2}", "-5", r"2\sqrt{3}", "10", "(1,2)", "x^2-1", r"50\%", r"\pi", "0.25", "1,000"),
    *(
        r"\left[0,1\right)",
        "-\\frac{2}{3}",
        "3\\frac{1}{2}",
        r"\text{east}",
        "12_5",
        "1,2",
        "0",
        "7",
        "2^{10}",
    ),
)


def hard_text(number: int) -> str:
    """Return one of the hard texts."""
    return HARD_TEXTS[number % len(HARD_TEXTS)]


def gsm8k_row(number: int) -> Row:
    gold = GSM8K_ANSWERS[number % len(GSM8K_ANSWERS)]
    question = f"Ann has {number} hats and buys more, at $1,000 each. How many? {hard_text(number)}"
    return {"question": question, "answer": f"{hard_text(number + 1)}It is {number}.\n#### {gold}"}


def math_row(subject: str, number: int, answer: str) -> Row:
    return {
        "problem": f"Let $x = {number}$. What is the answer, as in {subject}? {hard_text(number)}",
        "level": "Level 3",
        "type": subject,
        "solution": f"We look at ${number}$, and find $\\boxed{{{answer}}}$.",
    }


def mbpp_row(task_id: int, name: str, factor: int) -> Row:
    text = hard_text(task_id)
    return {
        "task_id": task_id,
        "text": f"Write a function to multiply by {factor}. {text}",
        "code": f"def {name}(x):\n    return {factor} * x",
        "test_list": [f"assert {name}({n}) == {factor * n}, {text!r}" for n in (0, 1, -3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def humaneval_row(number: int, name: str, summand: int) -> Row:
    # A docstring takes neither its own quotes nor a backslash at its end.
    text = hard_text(number).replace("\\", "/").replace('"""', "''").replace("\r", " ").replace("\x0c", " ")
    doc = f'    """Add {summand}. {text} .\n    >>> {name}(1)\n    {1 + summand}\n    """\n'
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
        "prompt": f"Write about the sea, please. Number {key}: {', '.join(calls)}. {hard_text(key)}",
        "instruction_id_list": list(calls),
        "kwargs": list(calls.values()),
    }


def aime_row(number: int) -> Row:
    return {"Problem": f"What is {number} + 0? {hard_text(number)}", "Answer": number}


def write_data(
    folder: Path, *, num_rows: int = 8, calls: Sequence[Mapping[str, Row]] = ({"punctuation:no_comma": {}},)
) -> dict[str, Path]:
    """Write the data set of each of our tasks; return their folders or files by task.

    `num_rows`: held-out rows of a task; of math as many as make whole rounds over the subjects, of ifeval
    one for each of `calls`.
    """
    per_subject = -(-num_rows // len(SUBJECTS))
    splits: dict[str, dict[str, Sequence[Row]]] = {
        "gsm8k": {
            "train": [gsm8k_row(number) for number in range(1, 25)],
            "test": [gsm8k_row(100 + number) for number in range(num_rows)],
        },
        "math": {
            "train": [math_row(subject, 9 + n, f"{n}") for subject in SUBJECTS for n in range(16)],
            "test": [
                math_row(subject, 1000 * first + 100 + n, MATH_ANSWERS[(first + n) % len(MATH_ANSWERS)])
                for first, subject in enumerate(SUBJECTS)
                for n in range(per_subject)
            ],
        },
        "mbpp": {
            "train": [mbpp_row(601, "double", 2)],
            "test": [mbpp_row(11 + n, f"times{n}", n) for n in range(3, 3 + num_rows)],
        },
        "aime": {"test": [aime_row(n * 499 % 1000) for n in range(num_rows)]},
        "humaneval": {"test": [humaneval_row(n, f"add{n}", n) for n in range(2, 2 + num_rows)]},
        "ifeval": {"test": [ifeval_row(1000 + n, table) for n, table in enumerate(calls)]},
    }
    found = {}
    for task, parts in splits.items():
        place = folder / task
        place.mkdir(parents=True)
        for split, rows in parts.items():
            path = place / f"{split}.jsonl"
            # As they are: line separators of Unicode must not end a row.
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            path.write_text(text, encoding="utf-8", newline="\n")
            found[task] = path if len(parts) == 1 else place
    return found
