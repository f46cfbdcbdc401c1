"""`strop tasks ls`, `new NAME`, `check TARGET` and `check-judge RUN.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Json, Overrides, RunFile
from strop.cli.output import Output

task_commands = typer.Typer(help="Tasks: the built-in ones, and your own.", no_args_is_help=True)


@task_commands.callback()
def _group() -> None:
    """Tasks: the built-in ones, and your own."""


@task_commands.command("ls")
def list_tasks(context: typer.Context, json: Json = False) -> None:
    """List the tasks that a run file can name."""
    from strop.tasks import TASK_SUMMARIES
    from strop.user_code import TASKS_GROUP, announced

    output: Output = context.obj
    installed = {name: f"Announced by {ref.place}." for name, ref in announced(TASKS_GROUP).items()}
    own = {"FILE.py:CLASS": "A task class of your own; `strop tasks new` writes a task to start from."}
    known = {**TASK_SUMMARIES, **installed, **own}
    if json:
        output.give_json(known)
        return
    output.give_table(("task", "what it asks"), list(known.items()))


@task_commands.command("new")
def new_task(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the task and of its files.")],
    folder: Annotated[Path, typer.Option("--in", help="Folder for the files.")] = Path(),
) -> None:
    """Create a starter task: ten rows, a reward function, its test and a run file."""
    from strop.run.new_task import write_new_task

    output: Output = context.obj
    for path in write_new_task(name, folder):
        output.give(f"wrote {path}")
    output.give(f"next: strop tasks check {folder / name}.toml")


@task_commands.command("check")
def check_task(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="RUN.toml, FILE.py:CLASS, or the name of a task.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value ...]", help="Settings of the task.")
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="Number of examples to test and attack.")] = 32,
    json: Json = False,
) -> None:
    """Show what a task asks, test its verifier and audit it. Exits with 76 if training would refuse it."""
    from strop.audit import AuditSettings, Verdict
    from strop.errors import CheckRefused
    from strop.run.audit import check_task_here, find_task_section
    from strop.view import make_harmless

    output: Output = context.obj
    found = check_task_here(find_task_section(target, settings or ()), AuditSettings(num_examples=num))
    faults = [finding.describe() for finding in found.findings]
    red = found.report.broken() if found.report.verdict is Verdict.RED else []
    faults += [f"audit: {result.probe}: {result.detail}" for result in red]
    if json:
        output.give_json({"task": found.task, "faults": faults, "audit": found.report.to_json()})
    else:
        sizes = ", ".join(f"{number} {split.value}" for split, number in found.num_examples.items())
        output.give(f"{found.task}: {sizes} examples" + (f"; {found.counts}" if found.counts else ""))
        for message in found.asked:
            output.give(f"{message.role}: {make_harmless(message.text)}")
        gold = "none is known" if found.gold is None else make_harmless(found.gold)
        output.give(f"right: {gold}")
        output.give(f"verifier {'fails' if found.findings else 'passes'}, audit {found.report.verdict.value}")
    if faults:
        raise CheckRefused(
            f"task {found.task} may not train a model: {'; '.join(faults[:3])}",
            allowed="a task that pays for right replies and for nothing else",
            next_step=f"mend it; `strop audit` shows each probe; {len(faults)} findings in all",
        )


@task_commands.command("check-judge")
def check_judge(
    context: typer.Context, run_file: RunFile, overrides: Overrides = None, json: Json = False
) -> None:
    """Compare the judges of a run with human labels and with themselves. Exits with 76 if they disagree."""
    from dataclasses import asdict

    from strop.errors import CheckRefused
    from strop.run.audit import check_judges_here
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
            "; ".join(faults),
            allowed="a judge that agrees with people and with itself",
            next_step="make the rubric clearer, or name a stronger judge",
        )
