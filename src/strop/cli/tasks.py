"""`strop tasks ls` and `strop tasks check-judge RUN.toml`."""

from __future__ import annotations

import typer

from strop.cli.arguments import Json, Overrides, RunFile
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


@task_commands.command("check-judge")
def check_judge(
    context: typer.Context, run_file: RunFile, overrides: Overrides = None, json: Json = False
) -> None:
    """Compare the judges of a run with people, and with themselves. Ends with 76 where they disagree."""
    from dataclasses import asdict

    from strop.errors import CheckRefused, explain_refusal
    from strop.launch.judging import check_judges_here
    from strop.spec import load_spec

    output: Output = context.obj
    reports = check_judges_here(load_spec(run_file, overrides or ()).spec)
    if json:
        output.give_json([asdict(report) for report in reports])
    else:
        for report in reports:
            output.give(report.describe())
    faults = [f"{report.judge}: {fault}" for report in reports for fault in report.faults]
    if faults:
        raise CheckRefused(
            explain_refusal(
                "; ".join(faults),
                allowed="a judge that agrees with people and with itself",
                next_step="make the rubric clearer, or name a stronger judge",
            )
        )
