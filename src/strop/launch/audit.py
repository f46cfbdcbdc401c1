"""Auditing tasks on this machine, one or all that need no data, and keeping what was found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from strop.launch.inference import read_asking
from strop.rollout import Split
from strop.spec.task import TaskSpec
from strop.tasks import build_task, build_warm_task
from strop.tasks.audit import AuditReport, AuditSettings, run_audit, stored_audit_path, write_audit
from strop.tasks.generated.reasoning_gym import list_datasets
from strop.tasks.judging import open_judge

_GENERATED = ("arithmetic", "reverse-text")
"""Built-in tasks that make their own examples."""
_GYM_SIZES = ("num_train=64", "num_held_out=8")
"""Small: some data sets take a second for each example."""


def read_task(name: str, words: Sequence[str]) -> TaskSpec:
    """Return a task's settings from `key=value` words.

    Raises: ConfigError as for a run file.
    """
    return read_asking(name, words, Split.TRAIN).spec.task


def list_offline_tasks() -> Iterator[tuple[str, TaskSpec]]:
    """Yield a label and the settings of every built-in task and data set that needs no files.

    Raises: ConfigError if reasoning-gym is not installed.
    """
    for name in _GENERATED:
        yield name, read_task(name, ())
    for dataset in list_datasets():
        words = (f"dataset={dataset}", *_GYM_SIZES)
        yield f"reasoning-gym/{dataset}", read_task("reasoning-gym", words)


def audit_here(spec: TaskSpec, settings: AuditSettings, *, out: Path | None = None) -> AuditReport:
    """Audit a task, and keep the report where a run of this very task version looks for it.

    `out` is one more file to write it to.
    Raises: ConfigError or DataError if the task cannot be built or has no examples; StoreError if a
        report cannot be written.
    """
    task = build_task(spec)

    async def attack() -> AuditReport:
        judge = open_judge(task, partial(build_warm_task, spec))
        try:
            return await run_audit(task, settings, judge)
        finally:
            await judge.close()

    report = asyncio.run(attack())
    for path in filter(None, [stored_audit_path(report.task, report.task_version), out]):
        write_audit(report, path)
    return report
