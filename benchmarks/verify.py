r"""How fast answers are judged, and what a hung one costs the others.

Measured are gsm8k and math as training judges them, with two workers: answers that are decided by spelling
or number, and answers that sympy decides. Every reply is a solution of some hundred characters, and no two
are the same. A rate is the best of the repeats, because a machine can be disturbed and not sped up. Then one
answer on which sympy hangs is judged together with others, and the time until these are judged is
compared with the same without it, in turns; the figure is the median of the differences. What the workers'
transport can do is measured with answers that would not need them. All libraries are loaded before the
clock starts.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from benchmarks.figures import Figure, Measured
from strop.rollout import Example
from strop.spec.task import TaskSpec
from strop.tasks import Task, build_warm_task
from strop.tasks.judging import InlineJudge, Judge, QuickJudge, WorkerJudge
from strop.tasks.mathematics.boxed_math import MathSpec
from strop.tasks.mathematics.gsm8k import Gsm8kSpec

Call = tuple[Example, str]

GSM8K = Gsm8kSpec(name="gsm8k", source="unused.jsonl")
MATH = MathSpec(name="math", source="unused.jsonl")
WORK = "First we look at what is given. There are $12$ of one kind and $30$ of the other, so " * 6
NUM_WORKERS = 2
LIMIT_S = 2.0
GROUP_SIZE = 8
HUNG = (Example(task="math", example_id="hung", fields={}, answer="y=x+1"), r"\boxed{(a+b+c+d+e)^{60}=1}")
MIN_NUMBERS_PER_S = 2000.0
MIN_SYMBOLS_PER_S = 200.0
MAX_HUNG_COST_S = 0.1
# Gold answer and another spelling of it that only sympy finds equal, and one that is not.
FORMULAS = (
    ("x+1", "1+x", "x+2"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", r"\frac{1}{\sqrt{3}}"),
    (r"\frac{3\pi}{2}", r"1.5\pi", r"\pi"),
    ("2x+3", "3+2x", "3-2x"),
    ("x^2-1", "(x-1)(x+1)", "x^2+1"),
    (r"3\sqrt{5}", r"\sqrt{45}", r"\sqrt{44}"),
)


def number_calls(task: str, count: int) -> list[Call]:
    """Return replies that end in a number in one of several spellings, half of them right."""
    calls: list[Call] = []
    for index in range(count):
        gold = str(index)
        answer = gold if index % 2 else str(index + 1)
        marked = f"#### {answer}" if task == "gsm8k" else f"$\\boxed{{{answer}.0}}$."
        fields = {"solution": f"#### {gold}", "problem": "?", "question": "?"}
        calls.append((Example(task=task, example_id=str(index), fields=fields, answer=gold), WORK + marked))
    return calls


def symbol_calls(count: int) -> list[Call]:
    """Return replies that end in a formula that sympy must look at, half of them right."""
    calls: list[Call] = []
    for index in range(count):
        gold, equal, other = FORMULAS[index // GROUP_SIZE % len(FORMULAS)]
        # The replies of a group share a gold answer; each reply is another text, so that no cache knows it.
        group = index // GROUP_SIZE
        answer = f"{equal if index % 2 else other}+{group + index}-{index}"
        example = Example(task="math", example_id=str(index), fields={}, answer=f"{gold}+{group}")
        calls.append((example, f"{WORK}$\\boxed{{{answer}}}$."))
    return calls


@asynccontextmanager
async def open_workers(spec: TaskSpec) -> AsyncIterator[WorkerJudge]:
    """Hold warm workers."""
    workers = WorkerJudge(partial(build_warm_task, spec), limit_s=LIMIT_S, num_workers=NUM_WORKERS)
    try:
        await measure_seconds(workers, number_calls("math", NUM_WORKERS * 10))
        yield workers
    finally:
        await workers.close()


async def measure_seconds(judge: Judge, calls: Sequence[Call]) -> float:
    """Return the seconds until all calls are judged."""
    started_at = time.perf_counter()
    outcomes = await asyncio.gather(*(judge.judge(*call) for call in calls))
    seconds = time.perf_counter() - started_at
    num_right = sum(outcome.is_correct is True for outcome in outcomes)
    if num_right != len(calls) // 2:
        raise RuntimeError(f"{num_right} of {len(calls)} answers were found right; half of them are")
    return seconds


async def measure_rates(judge: Judge, calls: Sequence[Call], repeats: int) -> tuple[float, ...]:
    """Return judged answers per second, of as many equal parts of the calls as there are repeats."""
    size = len(calls) // repeats // 2 * 2
    parts = [calls[start : start + size] for start in range(0, size * repeats, size)]
    return tuple([len(part) / await measure_seconds(judge, part) for part in parts])


def measure_cpu(name: str, task: Task, calls: Sequence[Call], at_least: float) -> Figure:
    """Return how many answers one second of CPU time judges in this process."""
    started_cpu_s = time.process_time()
    for call in calls:
        task.verify(*call)
    rate = len(calls) / (time.process_time() - started_cpu_s)
    return Figure(name=name, unit="answers/CPU s", value=rate, measured=(rate,), at_least=at_least)


async def measure_hung(name: str, judge: Judge, calls: Sequence[Call], repeats: int) -> Figure:
    """Return what a hung answer that came first costs the others, in seconds."""
    costs = []
    for _ in range(repeats):
        alone = await measure_seconds(judge, calls)
        hung = asyncio.ensure_future(judge.judge(*HUNG))
        await asyncio.sleep(0)
        costs.append(await measure_seconds(judge, calls) - alone)
        outcome = await hung
        if outcome.failure is None or outcome.failure.kind != "verifier_timeout":
            raise RuntimeError(f"the hung answer was judged: {outcome}")
    return Figure(
        name=name, unit="s", value=statistics.median(costs), measured=tuple(costs), at_most=MAX_HUNG_COST_S
    )


async def measure_all(count: int, repeats: int, *, is_quick: bool) -> list[Figure]:
    """Measure every figure; a try waits for one hung answer only."""
    gsm8k, math = build_warm_task(GSM8K), build_warm_task(MATH)
    numbers, symbols = number_calls("math", count), symbol_calls(max(count // 10, 10 * repeats) // 2 * 2)

    def rate(name: str, rates: tuple[float, ...], at_least: float | None = None) -> Figure:
        return Figure(name=name, unit="answers/s", value=max(rates), measured=rates, at_least=at_least)

    calls = number_calls("gsm8k", count)
    figures = [
        rate("gsm8k", await measure_rates(InlineJudge(gsm8k), calls, repeats), MIN_NUMBERS_PER_S),
        # Two cores have two seconds of CPU time a second.
        measure_cpu("gsm8k, one core", gsm8k, calls, MIN_NUMBERS_PER_S / 2),
        measure_cpu("math, numbers, one core", math, numbers, MIN_NUMBERS_PER_S / 2),
        measure_cpu("math, symbols, one core", math, symbols, MIN_SYMBOLS_PER_S / 2),
    ]
    async with open_workers(MATH) as workers:
        judge = QuickJudge(math, workers)
        await judge.judge(*numbers[0])  # Which is sent to the workers in any case.
        for name, calls, goal in (
            ("math, numbers", numbers, MIN_NUMBERS_PER_S),
            ("math, symbols", symbols, MIN_SYMBOLS_PER_S),
        ):
            figures.append(rate(name, await measure_rates(judge, calls, repeats), goal))
        figures.append(
            rate("math, numbers, all through workers", await measure_rates(workers, numbers, repeats))
        )
        beside = {"numbers": numbers[:200], "symbols": symbol_calls(200)}
        for kind, calls in list(beside.items())[: 1 if is_quick else None]:
            figures.append(await measure_hung(f"a hung answer beside 200 {kind}", judge, calls, repeats))
    return figures


def measure_verify(*, is_quick: bool) -> Measured:
    """Measure every figure, in a second or so where it need not mean anything."""
    count, repeats = (200, 1) if is_quick else (4000, 5)
    figures = asyncio.run(measure_all(count, repeats, is_quick=is_quick))
    return Measured(figures=figures, details={"num_workers": NUM_WORKERS, "count": count})
