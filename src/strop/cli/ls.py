"""`strop ls [ROOT]`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output


def list_runs(
    context: typer.Context,
    root: Annotated[Path, typer.Argument(help="Folder with runs in it.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List runs, newest first, and where each stands."""
    from strop.launch.runs import summarize_runs

    output: Output = context.obj
    runs = summarize_runs(root)
    if json:
        output.give_json([asdict(run) | {"path": str(run.path)} for run in runs])
        return
    if not runs:
        output.say(f"no runs in {root}")
        return
    rows = [
        (
            run.path.name,
            run.phase.value,
            run.num_steps,
            "-" if run.last_accuracy is None else f"{run.last_accuracy:.1%}",
            "-"
            if run.created_at is None
            else f"{datetime.fromtimestamp(run.created_at, tz=UTC):%Y-%m-%d %H:%M}",
        )
        for run in runs
    ]
    output.give_table(("run", "state", "steps", "held-out accuracy", "begun (UTC)"), rows)
