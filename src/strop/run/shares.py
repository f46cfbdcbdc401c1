"""Evaluate a model as a file says, shared by processes: one for each group of GPUs, on each node of a job.

A node's process starts one child for each share of the examples, with separate GPUs, and waits for them. All
replies are written to the evaluation's folder, which all nodes see; the process of the first node then makes
the results. The same command run again continues a share that was killed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import EXIT_REFUSED, EXIT_USAGE, CheckRefused, ConfigError, EngineError
from strop.evaluate import EvalResult
from strop.evaluate.harness import HarnessResult
from strop.evaluate.stored import ScoreRow, StoredBaseline, list_rows, write_table
from strop.hardware import ChildProcess, spawn, terminate
from strop.hardware.gpus import read_gpus
from strop.hardware.visible_devices import VISIBLE_DEVICES, DeviceForm, parse_visible_devices
from strop.io import write_bytes_atomically
from strop.io.variables import level_variables, log_from, log_level_of, set_variables
from strop.record.fence import ATTEMPT_VARIABLE
from strop.rollout import Split
from strop.run.baselines import read_baselines
from strop.run.evaluation import (
    EVALS_ROOT,
    EvalRequest,
    evaluate_here,
    read_file_setup,
    read_run_of,
)
from strop.run.harness import evaluate_by_harness, read_harness_setup
from strop.run.inference import OpenedModel, open_model
from strop.spec import RunSpec, StoreSpec
from strop.spec.display import dotted, format_value
from strop.spec.eval_file import EvalFile, read_eval_file
from strop.spec.harness import HarnessSpec
from strop.spec.reader import AnySection, load_section
from strop.spec.train import EvalSpec
from strop.store import follow_store

_POLL_S = 0.5
_OWN_OUTPUT = Path("/proc/self/fd/2")
"""The children's output goes to this process's stderr."""
_REFUSALS = {EXIT_USAGE: ConfigError, EXIT_REFUSED: CheckRefused}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEvaluation:
    """The arguments of an evaluation by a file."""

    path: Path
    model: str | None = None
    """None: the model that the file names."""
    out_dir: Path | None = None
    may_run_code: bool = False
    num_workers: int | None = None
    """Processes on this machine. None: one for each group of GPUs."""
    node: tuple[int, int] = (0, 1)
    """Index of this node, and the number of nodes."""
    baselines: Sequence[str] = ()
    """Further ones than the file's, as `read_baselines` takes them."""
    words: Sequence[str] = ()
    """`key=value`, over those of the file; TASK.key=value for one of its tasks."""
    part: tuple[int, int] | None = None
    """Index of the share that this process evaluates, and the number of shares. None: it evaluates all, in
    child processes if there are several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileResults:
    """Results of an evaluation by a file; empty in a process that evaluates a share only."""

    own: Sequence[EvalResult] = ()
    harness: Sequence[HarnessResult] = ()
    rows: Sequence[ScoreRow] = ()
    table: Path | None = None


def evaluate_file(evaluation: FileEvaluation, *, say: Callable[[str], None]) -> FileResults:
    """Evaluate a model as a file says, with all GPUs of this machine, and write a table of all scores.

    Raises: ConfigError for an invalid file; CheckRefused or EngineError if a share ended with one; otherwise
        as `evaluate_here` and `evaluate_by_harness` do.
    """
    file = read_eval_file(evaluation.path, evaluation.words, is_job=True)
    name = evaluation.model or file.model_uri
    if name is None:
        raise ConfigError(
            f"{file.origin} names no model, and none is given",
            allowed="model.uri in the file, or a model before --config",
            next_step="name a run, a checkpoint, a folder or a hub id",
        )
    # In the environment: workers, engines and lm-eval inherit it.
    level = log_level_of(file.values.get(("output", "log_level")), "engine")
    with follow_store(_read_section(file, "store", StoreSpec)), set_variables(level_variables(level)):
        log_from(level)
        baselines: Sequence[StoredBaseline] = ()
        if evaluation.part is None and not evaluation.node[0]:
            baselines = read_file_baselines(file, evaluation.baselines, evaluation.out_dir)
        if evaluation.part is None:
            num_workers = _count_workers(file, evaluation, name)
            if num_workers * evaluation.node[1] > 1:
                _share_out(file, evaluation, name, num_workers, say)
                if evaluation.node[0]:
                    return FileResults()
        model = open_model(name)
        return _evaluate(file, evaluation, model, say, baselines)


def read_file_baselines(
    file: EvalFile, further: Sequence[str] = (), out_dir: Path | None = None
) -> list[StoredBaseline]:
    """Return the baselines that a file names, and further ones. Raises: like `read_baselines`."""
    counts: EvalSpec = file.counts
    names = _read_harness(file).tasks if file.is_by_harness else file.tasks
    words = [*counts.baselines, *further]
    return read_baselines(words, names, Split.HELD_OUT, by_harness=file.is_by_harness, out_dir=out_dir)


def require_readable(file: EvalFile, *, may_run_code: bool) -> None:
    """Refuse a file that is invalid for any model.

    Raises: ConfigError like `read_file_setup`, for settings of harness, and for code that was not confirmed.
    """
    if not file.is_by_harness:
        for task in file.tasks:
            read_file_setup(file, None, task)
        return
    harness, words = _read_harness(file), _harness_words(file, None)
    read_harness_setup(harness.tasks, words, _make_request(file), may_run_code=may_run_code)


def _evaluate(
    file: EvalFile,
    evaluation: FileEvaluation,
    model: OpenedModel,
    say: Callable[[str], None],
    baselines: Sequence[StoredBaseline],
) -> FileResults:
    part = evaluation.part or (0, 1)
    request = replace(_make_request(file), out_dir=evaluation.out_dir, part=part)
    own: Sequence[EvalResult] = ()
    harness: Sequence[HarnessResult] = ()
    run = read_run_of(model)
    if file.is_by_harness:
        tasks, words = _read_harness(file).tasks, _harness_words(file, run)
        harness = evaluate_by_harness(
            tasks, words, model, request, may_run_code=evaluation.may_run_code, say=say
        )
    else:
        setups = [read_file_setup(file, run, task) for task in file.tasks]
        own = [stored.result for stored in evaluate_here(setups, model, request, say=say)]
    if part != (0, 1):
        return FileResults()
    rows = list_rows([*own, *harness], baselines)
    table = write_table(rows, evaluation.out_dir or EVALS_ROOT, f"{file.name}-step-{model.step:06d}")
    return FileResults(own=own, harness=harness, rows=rows, table=table)


def _read_section(file: EvalFile, name: str, model: type[AnySection]) -> AnySection:
    values = {place: value for place, value in file.values.items() if place[0] == name}
    return load_section(
        name, model, [f"{dotted(place)}={format_value(value)}" for place, value in values.items()]
    )


def _read_harness(file: EvalFile) -> HarnessSpec:
    return _read_section(file, "harness", HarnessSpec)


def _make_request(file: EvalFile) -> EvalRequest:
    counts: EvalSpec = file.counts
    # lm-eval refuses samples, so the default number of samples is left out for it.
    has_samples = not file.is_by_harness or "num_samples" in counts.model_fields_set
    samples = counts.num_samples if has_samples else None
    return EvalRequest(num_examples=counts.num_examples, num_samples=samples, name=file.name)


def _harness_words(file: EvalFile, run: RunSpec | None) -> list[str]:
    """Return the words of `evaluate_by_harness`. `run`: the run that trained the model."""
    left_out = {"store", "job", "output"}
    values = {place: value for place, value in file.values.items() if place[0] not in left_out}
    values.pop(("harness", "tasks"), None)
    if run is not None:
        # Evaluated in the number format of the training; lm-eval chooses all else.
        values.setdefault(("model", "dtype"), run.model.dtype)
    return [f"{dotted(place)}={format_value(value)}" for place, value in values.items()]


def _count_workers(file: EvalFile, evaluation: FileEvaluation, name: str) -> int:
    """Return the number of processes on this node."""
    if file.is_by_harness:
        if evaluation.node[1] > 1 or evaluation.num_workers not in {None, 1}:
            raise ConfigError(
                "harness.tasks with several nodes or workers",
                allowed="one process, whose engine uses all GPUs of the machine",
                next_step="leave them out",
            )
        return 1
    if name.startswith(("http://", "https://")):
        # The server has its own GPUs, and batches requests.
        return evaluation.num_workers or 1
    num_gpus, per_copy = len(_list_devices()), _gpus_per_copy(file)
    if evaluation.num_workers is not None:
        if num_gpus and evaluation.num_workers * per_copy > num_gpus:
            raise ConfigError(
                f"--workers {evaluation.num_workers} with {per_copy} GPUs each, and this machine has"
                f" {num_gpus}",
                allowed=f"1 to {num_gpus // per_copy}",
                next_step="ask for fewer, or leave it out for one on each group of GPUs",
            )
        return evaluation.num_workers
    if num_gpus and num_gpus % per_copy:
        raise ConfigError(
            f"{num_gpus} GPUs, and {per_copy} share one copy of the model",
            allowed="a multiple: no GPU would be idle",
            next_step="change tensor_parallel, or give another number of GPUs",
        )
    return max(1, num_gpus // per_copy)


def _gpus_per_copy(file: EvalFile) -> int:
    return int(file.values.get(("engine", "tensor_parallel")) or 1)


def _list_devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = parse_visible_devices(os.environ.get(VISIBLE_DEVICES))
    if visible.form is DeviceForm.UNSET:
        return [str(index) for index in range(len(read_gpus()))]
    return list(visible.ids)


def _share_out(
    file: EvalFile, evaluation: FileEvaluation, name: str, num_workers: int, say: Callable[[str], None]
) -> None:
    """Run the shares of this node, and on the first node wait until the other nodes are done.

    Raises: CheckRefused, ConfigError or EngineError if a share of this node ended with one.
    """
    node, num_nodes = evaluation.node
    num_parts = num_workers * num_nodes
    say(
        f"shares {node * num_workers} to {node * num_workers + num_workers - 1} of {num_parts} are asked here"
    )
    devices, per_copy = _list_devices(), _gpus_per_copy(file)
    with ExitStack() as undo:
        children = []
        for index in range(num_workers):
            words = [
                sys.executable,
                "-m",
                "strop.cli",
                "eval",
                name,
                *evaluation.words,
                "--config",
                str(evaluation.path.absolute()),
            ]
            words += ["--part", f"{node * num_workers + index}/{num_parts}"]
            words += [] if evaluation.out_dir is None else ["--out", str(evaluation.out_dir)]
            words += ["--confirm-run-unsafe-code"] if evaluation.may_run_code else []
            own = devices[index * per_copy : (index + 1) * per_copy]
            variables = {**os.environ, **({VISIBLE_DEVICES: ",".join(own)} if devices else {})}
            child = spawn(words, _OWN_OUTPUT, variables)
            undo.callback(terminate, child, 5.0)
            children.append(child)
        _wait_for(children, say)
    if num_nodes == 1:
        return
    # By attempt: the marks of an earlier attempt are stale.
    marks = (evaluation.out_dir or EVALS_ROOT) / ".shares" / os.environ.get(ATTEMPT_VARIABLE, "here")
    marks.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(marks / str(node), b"")
    while node == 0 and not all((marks / str(other)).exists() for other in range(num_nodes)):
        # A node that fails ends the job, and this process with it.
        time.sleep(_POLL_S)


def _wait_for(children: Sequence[ChildProcess], say: Callable[[str], None]) -> None:
    """Wait until all have ended with 0. Raises: the refusal of the first that has not."""
    left = list(children)
    while left:
        for child in list(left):
            exit_code = child.poll()
            if exit_code is None:
                continue
            left.remove(child)
            if exit_code:
                kind = _REFUSALS.get(exit_code, EngineError)
                raise kind(
                    f"a share of the evaluation ended with {exit_code}",
                    allowed="shares that all end with 0",
                    next_step="see the lines above; the same command goes on with what is kept",
                )
        time.sleep(_POLL_S)
