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
from strop.tasks.failures import catch_failure, describe_failure
from strop.tasks.judging import Judge
from strop.tasks.task import Task

_PROBE_LIMIT_S = MappingProxyType({False: 120.0, True: 240.0})
"""Wall time limit of a probe, by whether judgements need a sandbox."""

_PROBES: Mapping[str, Callable[[AuditContext], Awaitable[ProbeResult]]] = MappingProxyType(
    {
        "noop": probes.probe_noop,
        "empty": probes.probe_empty,
        "garbage": probes.probe_garbage,
        "echo": probes.probe_echo,
        "constant": probes.probe_constant,
        "one_word": probes.probe_one_word,
        "gold": answer_probes.probe_gold,
        "near_miss": answer_probes.probe_near_miss,
        "wrong_order": answer_probes.probe_wrong_order,
        "label_leak": answer_probes.probe_prompt_leak,
        "trivial_rule": answer_probes.probe_trivial_rule,
        "determinism": answer_probes.probe_determinism,
        "order": answer_probes.probe_order,
        "failure_paths": answer_probes.probe_failure_paths,
        "forgeries": answer_probes.probe_forgeries,
        "truncation": answer_probes.probe_truncation,
        "cost": probes.probe_cost,
        "judge_injection": probes.probe_judge_injection,
        "judge_length": probes.probe_judge_length,
        # Last, since it checks the rewards of all other probes.
        "ceiling": probes.probe_ceiling,
    }
)
PROBE_IDS = tuple(_PROBES)
QUICK_PROBES = (
    "noop",
    "empty",
    "garbage",
    "echo",
    "constant",
    "one_word",
    "gold",
    "label_leak",
    "trivial_rule",
    "determinism",
    "failure_paths",
    "judge_injection",
    "ceiling",
)
"""The probes that a run's gate makes on a task without a stored audit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """Size and selection of an audit."""

    num_examples: int = 32
    seed: int = 0
    probes: Sequence[str] = PROBE_IDS


async def run_audit(
    task: Task,
    settings: AuditSettings,
    judge: Judge | None = None,
) -> AuditReport:
    """Attack a task with every probe. Without a `judge`, its verifier runs in this process.

    Raises: ConfigError for an unknown probe; DataError if the task has no examples.
    """
    unknown = sorted(set(settings.probes) - set(PROBE_IDS))
    if unknown:
        raise ConfigError(
            f"probe {', '.join(unknown)}", allowed=", ".join(PROBE_IDS), next_step="correct the name"
        )
    started_at, began_at = time.time(), time.perf_counter()
    examples = examples_to_attack(task)
    if not len(examples):
        raise DataError(
            f"an audit of task {task.name}, which has no examples",
            allowed="a task with at least one example",
            next_step="look at the task's data",
        )
    num_examples = min(settings.num_examples, len(examples))
    chosen = random.Random(settings.seed).sample(range(len(examples)), num_examples)
    context = AuditContext(
        task=task,
        judge=judge or Judge(task),
        examples=[examples[index] for index in sorted(chosen)],
        seed=settings.seed,
    )
    results = [await _run_probe(context, name) for name in PROBE_IDS if name in settings.probes]
    return AuditReport(
        task=task.name,
        task_version=task.version,
        variant=task.variant,
        isolation=context.lowest_isolation,
        seed=settings.seed,
        num_examples=len(context.examples),
        max_reward=task.limits.max_reward,
        chance=task.limits.chance,
        started_at=started_at,
        seconds=time.perf_counter() - began_at,
        probes=tuple(results),
    )


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
    started_at = time.perf_counter()
    with catch_failure(FailureOwner.TASK) as caught:
        async with asyncio.timeout(_PROBE_LIMIT_S[context.task.is_costly]):
            result = await _PROBES[name](context)
    if caught.failure is not None:
        detail = describe_failure(caught.failure)
        result = ProbeResult(probe=name, status=ProbeStatus.ERROR, detail=detail)
    if result.status is ProbeStatus.PASS and not result.num:
        result = replace(result, status=ProbeStatus.WARN, detail=f"nothing was judged: {result.detail}")
    return replace(result, seconds=time.perf_counter() - started_at)
