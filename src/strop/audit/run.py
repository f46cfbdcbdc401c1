"""Runs the probes on a task, one after the other, each within its time limit."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from strop.audit import answer_probes, probes
from strop.audit.context import AuditContext
from strop.audit.report import AuditReport, ProbeResult, ProbeStatus
from strop.errors import ConfigError, DataError
from strop.rollout import Example, FailureOwner, Split
from strop.tasks.failures import catch_failure, describe_failure, find_causes
from strop.tasks.judging import Judge
from strop.tasks.task import Task

_PROBE_LIMIT_S = 240.0
"""Wall time limit of a probe."""
_PROBES: Mapping[str, Callable[[AuditContext], Awaitable[ProbeResult]]] = MappingProxyType(
    {
        "empty": probes.probe_empty,
        "garbage": probes.probe_garbage,
        "echo": probes.probe_echo,
        "constant": probes.probe_constant,
        "gold": answer_probes.probe_gold,
        "near_miss": answer_probes.probe_near_miss,
        "label_leak": answer_probes.probe_label_leak,
        "trivial_rule": answer_probes.probe_trivial_rule,
        "determinism": answer_probes.probe_determinism,
        "failure_paths": answer_probes.probe_failure_paths,
        "forgeries": answer_probes.probe_forgeries,
        "cost": probes.probe_cost,
        "judge_injection": probes.probe_judge_injection,
        # Last, since it checks the rewards of all other probes.
        "ceiling": probes.probe_ceiling,
    }
)
PROBE_IDS = tuple(_PROBES)
_SELF_TEST = ("empty", "garbage", "echo", "gold", "near_miss", "ceiling")


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """Size and selection of an audit."""

    num_examples: int = 32
    seed: int = 0
    probes: Sequence[str] = PROBE_IDS


async def run_audit(task: Task, settings: AuditSettings, judge: Judge | None = None) -> AuditReport:
    """Attack a task with every probe. Without a `judge`, its verifier runs in this process.

    Raises: ConfigError for an unknown probe; DataError if the task has no examples.
    """
    if unknown := sorted(set(settings.probes) - set(PROBE_IDS)):
        raise ConfigError(
            f"probe {', '.join(unknown)}", allowed=", ".join(PROBE_IDS), next_step="correct the name"
        )
    began_at = time.perf_counter()
    examples = examples_to_attack(task)
    num_examples = min(settings.num_examples, len(examples))
    chosen = sorted(random.Random(settings.seed).sample(range(len(examples)), num_examples))
    context = _begin(task, [examples[index] for index in chosen], judge, settings.seed)
    results = [await _run_probe(context, name) for name in PROBE_IDS if name in settings.probes]
    return AuditReport(
        task=task.name,
        task_version=task.version,
        seed=settings.seed,
        num_examples=len(context.examples),
        seconds=time.perf_counter() - began_at,
        probes=tuple(results),
        num_judged=len(context.all_judged),
        causes=find_causes(judged.outcome for judged in context.all_judged),
    )


async def self_test(task: Task, examples: Sequence[Example], judge: Judge | None = None) -> list[ProbeResult]:
    """Judge right and worthless replies to these examples; return the probes that failed.

    Raises: DataError if there is no example.
    """
    context = _begin(task, examples, judge, seed=0)
    results = [await _run_probe(context, name) for name in _SELF_TEST]
    return [result for result in results if result.status in {ProbeStatus.FAIL, ProbeStatus.ERROR}]


def _begin(task: Task, examples: Sequence[Example], judge: Judge | None, seed: int) -> AuditContext:
    if not examples:
        raise DataError(
            f"an audit of task {task.name} on no example",
            allowed="a task with at least one example",
            next_step="look at the task's data",
        )
    return AuditContext(task=task, judge=judge or Judge(task), examples=examples, seed=seed)


def examples_to_attack(task: Task) -> Sequence[Example]:
    """Return the training examples, or the held-out ones of a task that is for evaluation only.

    Raises: DataError if the data is missing, empty or malformed.
    """
    with suppress(DataError):
        if examples := task.examples(Split.TRAIN):
            return examples
    # If the data is at fault, this raises the error again.
    return task.examples(Split.HELD_OUT)


async def _run_probe(context: AuditContext, name: str) -> ProbeResult:
    with catch_failure(FailureOwner.TASK) as caught:
        async with asyncio.timeout(_PROBE_LIMIT_S):
            result = await _PROBES[name](context)
    if caught.failure is not None:
        result = ProbeResult(status=ProbeStatus.ERROR, detail=describe_failure(caught.failure))
    if result.status is ProbeStatus.PASS and not result.num:
        result = replace(result, status=ProbeStatus.WARN, detail=f"nothing was judged: {result.detail}")
    return replace(result, probe=name)
