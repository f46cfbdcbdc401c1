"""Find the stored results that a user names as baselines of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from strop.errors import ConfigError
from strop.evaluate.harness import HarnessResult
from strop.evaluate.stored import Result, StoredBaseline, group_last, read_stored
from strop.rollout import Split
from strop.run.evaluation import EVALS_ROOT
from strop.run.inference import open_model


def read_baselines(
    words: Sequence[str], tasks: Sequence[str], split: Split, *, by_harness: bool, out_dir: Path | None
) -> list[StoredBaseline]:
    """Read the baselines that the words `NAME=PLACE` or `PLACE` name.

    A place is a result, a folder of results, a run; a model or a checkpoint with results in its run, in
    `out_dir` or in `EVALS_ROOT`; or the name of an evaluation by a file, with results in these folders.
    Places of the same name are one baseline. `tasks` are those of the new evaluation; with `by_harness` they
    are lm-eval's.
    Raises: ConfigError for a baseline without a result on any of the tasks, or of several models;
        CorruptRecord for a damaged result.
    """
    joined: dict[str, StoredBaseline] = {}
    for baseline in (_read_baseline(word, out_dir) for word in words):
        results = {**joined.get(baseline.name, baseline).results, **baseline.results}
        joined[baseline.name] = replace(baseline, results=results)
    wanted = {(by_harness, task) for task in tasks}
    baselines = []
    for baseline in joined.values():
        kinds = group_last(baseline.results)
        available = {(of is HarnessResult, task) for of, task, of_split in kinds if of_split in {None, split}}
        if not wanted & available:
            names = ", ".join(f"{name} (by lm-eval)" if by else name for by, name in sorted(available))
            raise ConfigError(
                f"the baseline {baseline.name} has no {split.value} result on {' or '.join(tasks)}",
                allowed=f"a baseline with one of the tasks; it has {names or 'none'}",
                next_step="name another baseline, or evaluate that one on the task first",
            )
        last: dict[Path, Result] = {}
        for (of, task, of_split), same in kinds.items():
            if len({result.model_digest for result in same.values()}) > 1:
                raise ConfigError(
                    f"{baseline.name} has results of several models on {task}: {', '.join(map(str, same))}",
                    allowed="the results of one model",
                    next_step="name one file, or the model whose results are meant",
                )
            if (of is HarnessResult, task) in wanted and of_split in {None, split}:
                last |= same
        baselines.append(replace(baseline, results=last))
    return baselines


def _read_baseline(word: str, out_dir: Path | None) -> StoredBaseline:
    name, _, place = word.rpartition("=")
    path = Path(place or "-").expanduser()
    if path.exists() and (results := read_stored(path)):
        return StoredBaseline(name=name or path.stem, results=results)
    stored: Mapping[Path, Result] = {}
    for root in {out_dir or EVALS_ROOT, EVALS_ROOT}:
        for folder in [root, *root.glob("*/")]:
            stored = {**stored, **read_stored(folder)}
    if path.is_dir():
        model = open_model(place)
        if model.run_path is not None:
            stored = {**stored, **read_stored(model.run_path)}
        matching = {file: result for file, result in stored.items() if result.model_digest == model.digest}
    else:
        matching = {file: result for file, result in stored.items() if file.name.startswith(f"{place}.")}
    if place and matching:
        return StoredBaseline(name=name or path.name, results=matching)
    raise ConfigError(
        f"the baseline {place or word!r} has no results",
        allowed="a result, a folder of results, a run; a model or an evaluation with results in"
        f" {EVALS_ROOT}/ or --out",
        next_step="correct it, or evaluate that model first",
    )
