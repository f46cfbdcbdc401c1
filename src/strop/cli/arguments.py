"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

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


def add_output_dir(overrides: Sequence[str] | None, path: str | None) -> list[str]:
    """Return overrides with --output-dir, relative to the current folder. Raises: as `add_override`."""
    from strop.spec.sources import add_override

    absolute = None if path is None else str(Path(path).absolute())
    return add_override(overrides, "output.dir", absolute, "--output-dir")
