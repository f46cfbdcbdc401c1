"""Auditing tasks on this machine, one or all that there are, and keeping what was found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from strop.errors import ConfigError, explain_refusal
from strop.launch.inference import read_asking
from strop.rollout import Split
from strop.spec.task import TaskSpec
from strop.tasks import TASK_SUMMARIES, build_task, build_warm_task
from strop.tasks.audit import (
    AuditReport,
    AuditSettings,
    examples_to_attack,
    run_audit,
    stored_audit_path,
    write_audit,
)
from strop.tasks.code.humaneval import PACKAGE_SOURCE
from strop.tasks.generated.reasoning_gym import list_datasets
from strop.tasks.judging import InlineJudge, open_judge

_GENERATED = ("arithmetic", "reverse-text")
"""Built-in tasks that make their own examples."""
_INSTALLED = MappingProxyType({"humaneval": (f"source={PACKAGE_SOURCE}",)})
"""Tasks whose files come in a package."""
_GYM_SIZES = ("num_train=64", "num_held_out=8")
"""Small: some data sets take a second for each example."""


def read_task(name: str, words: Sequence[str]) -> TaskSpec:
    """Return a task's settings from `key=value` words.

    Raises: ConfigError as for a run file.
    """
    return read_asking(name, words, Split.TRAIN).spec.task


def list_audits(words: Sequence[str] = ()) -> Iterator[tuple[str, TaskSpec | None]]:
    """Yield a label and the settings of every built-in task and reasoning-gym data set.

    Settings are None for a task that reads files and was given none. `words` are settings with their
    task's name, such as `gsm8k.source=folder`.
    Raises: ConfigError if reasoning-gym is not installed, or a word is for no task.
    """
    own = {name: _words_of(name, words) for name in TASK_SUMMARIES}
    lost = [word for word in words if word.partition(".")[0] not in own]
    if lost:
        raise ConfigError(
            explain_refusal(
                f"{lost[0]} does not say for which task it is",
                allowed="TASK.key=value, where TASK is one of " + ", ".join(own),
                next_step="put the task's name before it",
            )
        )
    for name, mine in own.items():
        if name in _GENERATED:
            yield name, read_task(name, mine)
        elif name == "reasoning-gym":
            for dataset in list_datasets():
                sized = (f"dataset={dataset}", *_GYM_SIZES, *mine)
                yield f"{name}/{dataset}", read_task(name, sized)
        else:
            has_files = any(word.startswith(("source=", "parts")) for word in mine)
            source = () if has_files else _INSTALLED.get(name, ())
            yield name, read_task(name, (*source, *mine)) if has_files or source else None


def _words_of(task: str, words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.removeprefix(f"{task}.") for word in words if word.startswith(f"{task}."))


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
            # Making problems may take longer than a probe may; that is no probe's time.
            for example in examples_to_attack(task)[:1]:
                if not isinstance(judge, InlineJudge):
                    await judge.judge(example, "")
            return await run_audit(task, settings, judge)
        finally:
            await judge.close()

    report = asyncio.run(attack())
    for path in filter(None, [stored_audit_path(report.task, report.task_version), out]):
        write_audit(report, path)
    return report
