"""How fast programs are judged in fresh sandboxes: `python -m benchmarks.code_judge [--seconds 20]`.

Two figures: MBPP-size judgements per second with one judging process a core, each judgement in a sandbox
of its own, and the wall time of one problem with 1,440 tests. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from functools import partial

from strop.tasks.code.python_judge import JudgeJob, JudgeMode, judge_python

_SMALL = JudgeJob(
    source=(
        "import re\n\ndef count_words(text, least):\n    found = {}\n"
        "    for word in re.findall(r'[a-z]+', text.lower()):\n"
        "        found[word] = found.get(word, 0) + 1\n"
        "    return {word: n for word, n in found.items() if n >= least}\n"
    ),
    mode=JudgeMode.STATEMENTS,
    names=("count_words",),
    tests=(
        "assert count_words('a b a', 2) == {'a': 2}",
        "assert count_words('', 1) == {}",
        "assert count_words('One one two', 1) == {'one': 2, 'two': 1}",
    ),
    num_tests=3,
)
_NUM_TESTS = 1440


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of the judge of Python programs.")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to judge small programs")
    parser.add_argument("--isolation", default="namespace", help="level of the sandboxes")
    options = parser.parse_args()
    num_processes = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes) as pool:
        judge = partial(_judge_for, isolation=options.isolation)
        pool.map(judge, [1.0] * num_processes)  # The first sandbox of a process looks at the host.
        parts = pool.map(judge, [options.seconds] * num_processes)
    rate = sum(num_judged / seconds for num_judged, seconds in parts)
    print(
        json.dumps(
            {
                "isolation": options.isolation,
                "num_processes": num_processes,
                "small_per_s": round(rate, 1),
                "1440_tests_s": round(_time_many_tests(options.isolation), 2),
                "load_average": os.getloadavg()[0],
            }
        )
    )


def _judge_for(seconds: float, isolation: str) -> tuple[int, float]:
    """Judge small programs for some seconds; return how many, and in how many."""
    started_at = time.monotonic()
    num_judged = 0
    while time.monotonic() - started_at < seconds:
        verdict = judge_python(_SMALL, min_isolation=isolation)
        if not verdict.is_right:
            raise SystemExit(f"a right program was judged wrong: {verdict}")
        num_judged += 1
    return num_judged, time.monotonic() - started_at


def _time_many_tests(isolation: str) -> float:
    numbers = range(_NUM_TESTS)
    data = {"inputs": [f"{n} {n}\n" for n in numbers], "outputs": [f"{2 * n}\n" for n in numbers]}
    job = JudgeJob(
        source="a, b = map(int, input().split())\nprint(a + b)",
        mode=JudgeMode.PROGRAMS,
        input_output=json.dumps(data),
        num_tests=_NUM_TESTS,
        wall_s=60.0,
        test_s=3.0,
    )
    started_at = time.monotonic()
    verdict = judge_python(job, min_isolation=isolation)
    if not verdict.is_right:
        raise SystemExit(f"a right program was judged wrong: {verdict}")
    return time.monotonic() - started_at


if __name__ == "__main__":
    main()
