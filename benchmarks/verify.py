r"""How fast answers are judged, and what a hung one costs the others: `python -m benchmarks.verify`.

Measured are gsm8k and math, in this process and through two workers: answers that are decided by spelling
or number, and answers that sympy decides. Every reply is a solution of some hundred characters. Then one
answer on which sympy hangs is judged together with others, and the time that these wait is compared with
the same without it. The library is loaded before the clock starts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial

from strop.rollout import Example
from strop.spec import Gsm8kSpec, MathSpec
from strop.spec.task import TaskSpec
from strop.tasks import build_warm_task
from strop.tasks.judging import InlineJudge, Judge, WorkerJudge

Call = tuple[Example, str]

GSM8K = Gsm8kSpec(name="gsm8k", source="unused.jsonl")
MATH = MathSpec(name="math", source="unused.jsonl")
WORK = "First we look at what is given. There are $12$ of one kind and $30$ of the other, so " * 6
NUM_WORKERS = 2
LIMIT_S = 2.0
GROUP_SIZE = 8
HUNG = r"\boxed{(a+b+c+d+e)^{60}}"
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
        gold = str(index % 97)
        answer = gold if index % 2 else str(index % 97 + 1)
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


async def measure_rate(judge: Judge, calls: Sequence[Call]) -> float:
    """Return judged answers per second; a first share of them warms up."""
    await asyncio.gather(*(judge.judge(*call) for call in calls[: len(calls) // 10]))
    started_at = time.perf_counter()
    outcomes = await asyncio.gather(*(judge.judge(*call) for call in calls))
    seconds = time.perf_counter() - started_at
    num_right = sum(outcome.is_correct is True for outcome in outcomes)
    if not num_right == len(calls) // 2:
        raise RuntimeError(f"{num_right} of {len(calls)} answers were found right; half of them are")
    return len(calls) / seconds


async def measure_seconds(judge: Judge, calls: Sequence[Call], *, with_hung: bool) -> float:
    """Return the seconds until all calls are judged, maybe with a hung one that came first."""
    hung = None
    if with_hung:
        example = Example(task="math", example_id="hung", fields={}, answer="x+1")
        hung = asyncio.ensure_future(judge.judge(example, HUNG))
        await asyncio.sleep(0)
    started_at = time.perf_counter()
    await asyncio.gather(*(judge.judge(*call) for call in calls))
    seconds = time.perf_counter() - started_at
    if hung is not None:
        outcome = await hung
        if outcome.failure is None or outcome.failure.kind != "verifier_timeout":
            raise RuntimeError(f"the hung answer was judged: {outcome}")
    return seconds


async def measure_case(name: str, spec: TaskSpec, calls: Sequence[Call]) -> None:
    """Print the rate of one case in this process and through workers."""
    judge = InlineJudge(build_warm_task(spec))
    started_cpu = time.process_time()
    inline = await measure_rate(judge, calls)
    # All calls and the tenth that warms up. What one idle core would do.
    per_core = 1.1 * len(calls) / (time.process_time() - started_cpu)
    workers = WorkerJudge(partial(build_warm_task, spec), limit_s=LIMIT_S, num_workers=NUM_WORKERS)
    try:
        await workers.judge(*calls[0])
        pooled = await measure_rate(workers, calls)
    finally:
        await workers.close()
    print(
        f"{name:16} in this process {inline:7.0f}/s ({per_core:.0f} per second of CPU time)"
        f"   through {NUM_WORKERS} workers {pooled:7.0f}/s"
    )


async def measure_hung(calls: Sequence[Call], *, repeats: int) -> None:
    """Print what one hung answer costs the others."""
    workers = WorkerJudge(partial(build_warm_task, MATH), limit_s=LIMIT_S, num_workers=NUM_WORKERS)
    try:
        await measure_rate(workers, calls)
        for _ in range(repeats):
            alone = await measure_seconds(workers, calls, with_hung=False)
            beside = await measure_seconds(workers, calls, with_hung=True)
            print(
                f"{len(calls)} answers: {alone * 1000:.0f} ms alone, {beside * 1000:.0f} ms beside a hung"
                f" one; it costs {(beside - alone) * 1000:+.0f} ms"
            )
    finally:
        await workers.close()


async def measure_all(count: int, repeats: int) -> None:
    """Run every case."""
    await measure_case("gsm8k", GSM8K, number_calls("gsm8k", count))
    await measure_case("math, numbers", MATH, number_calls("math", count))
    await measure_case("math, symbols", MATH, symbol_calls(max(count // 10, 20)))
    await measure_hung(number_calls("math", min(count, 200)), repeats=repeats)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--count", type=int, default=4000, help="answers per case, an even number")
    parser.add_argument("--repeats", type=int, default=3, help="measurements with a hung answer")
    parsed = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    asyncio.run(measure_all(parsed.count, parsed.repeats))


if __name__ == "__main__":
    main()
