"""What judged code is worth: the outcome that all tasks of Python programs share."""

from __future__ import annotations

from strop.rollout import Outcome
from strop.tasks.code.python_judge import JudgeVerdict

WALL_S = 5.0
"""Time of all tests of one reply together."""
SPARE_VERIFY_S = 20.0
"""What a judgement may take beside its tests: the sandbox's start, its end, and the judge's own limit."""


def no_code_outcome(code: str | None) -> Outcome:
    """Return the outcome of a reply without code, or with code that cannot be asked for an answer."""
    return Outcome(parts={"correct": 0.0}, is_correct=False, format_ok=False, extracted=code)


def judged_outcome(code: str, verdict: JudgeVerdict) -> Outcome:
    """Return the outcome of code that was run: right if every test passed."""
    return Outcome(
        parts={"correct": float(verdict.is_right)},
        is_correct=verdict.is_right,
        format_ok=True,
        extracted=code,
        timed_out=verdict.timed_out,
        isolation=verdict.isolation,
        metrics={
            "tests_passed": verdict.num_passed,
            "tests_failed": verdict.num_failed,
            "tests_errored": verdict.num_errored,
            "tests_timed_out": verdict.num_timed_out,
            "tests_total": verdict.num_tests,
            "tests_passed_frac": verdict.num_passed / max(1, verdict.num_tests),
        },
    )


def fence(code: str) -> str:
    """Return code as the reply that a task asks for."""
    return f"```python\n{code.strip(chr(10))}\n```"
