"""The baselines that a user names for an evaluation: which stored results, or published scores, are meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from strop.errors import ConfigError
from strop.evaluate.baselines import BaselineStatus, all_baselines, find_model_name
from strop.evaluate.stored import (
    Result,
    StoredBaseline,
    group_last,
    read_stored,
    require_one_model,
    tasks_of,
)
from strop.rollout import Split
from strop.run.evaluation import EVALS_ROOT
from strop.run.inference import open_model


def read_baselines(
    words: Sequence[str], tasks: Sequence[str], split: Split, *, by_harness: bool, out_dir: Path | None
) -> list[StoredBaseline]:
    """Return what `NAME=PLACE` or `PLACE` mean, before anything is asked.

    A place is a result, a folder of results, a run; a model or a checkpoint with results in its run, in
    `out_dir` or in `EVALS_ROOT`; the name of an evaluation by a file, whose results are there; or a model
    with published scores. Places of one name are one baseline. `tasks`: what will be asked, by lm-eval or
    not.
    Raises: ConfigError for one without a result on any of the tasks, or of several models; CorruptRecord for
        a damaged result.
    """
    joined: dict[tuple[str, str | None], StoredBaseline] = {}
    for one in (_read(word, out_dir) for word in words):
        key = (one.name, one.published)
        joined[key] = replace(one, results={**joined.get(key, one).results, **one.results})
    for one in joined.values():
        if one.published is not None:
            # The tasks on which a model's published scores may be quoted.
            on = {
                (row.harness_task or "") if by_harness else row.task
                for row in all_baselines()
                if row.model == one.published and row.status is BaselineStatus.REFERENCE
            }
            known = [task for task in tasks if task in on]
        else:
            if several := require_one_model(one.name, one.results):
                raise ConfigError(
                    several,
                    allowed="the results of one model",
                    next_step="name one file, or the model whose results are meant",
                )
            there = tasks_of(list(one.results.values()), split)
            known = [task for task in tasks if (by_harness, task) in there]
            on = {f"{name} (by lm-eval)" if is_by_harness else name for is_by_harness, name in there}
        if not known:
            raise ConfigError(
                f"the baseline {one.name} has no {split.value} result on {' or '.join(tasks)}",
                allowed=f"a baseline with one of the tasks; it has {', '.join(sorted(on)) or 'none'}",
                next_step="name another baseline, or evaluate that one on the task first",
            )
    asked = {(by_harness, task) for task in tasks}
    return [replace(one, results=_keep_last(one.results, asked, split)) for one in joined.values()]


def _keep_last(
    results: Mapping[Path, Result], asked: set[tuple[bool, str]], split: Split
) -> dict[Path, Result]:
    """Return the results of the last step of each task that is asked."""
    mine = {path: one for path, one in results.items() if tasks_of([one], split) & asked}
    return {path: one for group in group_last(mine).values() for path, one in group.items()}


def _read(word: str, out_dir: Path | None) -> StoredBaseline:
    name, _, place = word.rpartition("=")
    path = Path(place or "-").expanduser()
    if path.exists() and (results := read_stored(path)):
        return StoredBaseline(name=name or path.stem, results=results)
    stored: Mapping[Path, Result] = {}
    for root in {out_dir or EVALS_ROOT, EVALS_ROOT}:
        for folder in [root, *(one for one in root.glob("*/") if one.name != "tables")]:
            stored = {**stored, **read_stored(folder)}
    if path.is_dir():
        model = open_model(place)
        if model.run_path is not None:
            stored = {**stored, **read_stored(model.run_path)}
        mine = {one: result for one, result in stored.items() if result.model_digest == model.digest}
    else:
        mine = {one: result for one, result in stored.items() if one.name.startswith(f"{place}.")}
    if place and mine:
        return StoredBaseline(name=name or path.name, results=mine)
    published = find_model_name(place)
    if published is not None:
        return StoredBaseline(name=name or published, published=published)
    raise ConfigError(
        f"the baseline {place or word!r} has no results",
        allowed="a result, a folder of results, a run; a model or an evaluation with results in"
        f" {EVALS_ROOT}/ or --out; a model with published scores",
        next_step="correct it, or evaluate that model first",
    )
