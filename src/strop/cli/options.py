"""A command's arguments and options as one dataclass, for commands that have many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import typer

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
