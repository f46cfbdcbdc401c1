"""The runs below a folder, and what several of them have in common."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError, split_error
from strop.io import FileLock
from strop.io.leftovers import is_process_alive
from strop.record import RunDir
from strop.record.run_dir import LOCK_NAME, STATE_NAME
from strop.spec import load_spec
from strop.spec.base import DEFAULT
from strop.spec.display import dotted, walk_values
from strop.spec.eval_file import is_of_file

if TYPE_CHECKING:
    from strop.evaluate import Change, Comparison, EvalResult, Interval


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
    created_at: float | None = None
    """Unix seconds; None for a damaged run."""
    num_steps: int = 0
    """Steps that are recorded."""
    last_accuracy: float | None = None
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
    found = []
    for path in sorted(paths):
        try:
            run = RunDir.open(path)
            steps = [int(line["step"]) for line in run.metrics.read()]
            results = read_results(path)
        except CorruptRecord:
            found.append(RunSummary(path=path, phase=RunPhase.DAMAGED))
            continue
        found.append(
            RunSummary(
                path=path,
                phase=RunPhase.FINISHED if run.is_finished else find_phase(path),
                created_at=run.state.created_at,
                num_steps=max(steps, default=0),
                last_accuracy=results[-1].greedy.accuracy if results else None,
            )
        )
    return sorted(found, key=lambda run: run.created_at or 0.0, reverse=True)


def find_phase(path: Path) -> RunPhase:
    """Return where a run stands that has not finished, by the process that holds its lock."""
    # Read, not tried: taking the lock for a moment could refuse the run's own start.
    holder = FileLock(path / LOCK_NAME).holder()
    is_here = holder is not None and holder.host == socket.gethostname()
    return RunPhase.RUNNING if holder and is_here and is_process_alive(holder.pid) else RunPhase.STOPPED


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
class Arm:
    """One side of a comparison: a run or a stored result, or runs that differ in their seed alone."""

    name: str
    """Of its first run, the shortest that tells it from the others."""
    paths: tuple[Path, ...]
    results: tuple[EvalResult, ...]
    """The last evaluation of each."""
    values: Mapping[str, Any]
    """Settings of the first run by dotted key, output left out; of a result what was evaluated, and how."""

    @property
    def seeds(self) -> list[int]:
        """Training seeds of its runs; of a result the seed of its evaluation."""
        return [result.run_seed for result in self.results]

    @property
    def label(self) -> str:
        """The name, with the number of seeds behind it where it is not one."""
        return self.name if len(self.results) == 1 else f"{self.name} ({len(self.results)} seeds)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmChange:
    """An arm beside the baseline. Keys are 'greedy' and 'sampled', of a mixture's part 'LABEL: greedy'."""

    arm: Arm
    change: Comparison
    """On the same examples; what an example scored is the mean over the arm's seeds."""
    p_values: Mapping[str, float]
    """Corrected by Holm for the number of arms that are compared with the baseline."""
    over_seeds: Mapping[str, Interval]
    """Change of accuracy with an interval over seeds; there where both arms have two or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting or a fact in which arms differ."""

    key: str
    values: tuple[Any, ...]
    """One of each arm, the baseline's first; the word 'default' where it was not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyComparison:
    """Last evaluations beside that of the first run, and everything that was set otherwise."""

    baseline: Arm
    others: tuple[ArmChange, ...]
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    """What a reader should know before believing a number."""


def compare_many(paths: Sequence[Path], *, declared: Sequence[str] | None = None) -> ManyComparison:
    """Compare the last evaluations of runs, or stored results, with that of the first, on the same examples.

    Runs that differ in `seed` alone are one arm, where not all of them are. `declared`: the settings that
    were varied on purpose. None: no claim is made of what caused a change.
    Raises: ConfigError if there are fewer than two; StoreError or CorruptRecord if one has no evaluation that
        can be read; CheckRefused if one is invalid, the protocols differ, or a setting differs that was not
        declared.
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
    found = compare_arms([_read_arm(path, places) for path in places], declared=declared)
    return replace(found, notes=(*notes, *found.notes))


def compare_arms(arms: Sequence[Arm], *, declared: Sequence[str] | None = None) -> ManyComparison:
    """Compare arms of one run each, at least two, as `compare_many`. Raises: CheckRefused like that."""
    first, *rest = _group_by_seed(arms)
    settings = _list_settings([first, *rest])
    undeclared = [] if declared is None else [found for found in settings if found.key not in declared]
    if declared is not None and undeclared:
        # EVA-7: a change is not laid at one setting's door while others differ too.
        shown = "; ".join(f"{found.key} {' and '.join(map(repr, found.values))}" for found in undeclared)
        raise CheckRefused(
            f"{'the two' if len(rest) == 1 else 'they'} differ in more than {', '.join(declared)}: {shown}",
            allowed="a difference in the declared settings only",
            next_step="declare these too with --vary, or repeat one run with the other's values",
        )
    changes = [_compare_arms(first, arm) for arm in rest]
    return ManyComparison(
        baseline=first,
        others=tuple(_correct(rest, changes, first)),
        settings=settings,
        notes=tuple(_list_notes([first, *rest])),
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
    """Return a run's settings by dotted key. Where it writes to is no difference between runs."""
    found = {dotted(key): value for key, value in walk_values(spec)}
    return {key: value for key, value in found.items() if not key.startswith("output.") and key != "name"}


def _group_by_seed(arms: Sequence[Arm]) -> list[Arm]:
    """Return runs of equal settings but for their seed as one arm; each alone where all of them are equal."""
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
    """Return what is not the same in all arms. The seeds of an arm of several runs are no setting."""
    if len({arm.paths[0].is_file() for arm in arms}) > 1:
        # A run beside a stored result: what they have in common is how they were evaluated.
        arms = [replace(arm, values=arm.results[0].identity.model_dump(mode="json")) for arm in arms]
    keys = dict.fromkeys(key for arm in arms for key in arm.values)
    if any(len(arm.paths) > 1 for arm in arms):
        keys.pop("seed", None)
    found = [Setting(key=key, values=tuple(arm.values.get(key, DEFAULT) for arm in arms)) for key in keys]
    return tuple(one for one in found if any(value != one.values[0] for value in one.values))


def _compare_arms(before: Arm, after: Arm) -> Comparison:
    from strop.evaluate import compare_seeds

    try:
        return compare_seeds(before.results, after.results)
    except CheckRefused as error:
        given, allowed, next_step = split_error(str(error))
        told = f"{after.name} cannot be compared with {before.name}: {given}"
        raise CheckRefused(told, allowed=allowed, next_step=next_step) from error


def list_changes(change: Comparison) -> dict[str, Change]:
    """Return the changes of a comparison by the keys of `ArmChange`."""
    named = {"": change, **{f"{label}: ": part for label, part in change.parts.items()}}
    found = {
        f"{label}{kind}": getattr(one, kind) for label, one in named.items() for kind in ("greedy", "sampled")
    }
    return {key: one for key, one in found.items() if one is not None}


def _correct(arms: Sequence[Arm], changes: Sequence[Comparison], first: Arm) -> Iterator[ArmChange]:
    from strop.evaluate import correct_by_holm

    listed = [list_changes(change) for change in changes]
    corrected: list[dict[str, float]] = [{} for _ in changes]
    for key in dict.fromkeys(key for one in listed for key in one):
        places = [place for place, one in enumerate(listed) if key in one]
        p_values = correct_by_holm([listed[place][key].p_value for place in places])
        for place, p_value in zip(places, p_values, strict=True):
            corrected[place][key] = p_value
    for arm, change, p_values_of in zip(arms, changes, corrected, strict=True):
        yield ArmChange(arm=arm, change=change, p_values=p_values_of, over_seeds=_over_seeds(first, arm))


def _over_seeds(before: Arm, after: Arm) -> dict[str, Interval]:
    from strop.evaluate import difference_over_seeds

    found = {}
    for kind in ("greedy", "sampled"):
        scores = [[one.scores.get(kind) for one in arm.results] for arm in (before, after)]
        shares = [[one.accuracy for one in side if one and one.accuracy is not None] for side in scores]
        interval = difference_over_seeds(*shares)
        if interval is not None:
            found[kind] = interval
    return found


def _list_notes(arms: Sequence[Arm]) -> Iterator[str]:
    steps = {arm.name: sorted({result.step for result in arm.results}) for arm in arms}
    if len({step for found in steps.values() for step in found}) > 1:
        shown = ", ".join(f"{name} {' and '.join(map(str, found))}" for name, found in steps.items())
        yield f"the last evaluations are of different steps: {shown}"
    if any(len(arm.paths) > 1 for arm in arms):
        shown = ", ".join(f"{arm.name} {' '.join(map(str, arm.seeds))}" for arm in arms)
        yield f"runs that differ in their seed alone are one arm, by their means; seeds: {shown}"
