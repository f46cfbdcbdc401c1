"""List the runs below a folder, and compare several of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError, split_error
from strop.io import FileLock
from strop.record import RunDir
from strop.record.run_dir import LOCK_NAME, STATE_NAME
from strop.spec import load_spec
from strop.spec.base import DEFAULT
from strop.spec.display import dotted, walk_values
from strop.spec.eval_file import is_of_file

if TYPE_CHECKING:
    from strop.evaluate import Change, Comparison, EvalResult, Interval


class RunPhase(StrEnum):
    """The state of a run."""

    FINISHED = "finished"
    RUNNING = "running"
    STOPPED = "stopped"
    """Unfinished, without a process on this machine: the same command continues it."""
    DAMAGED = "damaged"
    """Its run.json cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run in a list."""

    path: Path
    phase: RunPhase
    created_at: float | None = None
    """Unix seconds; None for a damaged run."""
    num_steps: int = 0
    """Recorded steps."""
    last_accuracy: float | None = None
    """Greedy accuracy of the last evaluation on held-out examples; None without one."""


def summarize_runs(root: Path) -> list[RunSummary]:
    """Return the runs below a folder, the newest first, damaged ones included.

    Raises: StoreError if the folder does not exist.
    """
    if not root.is_dir():
        raise StoreError(
            f"{root} is no folder",
            allowed="the folder that output.root names, with runs in it",
            next_step="name it: `strop ls ROOT`",
        )
    paths = [path.parent for path in root.glob(f"*/{STATE_NAME}") if ".partial-" not in path.parent.name]
    summaries = []
    for path in sorted(paths):
        try:
            run = RunDir.open(path)
            steps = [int(line["step"]) for line in run.metrics.read()]
            results = read_results(path)
        except CorruptRecord:
            summaries.append(RunSummary(path=path, phase=RunPhase.DAMAGED))
            continue
        summaries.append(
            RunSummary(
                path=path,
                phase=RunPhase.FINISHED if run.is_finished else find_phase(path),
                created_at=run.state.created_at,
                num_steps=max(steps, default=0),
                last_accuracy=results[-1].greedy.accuracy if results else None,
            )
        )
    return sorted(summaries, key=lambda run: run.created_at or 0.0, reverse=True)


def find_phase(path: Path) -> RunPhase:
    """Return the state of an unfinished run, by the process that holds its lock."""
    # The holder is read from the file: an attempt to take the lock could make the run's start fail.
    holder = FileLock(path / LOCK_NAME).holder()
    is_here = holder is not None and holder.host == socket.gethostname()
    return RunPhase.RUNNING if holder and is_here and psutil.pid_exists(holder.pid) else RunPhase.STOPPED


def read_results(run_path: Path) -> list[EvalResult]:
    """Return a run's own evaluations by step, without those by an evaluation's file (`NAME.TASK-step-...`).

    Raises: CorruptRecord if one is damaged.
    """
    paths = [path for path in (run_path / "eval").glob("*.json") if not is_of_file(path)]
    if not paths:
        return []
    from strop.evaluate import read_result

    return sorted([read_result(path) for path in paths], key=lambda result: result.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One side of a comparison: a run or a stored result, or runs that differ in their seed alone."""

    name: str
    """The shortest unambiguous name of its first run."""
    paths: tuple[Path, ...]
    results: tuple[EvalResult, ...]
    """The last evaluation of each run."""
    values: Mapping[str, Any]
    """Settings of the first run by dotted key, without `output`; for a stored result its identity."""

    @property
    def seeds(self) -> list[int]:
        """Training seeds of its runs; for a stored result the seed of the evaluation."""
        return [result.run_seed for result in self.results]

    @property
    def label(self) -> str:
        """The name, followed by the number of seeds if there are several."""
        return self.name if len(self.results) == 1 else f"{self.name} ({len(self.results)} seeds)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmChange:
    """An arm and the baseline. Keys: 'greedy', 'sampled'; for a part of a mixture 'LABEL: greedy'."""

    arm: Arm
    change: Comparison
    """On the same examples; an example's score is the mean over the arm's seeds."""
    p_values: Mapping[str, float]
    """After Holm's correction for the number of arms compared with the baseline."""
    over_seeds: Mapping[str, Interval]
    """Change of accuracy with an interval over seeds; only if both arms have two or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting or a fact in which arms differ."""

    key: str
    values: tuple[Any, ...]
    """One per arm, the baseline first; 'default' if it was not set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyComparison:
    """The last evaluations compared with that of the first run, and all settings that differ."""

    baseline: Arm
    others: tuple[ArmChange, ...]
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    """Caveats for the reader."""


def compare_many(paths: Sequence[Path], *, declared: Sequence[str] | None = None) -> ManyComparison:
    """Compare the last evaluations of runs, or stored results, with that of the first, on the same examples.

    Runs that differ only in `seed` form one arm, unless all of them do. `declared`: settings that were varied
    on purpose. None: any setting may differ.
    Raises: ConfigError for fewer than two paths; StoreError or CorruptRecord if one has no readable
        evaluation; CheckRefused if one is invalid, the protocols differ, or an undeclared setting differs.
    """
    if len(paths) < 2:
        raise ConfigError(
            f"a comparison of {len(paths)} runs",
            allowed="two runs or results, or more: the first is what the others are compared with",
            next_step="name another run: `strop compare RUN RUN`",
        )
    places = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]
    notes = [] if len(places) == len(paths) else ["a run that is named twice is compared once"]
    if len(places) == 1:
        places, notes = list(paths[:2]), ["a run is compared with itself"]
    comparison = compare_arms([_read_arm(path, places) for path in places], declared=declared)
    return replace(comparison, notes=(*notes, *comparison.notes))


def compare_arms(arms: Sequence[Arm], *, declared: Sequence[str] | None = None) -> ManyComparison:
    """Compare arms of one run each, at least two, as `compare_many`. Raises: CheckRefused like that."""
    first, *rest = _group_by_seed(arms)
    settings = _list_settings([first, *rest])
    undeclared = [] if declared is None else [setting for setting in settings if setting.key not in declared]
    if declared is not None and undeclared:
        # EVA-7: a change is not attributed to one setting while others differ too.
        shown = "; ".join(
            f"{setting.key} {' and '.join(map(repr, setting.values))}" for setting in undeclared
        )
        raise CheckRefused(
            f"{'the two' if len(rest) == 1 else 'they'} differ in more than {', '.join(declared)}: {shown}",
            allowed="a difference in the declared settings only",
            next_step="declare these too with --vary, or repeat one run with the other's values",
        )
    changes = [_compare_arms(first, arm) for arm in rest]
    arms, notes = [first, *rest], []
    steps = {arm.name: sorted({result.step for result in arm.results}) for arm in arms}
    if len({step for of_arm in steps.values() for step in of_arm}) > 1:
        shown = ", ".join(f"{name} {' and '.join(map(str, of_arm))}" for name, of_arm in steps.items())
        notes.append(f"the last evaluations are of different steps: {shown}")
    if any(len(arm.paths) > 1 for arm in arms):
        shown = ", ".join(f"{arm.name} {' '.join(map(str, arm.seeds))}" for arm in arms)
        notes.append(f"runs that differ in their seed alone are one arm, by their means; seeds: {shown}")
    return ManyComparison(
        baseline=first,
        others=tuple(_correct(rest, changes, first)),
        settings=settings,
        notes=tuple(notes),
    )


def _read_arm(path: Path, places: Sequence[Path]) -> Arm:
    if path.is_file():
        from strop.evaluate import read_result

        result = read_result(path)
        values = result.identity.model_dump(mode="json")
    else:
        RunDir.open(path)
        results = read_results(path)
        if not results:
            raise StoreError(
                f"run {path} has no evaluation",
                allowed="a run with results in eval/, or a result that `strop eval --json` printed",
                next_step="let the run finish, or evaluate its checkpoint with `strop eval`",
            )
        result, values = results[-1], list_values(load_spec(path / "spec.toml").spec.model_dump())
    is_alone = [place.name for place in places].count(path.name) == 1
    return Arm(
        name=path.name if is_alone and path.name else str(path),
        paths=(path,),
        results=(result,),
        values=values,
    )


def list_values(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings by dotted key, without its name and its directory."""
    values = {dotted(key): value for key, value in walk_values(spec)}
    return {key: value for key, value in values.items() if not key.startswith("output.") and key != "name"}


def _group_by_seed(arms: Sequence[Arm]) -> list[Arm]:
    """Join runs that differ only in their seed into one arm; if all do, each run stays an arm."""
    groups: list[list[Arm]] = []
    for arm in arms:
        same = next((group for group in groups if _without_seed(group[0]) == _without_seed(arm)), None)
        if same is None or arm.paths[0].is_file():
            groups.append([arm])
        else:
            same.append(arm)
    if len(groups) == 1:
        return list(arms)
    return [
        replace(
            group[0],
            paths=tuple(path for arm in group for path in arm.paths),
            results=tuple(result for arm in group for result in arm.results),
        )
        for group in groups
    ]


def _without_seed(arm: Arm) -> dict[str, Any]:
    return {key: value for key, value in arm.values.items() if key != "seed"}


def _list_settings(arms: Sequence[Arm]) -> tuple[Setting, ...]:
    """Return the settings that differ between arms, without the seed if an arm has several runs."""
    if len({arm.paths[0].is_file() for arm in arms}) > 1:
        # A run and a stored result have only the settings of the evaluation in common.
        arms = [replace(arm, values=arm.results[0].identity.model_dump(mode="json")) for arm in arms]
    keys = dict.fromkeys(key for arm in arms for key in arm.values)
    if any(len(arm.paths) > 1 for arm in arms):
        keys.pop("seed", None)
    settings = [Setting(key=key, values=tuple(arm.values.get(key, DEFAULT) for arm in arms)) for key in keys]
    return tuple(
        setting for setting in settings if any(value != setting.values[0] for value in setting.values)
    )


def _compare_arms(before: Arm, after: Arm) -> Comparison:
    from strop.evaluate import compare_seeds

    try:
        return compare_seeds(before.results, after.results)
    except CheckRefused as error:
        why, allowed, next_step = split_error(str(error))
        raise CheckRefused(
            f"{after.name} cannot be compared with {before.name}: {why}", allowed=allowed, next_step=next_step
        ) from error


def list_changes(change: Comparison) -> dict[str, Change]:
    """Return the changes of a comparison by the keys of `ArmChange`."""
    parts = {"": change, **{f"{label}: ": part for label, part in change.parts.items()}}
    return {
        f"{label}{kind}": part_change
        for label, part in parts.items()
        for kind in ("greedy", "sampled")
        if (part_change := getattr(part, kind)) is not None
    }


def _correct(arms: Sequence[Arm], changes: Sequence[Comparison], first: Arm) -> Iterator[ArmChange]:
    from strop.evaluate import correct_by_holm

    by_arm = [list_changes(change) for change in changes]
    corrected: list[dict[str, float]] = [{} for _ in changes]
    for key in dict.fromkeys(key for of_arm in by_arm for key in of_arm):
        indices = [index for index, of_arm in enumerate(by_arm) if key in of_arm]
        p_values = correct_by_holm([by_arm[index][key].p_value for index in indices])
        for index, p_value in zip(indices, p_values, strict=True):
            corrected[index][key] = p_value
    for arm, change, p_values_of in zip(arms, changes, corrected, strict=True):
        yield ArmChange(arm=arm, change=change, p_values=p_values_of, over_seeds=_over_seeds(first, arm))


def _over_seeds(before: Arm, after: Arm) -> dict[str, Interval]:
    from strop.evaluate import difference_over_seeds

    intervals = {}
    for kind in ("greedy", "sampled"):
        scores = [[result.scores.get(kind) for result in arm.results] for arm in (before, after)]
        accuracies = [
            [score.accuracy for score in side if score and score.accuracy is not None] for side in scores
        ]
        interval = difference_over_seeds(*accuracies)
        if interval is not None:
            intervals[kind] = interval
    return intervals
