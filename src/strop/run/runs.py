"""The runs below a folder, and what two of them have in common."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.io import FileLock
from strop.io.leftovers import is_process_alive
from strop.record import RunDir
from strop.record.run_dir import LOCK_NAME, STATE_NAME
from strop.spec import load_spec
from strop.spec.base import DEFAULT
from strop.spec.display import dotted, walk_values
from strop.spec.eval_file import is_of_file

if TYPE_CHECKING:
    from strop.evaluate import Comparison, Difference, EvalResult


class RunPhase(StrEnum):
    """Where a run stands."""

    FINISHED = "finished"
    RUNNING = "running"
    STOPPED = "stopped"
    """Unfinished, and no process of this machine works in it: its command continues it."""
    DAMAGED = "damaged"
    """Its run.json cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run in a list."""

    path: Path
    phase: RunPhase
    created_at: float | None
    """Unix seconds; None for a damaged run."""
    num_steps: int
    """Steps that are recorded."""
    last_accuracy: float | None
    """Greedy, held out, of the last evaluation; None where there is none."""


def summarize_runs(root: Path) -> list[RunSummary]:
    """Return the runs below a folder, newest first; a damaged one is listed as such.

    Raises: StoreError if the folder does not exist.
    """
    if not root.is_dir():
        raise StoreError(
            f"{root} is no folder",
            allowed="the folder that output.root names, with runs in it",
            next_step="name it: `strop ls ROOT`",
        )
    paths = [path.parent for path in root.glob(f"*/{STATE_NAME}") if ".partial-" not in path.parent.name]
    found = [_summarize(path) for path in sorted(paths)]
    return sorted(found, key=lambda run: run.created_at or 0.0, reverse=True)


def _summarize(path: Path) -> RunSummary:
    try:
        run = RunDir.open(path)
        steps = [int(line["step"]) for line in run.metrics.read()]
        results = read_results(path)
    except CorruptRecord:
        return RunSummary(path=path, phase=RunPhase.DAMAGED, created_at=None, num_steps=0, last_accuracy=None)
    phase = RunPhase.FINISHED
    if not run.is_finished:
        # Read, not tried: taking the lock for a moment could refuse the run's own start.
        holder = FileLock(path / LOCK_NAME).holder()
        is_here = holder is not None and holder.host == socket.gethostname()
        phase = RunPhase.RUNNING if holder and is_here and is_process_alive(holder.pid) else RunPhase.STOPPED
    return RunSummary(
        path=path,
        phase=phase,
        created_at=run.state.created_at,
        num_steps=max(steps, default=0),
        last_accuracy=results[-1].greedy.accuracy if results else None,
    )


def read_results(run_path: Path) -> list[EvalResult]:
    """Return a run's own evaluations by step; not those that another file described (`NAME.TASK-step-...`).

    Raises: CorruptRecord if one is damaged.
    """
    paths = [path for path in (run_path / "eval").glob("*.json") if not is_of_file(path)]
    if not paths:
        return []
    from strop.evaluate import read_result

    return sorted([read_result(path) for path in paths], key=lambda result: result.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two last evaluations, their difference, and everything that was set otherwise."""

    before: EvalResult
    after: EvalResult
    change: Comparison
    differences: tuple[Difference, ...]


def compare_runs(before: Path, after: Path, *, declared: Sequence[str] | None = None) -> RunComparison:
    """Compare the last evaluations of two runs, or two stored results, on the same examples.

    `declared`: the settings that were varied on purpose. None: no claim is made of what caused a change.
    Raises: StoreError if there is none to compare; CheckRefused if one is invalid, the protocols
        differ, or a setting differs that was not declared.
    """
    from strop.evaluate import Difference, compare_results
    from strop.evaluate.comparison import list_plan_differences

    one, other = _last_result(before), _last_result(after)
    change = compare_results(one, other)
    if before.is_file() or after.is_file():
        differences = list_plan_differences(one, other)
    else:
        specs = (load_spec(path / "spec.toml").spec.model_dump() for path in (before, after))
        values, others = ({dotted(key): value for key, value in walk_values(spec)} for spec in specs)
        # Places of output are no difference.
        keys = [key for key in values | others if not key.startswith("output.") and key != "name"]
        pairs = ((key, values.get(key, DEFAULT), others.get(key, DEFAULT)) for key in keys)
        differences = tuple(Difference(key=key, before=a, after=b) for key, a, b in pairs if a != b)
    undeclared = [] if declared is None else [found for found in differences if found.key not in declared]
    if declared is not None and undeclared:
        # EVA-7: a change is not laid at one setting's door while others differ too.
        shown = "; ".join(f"{found.key} {found.before!r} and {found.after!r}" for found in undeclared)
        raise CheckRefused(
            f"the two differ in more than {', '.join(declared)}: {shown}",
            allowed="a difference in the declared settings only",
            next_step="declare these too with --vary, or repeat one run with the other's values",
        )
    return RunComparison(before=one, after=other, change=change, differences=differences)


def _last_result(path: Path) -> EvalResult:
    if path.is_file():
        from strop.evaluate import read_result

        return read_result(path)
    RunDir.open(path)
    results = read_results(path)
    if not results:
        raise StoreError(
            f"run {path} has no evaluation",
            allowed="a run with results in eval/, or a result that `strop eval --json` printed",
            next_step="let the run finish, or evaluate its checkpoint with `strop eval`",
        )
    return results[-1]
