"""`strop view RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.output import Output


def view(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
) -> None:
    """Rewrite the report of a run, finished or not, and print its path."""
    from strop.view.report import write_report

    output: Output = context.obj
    output.give(str(write_report(run)))
