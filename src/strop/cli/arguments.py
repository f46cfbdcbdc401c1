"""Arguments and options that several commands share, and decorators that make short commands quick."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from strop.spec.reader import Flag


class SplitName(StrEnum):
    """The names of `strop.rollout.Split`, whose module needs numpy, which `strop --help` must not load."""

    HELD_OUT = "held_out"
    TRAIN = "train"


RunFile = Annotated[str, typer.Argument(metavar="RUN.toml", help="Run file (TOML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Overrides of the run file's settings."),
]
ASK_SETTINGS = (
    "Settings of the task (max_value=50), or in full: sampling.temperature=0.6, model.dtype=float32,"
    " model.prompt_format=base, placement.threads=2; and seed=1."
)
AskSettings = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help=ASK_SETTINGS)]
_MODEL = typer.Argument(
    metavar="MODEL", help="A run, a checkpoint, a model directory, a hub id or pypi:NAME==VERSION."
)
ModelName = Annotated[str, _MODEL]
NamedModel = Annotated[str | None, _MODEL]
"""For commands whose file may name the model instead."""
NewRun = Annotated[
    bool, typer.Option("--new", help="Start a new run even if an unfinished one could be resumed.")
]
FromMirror = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="URI",
        help="Resume a run from its mirror, such as s3://bucket/prefix/checkpoints/NAME.",
    ),
]
OutputDir = Annotated[str | None, typer.Option(help="Run directory. Default: a new one, dated.")]
Gpus = Annotated[int | None, typer.Option(min=0, max=8, help="GPUs per node, all for the learner.")]
TrainGpus = Annotated[int | None, typer.Option(min=1, max=4, help="GPUs for the learner.")]
InferGpus = Annotated[int | None, typer.Option(min=1, max=7, help="GPUs for generation.")]
SingleGpu = Annotated[bool, typer.Option("--single-gpu", help="Use one GPU for both learner and generation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
JsonEvents = Annotated[
    bool, typer.Option("--json", help="Print a line of JSON for each step, event and evaluation.")
]
T = TypeVar("T")


def takes(options_type: type[T]) -> Callable[[Callable[[typer.Context, T], None]], Callable[..., None]]:
    """Turn a function of a dataclass into a command; its fields are annotated like parameters for Typer."""

    def decorate(command: Callable[[typer.Context, T], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            command(context, options_type(**values))

        hints = get_type_hints(options_type, include_extras=True)
        parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        for field in fields(options_type):  # type: ignore[arg-type]
            default = Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
            )
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


_SETTINGS = {
    "gpus": "job.gpus",
    "train_gpus": "job.train_gpus",
    "infer_gpus": "job.infer_gpus",
    "nodes": "job.nodes",
    "cpus_per_gpu": "job.cpus_per_gpu",
    "time": "job.time_limit",
    "job_name": "name",
}
"""Option to setting."""
_PATHS = {"output_dir": "output.dir"}
"""Options whose paths are relative to the current folder."""


def to_flags(args: object) -> tuple[Flag, ...]:
    """Return the settings in a command's arguments; the command need not have all options."""
    from strop.spec.reader import Flag

    settings = _SETTINGS | _PATHS
    values = {name: getattr(args, name, None) for name in settings}
    # Text, because a site of SageMaker takes a list for this machine's GPUs.
    if isinstance(text := values["gpus"], str) and text.isdecimal():
        values["gpus"] = int(text)
    flags = [
        Flag(
            key=settings[name],
            value=str(Path(value).absolute()) if name in _PATHS else value,
            name=f"--{name.replace('_', '-')}",
        )
        for name, value in values.items()
        if value is not None
    ]
    if getattr(args, "single_gpu", False):
        flags.append(Flag(key="job.single_gpu", value=True, name="--single-gpu"))
    return tuple(flags)


P = ParamSpec("P")
_LASTING_THRESHOLD = 50_000
"""Number of new objects at which the collector runs."""


def brief(command: Callable[P, None]) -> Callable[P, None]:
    """Run a command without Python's cyclic garbage collector: its memory is freed with its process.

    A tenth of a plan's time went into scanning modules and vocabulary, none of which is garbage.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        # Also at the interpreter's exit, which scans everything twice.
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            command(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return run


@contextmanager
def lasting() -> Iterator[None]:
    """Enable the collector again while a brief command waits, because hours of garbage add up.

    It runs seldom and skips imported objects: a busy service creates many objects that are no garbage, and
    scanning them all takes as long as many replies.
    """
    was_enabled, before = gc.isenabled(), gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_LASTING_THRESHOLD)
    gc.enable()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        if not was_enabled:
            gc.disable()
