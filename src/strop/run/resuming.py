"""Finding or making the directory of a run, and the check of its record before the run goes on."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from strop.errors import CheckRefused, CorruptRecord
from strop.evaluate import read_result
from strop.record import RunDir, find_resumable, list_runs
from strop.record.files import list_shards
from strop.record.parts import PARTS_FACT, require_same_parts
from strop.record.rollouts import verify_rollouts
from strop.record.run_dir import DISCARDED, STATE_NAME, step_of
from strop.spec import ResolvedSpec, RunSpec, spec_digest, write_spec
from strop.spec.description import list_spec_differences

DATE_FACT = "date"
_SAMPLED = "prompt_too_long_frac"
"""A metric of every step that sampled rollouts."""


def open_run(resolved: ResolvedSpec, facts: dict[str, object], *, is_new: bool) -> RunDir:
    """Return the directory of an unfinished run or of a new one, with its lock held.

    An unfinished run that was begun with other parts, such as another version of its task, and has no trained
    step is ignored: a new run begins.

    Raises: CheckRefused if `output.dir` is in use, finished, or holds the run of another spec; if the run to
        resume was trained with other parts, naming them.
    """
    run_dir = _open_run(resolved, facts, is_new=is_new)
    before, now = run_dir.state.facts.get(PARTS_FACT, {}), cast(dict[str, str], facts[PARTS_FACT])
    try:
        require_same_parts(run_dir.path, before, now)
    except CheckRefused:
        run_dir.release()
        if resolved.spec.output.dir is None and not run_dir.metrics.read():
            return _open_run(resolved, facts, is_new=True)
        raise
    return run_dir


def find_date(spec: RunSpec, *, is_new: bool) -> str:
    """Return the date that templates print in a run: that of the run which would go on, or today's."""
    if spec.output.dir is not None:
        path = Path(spec.output.dir)
        runs = [RunDir.open(path)] if (path / STATE_NAME).exists() else []
    else:
        runs = [] if is_new else list_runs(Path(spec.output.root), spec.name)
    digest, today = spec_digest(spec), dt.datetime.now().astimezone().date().isoformat()
    wanted = (run.state for run in runs if not run.is_finished and run.state.spec_digest == digest)
    return next((str(state.facts.get(DATE_FACT, today)) for state in wanted), today)


def _open_run(resolved: ResolvedSpec, facts: dict[str, object], *, is_new: bool) -> RunDir:
    spec, text, digest = resolved.spec, write_spec(resolved), spec_digest(resolved.spec)
    if spec.output.dir is not None:
        path = Path(spec.output.dir)
        if not path.exists() or ((path / "attempts").is_dir() and not (path / STATE_NAME).exists()):
            # Nothing is there, or a launcher has prepared the folder and no run has begun in it.
            return RunDir.adopt(path, spec.name, text, digest, facts)
        if is_new:
            raise CheckRefused(
                f"a new run was asked for, and output.dir={path} is there already",
                allowed="a directory that does not exist yet",
                next_step="choose another output.dir, or leave --new out to continue the run in it",
            )
        run_dir = RunDir.open(path)
        run_dir.acquire()
        if run_dir.state.spec_digest == digest and not run_dir.is_finished:
            return run_dir
        run_dir.release()
        content = "a finished run; nothing is left to do there"
        if run_dir.state.spec_digest != digest:
            changed = list_spec_differences(run_dir.spec_path.read_text(), text)
            content = f"a run with other settings: {changed or 'its spec.toml was changed'}"
        raise CheckRefused(
            f"output.dir={path} holds {content}",
            allowed="a new directory, or the unfinished run of this very spec",
            next_step="choose another output.dir, or restore these settings to go on with that run",
        )
    root = Path(spec.output.root)
    resumable = None if is_new else find_resumable(root, spec.name, digest)
    return resumable or RunDir.create(root, spec.name, text, digest, facts)


def check_record(run_dir: RunDir, task: str, eval_every: int | None) -> list[str]:
    """Read all that was recorded up to the last checkpoint; return a notice for each part that is missing.

    Later records are not read: a resume writes them again. Without a checkpoint nothing is.

    Raises: CorruptRecord naming the file if a log, a result or a file of rollouts is damaged, or
        `metrics.jsonl` lacks a step.
    """
    latest = run_dir.latest_checkpoint()
    if latest is None:
        return []
    last = latest[0]
    run_dir.events.read()
    run_dir.timeline.read_lines()
    lines = [line for line in run_dir.metrics.read() if line["step"] <= last]
    if [line["step"] for line in lines] != list(range(1, last + 1)):
        missing = sorted(set(range(1, last + 1)) - {int(line["step"]) for line in lines})
        raise CorruptRecord(
            f"{run_dir.metrics.path} has {len(lines)} lines up to step {last}"
            + (f", and none of step {_join(missing)}" if missing else ", not in the order of their steps"),
            allowed=f"one line for each step up to {latest[1].name}, in order",
            next_step=f"restore the file from a copy, or remove {latest[1]} to go on from an earlier one",
        )
    of_steps = [*(run_dir.path / "eval").glob("*.json"), *run_dir.rollouts_files()]
    of_steps += (run_dir.path / DISCARDED).glob("*.parquet")
    for path in sorted(path for path in of_steps if (step_of(path) or 0) <= last):
        if path.suffix == ".json":
            read_result(path)
        for file in list_shards(path.with_suffix("")) if path.suffix == ".json" else [path]:
            verify_rollouts(file)
    evaluated = [0, *(range(eval_every, last + 1, eval_every) if eval_every is not None else ())]
    lost = {
        "evaluation": [step for step in evaluated if not run_dir.eval_path(task, step).exists()],
        "file of rollouts": [
            step
            for line in lines
            if _SAMPLED in line and not run_dir.rollouts_path(step := int(line["step"])).exists()
        ],
    }
    return [
        f"the record has no {name} of step {_join(steps)} any more" for name, steps in lost.items() if steps
    ]


def _join(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return shown if len(steps) <= 8 else f"{shown} and {len(steps) - 8} more"
