r"""Record how lm-eval judges math replies: `python -m tools.record_math_parity OUT.json`.

Needs lm-eval 0.4.13 with math-verify 0.9.0 and antlr4-python3-runtime 4.11, which its task minerva_math asks
for, so it runs in an environment of its own and imports nothing of strop. The replies are written
here: every gold answer in every form, right and nearly right. tests/tasks/test_math_parity.py
judges the recorded replies with strop and explains each difference.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# File of the harness's task, its filter, and strop's mode.
GSM8K_FILTERS = (
    ("gsm8k-cot", "strict-match", "strict"),
    ("gsm8k", "strict-match", "hash"),
    ("gsm8k", "flexible-extract", "flex"),
)

# Gold number, how data writes it, and a wrong one.
NUMBERS = (
    ("18", "18", "17"),
    ("5", "5", "-5"),
    ("-7", "-7", "7"),
    ("1234", "1,234", "1,235"),
    ("72", "72", "7"),
    ("2.5", "2.5", "25"),
    ("0", "0", "10"),
    ("1000000", "1,000,000", "100,000"),
)
NUMBER_FORMS = (
    "The answer is ANSWER.",
    "The answer is ANSWER",
    "So the total is ANSWER.\n#### ANSWER",
    "#### ANSWER",
    "#### $ANSWER",
    "####ANSWER",
    "#### ANSWER.00",
    "That makes ANSWER dollars.",
    "$ANSWER in all",
    "It is ANSWER ... done",
    "It is 20-ANSWER",
    "\\boxed{ANSWER}",
    "The answer is ANSWER. Q: I have 9 pens. How many? A: The answer is 9.",
    "The answer is ANSWER apples.\n\nQuestion: 3+3?\nAnswer: 6",
    "the answer is ANSWER.",
    "ANSWER",
    "",
    "I do not know.",
    "<think>The answer is 3.</think>The answer is ANSWER.",
)
# Gold answer, an equal one in another spelling, and a wrong one.
FORMULAS = (
    ("5", "5.0", "-5"),
    ("-5", "-5", "5"),
    (r"\frac{1}{2}", "0.5", r"\frac{1}{3}"),
    (r"-\frac{2}{3}", r"\frac{-2}{3}", r"\frac{2}{3}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", r"\sqrt{2}"),
    ("x^2-1", "(x-1)(x+1)", "x^2+1"),
    ("2x+3", "3+2x", "2x-3"),
    (r"3\pi", r"\pi \cdot 3", r"2\pi"),
    (r"(-\infty, 3]", r"(-\infty,3]", r"(-\infty, 3)"),
    ("(1,2)", "(1, 2)", "(2,1)"),
    ("1,2", "2,1", "1,3"),
    ("10,000", "10000", "1000"),
    (r"50\%", "50", "5"),
    (r"90^\circ", "90", "9"),
    (r"5\text{ cm}", "5", "6"),
    (r"\text{Evelyn}", "Evelyn", r"\text{Briana}"),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix}2\\1\end{pmatrix}",
    ),
    (r"3\frac{1}{2}", r"\frac{7}{2}", r"\frac{3}{2}"),
    ("12_5", "12_{5}", "12_7"),
    ("x=4", "4", "x=5"),
)
FORMULA_FORMS = (
    r"So we get $\boxed{ANSWER}$.",
    "Final Answer: The final answer is $ANSWER$. I hope it is correct.",
    r"First \boxed{99}, no: $\boxed{ANSWER}$.",
    "The answer is $ANSWER$.",
    "Therefore it is ANSWER",
    r"$\boxed{ANSWER}$" + "\n\nProblem:\nWhat is 1+1?\n\nSolution: $\\boxed{2}$",
)
INTEGERS = ("25", "025", "26", "-25", "250")
INTEGER_FORMS = (
    r"\boxed{ANSWER}",
    "$ANSWER$",
    "So it is ANSWER.",
    "ANSWER",
    r"$x=3$ so \boxed{ANSWER} and $4$",
)


def main(out_path: str) -> None:
    """Write all records."""
    import lm_eval

    tasks_dir = Path(lm_eval.__file__).parent / "tasks"
    records = [*record_gsm8k(tasks_dir), *record_minerva(tasks_dir), *record_aime(tasks_dir)]
    packages = ("lm_eval", "math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy")
    head = json.dumps({name: version(name) for name in packages})
    # One record a line, so that a new recording shows what changed.
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    text = f'{{"packages": {head},\n"records": [\n{lines}\n]}}\n'
    Path(out_path).write_text(text, encoding="utf-8")
    print(f"{len(records)} replies recorded in {out_path}")


def record_gsm8k(tasks_dir: Path) -> Iterator[Record]:
    """Judge with the filters and the metric of gsm8k and gsm8k_cot, as their files configure them."""
    import yaml

    files = {file for file, _, _ in GSM8K_FILTERS}
    configs = {
        file: yaml.safe_load((tasks_dir / "gsm8k" / f"{file}.yaml").read_text(encoding="utf-8"))
        for file in files
    }
    for number, spelled, wrong in NUMBERS:
        solution = f"We add and get {number}.\n#### {spelled}"
        # Their `doc_to_target`: all of the solution, or its end.
        targets = {"gsm8k": solution, "gsm8k-cot": solution.rpartition("####")[2].strip()}
        for reply in _replies(NUMBER_FORMS, (number, spelled, wrong)):
            verdicts = {
                mode: _judge_number(configs[file], name, reply, targets[file])
                for file, name, mode in GSM8K_FILTERS
            }
            yield _record("gsm8k", solution, number, reply, verdicts)


def _judge_number(config: Record, name: str, reply: str, target: str) -> bool:
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    settings = next(listed["filter"][0] for listed in config["filter_list"] if listed["name"] == name)
    metric = config["metric_list"][0]
    extract = RegexFilter(**{key: value for key, value in settings.items() if key != "function"})
    ((found,),) = extract.apply([[reply]], [{}])
    ignored = {key: metric[key] for key in ("regexes_to_ignore", "ignore_case", "ignore_punctuation")}
    return bool(exact_match_hf_evaluate([found], [target], **ignored)["exact_match"])


def record_minerva(tasks_dir: Path) -> Iterator[Record]:
    """Judge with both metrics of minerva_math."""
    task = _load(tasks_dir / "minerva_math" / "utils.py")
    for answers in FORMULAS:
        solution = f"Some work with $n = 8$ gives $\\boxed{{{answers[0]}}}$."
        gold = task.normalize_final_answer(task.remove_boxed(task.last_boxed_only_string(solution)))
        for reply in _replies(FORMULA_FORMS, answers):
            results = task.process_results({"solution": solution, "answer": gold}, [reply])
            verdicts = {metric: bool(value) for metric, value in results.items()}
            yield _record("minerva_math", solution, answers[0], reply, verdicts)


def record_aime(tasks_dir: Path) -> Iterator[Record]:
    """Judge with the metric of aime24 and aime25."""
    task = _load(tasks_dir / "aime" / "utils.py")
    for reply in _replies(INTEGER_FORMS, INTEGERS):
        results = task.process_results({"answer": "25"}, [reply])
        yield _record("aime", "", "25", reply, {"exact_match": bool(results["exact_match"])})


def _replies(forms: tuple[str, ...], answers: tuple[str, ...]) -> list[str]:
    """Return every answer in every form, each reply once."""
    replies = [form.replace("ANSWER", answer) for form in forms for answer in answers]
    return list(dict.fromkeys(replies))


def _record(task: str, solution: str, gold: str, reply: str, verdicts: dict[str, bool]) -> Record:
    return {"task": task, "solution": solution, "gold": gold, "reply": reply, "verdicts": verdicts}


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"harness_{path.parent.name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
