"""How fast programs are judged in fresh sandboxes.

Small programs are judged by one process a core, each judgement in a sandbox of its own; then one problem
with 1,440 tests. Processor time is that of all processes of a judgement, which other load on the machine
changes little; the rate and the wall time are what is left of an idle one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.figures import Figure, Measured
from benchmarks.machine import num_cores
from strop.sandbox.family import find_descendants
from strop.tasks.code.python_judge import JudgeJob, JudgeMode, judge_python

_SOURCE = (
    "import re\n\ndef count_words(text, least):\n    found = {}\n"
    "    for word in re.findall(r'[a-z]+', text.lower()):\n"
    "        found[word] = found.get(word, 0) + 1\n"
    "    return {word: n for word, n in found.items() if n >= least}\n"
)
_ISOLATION = "namespace"
_NUM_TESTS = 1440
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process has judged."""

    num_judged: int
    wall_s: float
    cpu_s: float
    """Of that process and of all that it started."""


def measure_code_judge(*, is_quick: bool) -> Measured:
    """Measure small programs for some seconds, and one problem with many tests."""
    shares = judge_on_all_cores(1.0 if is_quick else 20.0, _ISOLATION)
    rates = tuple(share.num_judged / share.wall_s for share in shares)
    cpu_ms = tuple(1e3 * share.cpu_s / share.num_judged for share in shares)
    many_s = time_many_tests(_ISOLATION)
    figures = [
        Figure(
            name="programs of MBPP's size",
            unit="judgements/s",
            value=sum(rates),
            measured=rates,
            at_least=25.0,
        ),
        Figure(name="CPU time of one", unit="ms", value=sum(cpu_ms) / len(cpu_ms), measured=cpu_ms),
        Figure(
            name=f"one problem with {_NUM_TESTS:,} tests",
            unit="s",
            value=many_s,
            measured=(many_s,),
            at_most=25.0,
        ),
    ]
    return Measured(figures=figures, details={"isolation": _ISOLATION, "num_processes": len(shares)})


def judge_on_all_cores(seconds: float, isolation: str) -> list[Share]:
    """Judge small programs with one process a core."""
    judge = partial(judge_for, isolation=isolation)
    with multiprocessing.get_context("spawn").Pool(num_cores()) as pool:
        pool.map(judge, [1.0] * num_cores(), chunksize=1)  # The first sandbox of a process looks at the host.
        return pool.map(judge, [seconds] * num_cores(), chunksize=1)


def judge_for(seconds: float, isolation: str) -> Share:
    """Judge right and wrong programs in turns for some seconds.

    Raises: RuntimeError if one is judged wrongly.
    """
    cpu_before, started_at = _cpu_s(), time.monotonic()
    num_judged = 0
    while time.monotonic() - started_at < seconds:
        is_right = num_judged % 2 == 0
        verdict = judge_python(_small_job(is_right=is_right), min_isolation=isolation)
        if verdict.is_right is not is_right:
            raise RuntimeError(f"a program that is {'right' if is_right else 'wrong'} was judged: {verdict}")
        num_judged += 1
    return Share(num_judged=num_judged, wall_s=time.monotonic() - started_at, cpu_s=_cpu_s() - cpu_before)


def _cpu_s() -> float:
    """Return the processor time of this process and of all that it started, the dead included."""
    while True:
        try:
            ticks = sum(_read_ticks(pid) for pid in find_descendants(os.getpid()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # One has ended meanwhile: its time is counted with its parent's by now.
        return time.process_time() + ticks / _TICKS_PER_S


def _read_ticks(pid: int) -> int:
    """Return user and system time of a process, and of the children that it has waited for."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))


def _small_job(*, is_right: bool) -> JudgeJob:
    return JudgeJob(
        source=_SOURCE if is_right else _SOURCE.replace(">= least", "> least"),
        mode=JudgeMode.STATEMENTS,
        names=("count_words",),
        tests=(
            "assert count_words('a b a', 2) == {'a': 2}",
            "assert count_words('', 1) == {}",
            "assert count_words('One one two', 1) == {'one': 2, 'two': 1}",
        ),
        num_tests=3,
    )


def time_many_tests(isolation: str) -> float:
    """Return the wall seconds of one problem with many tests.

    Raises: RuntimeError if its program is judged wrong.
    """
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
        raise RuntimeError(f"a right program was judged wrong: {verdict}")
    return time.monotonic() - started_at
