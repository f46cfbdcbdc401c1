"""How quick verdicts are, and what a rollout costs beside its tokens.

Replies of gsm8k are judged in this process, programs of mbpp in sandboxes, as many at once as the machine has
processors. A rollout is one of `arithmetic` whose engine replies at once: all its processor time is strop's.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import Figure, Measured
from strop.environments import choose_environment, run_group
from strop.environments.rollout import RolloutPlan
from strop.rollout import Sampling, Split
from strop.spec.built_in import import_section
from strop.spec.task import TaskSection
from strop.tasks import Task, build_task, task_builder
from strop.tasks.judging import Judge
from strop.tokenizer import Tokenizer
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

_SOLUTION = "She has 3 + 4 = <<3+4=7>>7 apples, and eats two: 7 - 2 = 5 of them are left.\n"
_GROUP_SIZE = 8
_MBPP = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": [f"assert double({n}) == {2 * n}" for n in (1, 2, 3)],
    "test_setup_code": "",
    "challenge_test_list": [],
}


def measure_judging(*, is_quick: bool) -> Measured:
    """Measure both kinds of verdict, and rollouts. Needs bubblewrap or podman."""
    num_answers, num_programs, num_groups = (200, 8, 4) if is_quick else (50_000, 400, 200)
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"question": f"How many? {n}", "answer": f"{_SOLUTION}#### {n}"} for n in range(64)]
        answers = _judged_per_s(_section(folder / "gsm8k", "gsm8k", rows), num_answers, 1)
        programs = [{**_MBPP, "task_id": n, "text": f"{_MBPP['text']} {n}"} for n in range(64)]
        mbpp = _section(folder / "mbpp", "mbpp", programs)
        verdicts = _judged_per_s(mbpp, num_programs, 2 * (os.cpu_count() or 1))
        tokenizer = Tokenizer.load(tiny_tokenizer(folder / "tokenizer"))
        rollout_ms = _rollout_ms(tokenizer, num_groups)
    return Measured(
        figures=[
            Figure.once("gsm8k: answers", "a second", answers, at_least=20_000.0),
            Figure.once("mbpp: programs", "a second", verdicts, at_least=25.0),
            Figure.once("rollout: processor time", "ms", rollout_ms, at_most=5.0),
        ],
        details={"num_answers": num_answers, "num_programs": num_programs, "num_groups": num_groups},
    )


def _section(folder: Path, name: str, rows: list[dict[str, Any]]) -> TaskSection:
    folder.mkdir()
    for split, part in (("train", rows[1:]), ("test", rows[:1])):
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    return import_section(name).model_validate({"name": name, "source": str(folder)})


def _judged_per_s(section: TaskSection, num: int, num_at_once: int) -> float:
    """Return right replies judged a second; the first ones, which start processes, do not count."""
    task: Task = build_task(section)
    pairs = [(example, task.gold_replies(example)[0]) for example in task.examples(Split.TRAIN)]

    async def judge_all() -> float:
        judge, todo = Judge(task, task_builder(section)), iter(range(num))

        async def work() -> None:
            for index in todo:
                assert (await judge.judge(*pairs[index % len(pairs)])).is_correct

        try:
            await asyncio.gather(*(judge.judge(pairs[0][0], "") for _ in range(num_at_once)))
            begun = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(num_at_once)))
            return num / (time.perf_counter() - begun)
        finally:
            await judge.close()

    return asyncio.run(judge_all())


def _rollout_ms(tokenizer: Tokenizer, num_groups: int) -> float:
    """Return the processor time of a rollout in ms."""
    task = build_task(import_section("arithmetic").model_validate({"name": "arithmetic"}))
    engine, sampling = DummyEngine(tokenizer, lambda request: "The answer is 12."), Sampling()

    async def roll() -> float:
        begun = time.process_time()
        for example in task.examples(Split.TRAIN)[:num_groups]:
            given: dict[str, Any] = {"example": example, "step": 0, "run_seed": 0, "max_reply_tokens": 32}
            plans = [RolloutPlan(sample_index=n, sampling=sampling, **given) for n in range(_GROUP_SIZE)]
            await run_group(choose_environment(task), engine, tokenizer, plans)
        return 1e3 * (time.process_time() - begun) / (num_groups * _GROUP_SIZE)

    return asyncio.run(roll())
