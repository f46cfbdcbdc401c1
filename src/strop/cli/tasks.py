"""`strop tasks ls`."""

from __future__ import annotations

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

task_commands = typer.Typer(help="The built-in tasks.", no_args_is_help=True)


@task_commands.callback()
def _group() -> None:
    """The built-in tasks."""


@task_commands.command("ls")
def list_tasks(context: typer.Context, json: Json = False) -> None:
    """List the tasks that a run file can name."""
    from strop.tasks import TASK_SUMMARIES

    output: Output = context.obj
    if json:
        output.give_json(dict(TASK_SUMMARIES))
        return
    output.give_table(("task", "what it asks"), list(TASK_SUMMARIES.items()))
