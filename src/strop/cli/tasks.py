"""`strop tasks ls|new|check`, `strop envs run|export` and `strop audit`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output
from strop.errors import EXIT_FAILED

if TYPE_CHECKING:
    from strop.audit import AuditReport, AuditSettings

_TARGET = "RUN.toml|FILE.py:CLASS|NAME"

task_commands = typer.Typer(help="Tasks: the built-in ones, and your own.", no_args_is_help=True)


@task_commands.command("ls")
def list_tasks(context: typer.Context, json: Json = False) -> None:
    """List the tasks and environments that a run file can name."""
    from strop.spec.built_in import built_in_tasks
    from strop.user_code import TASKS_GROUP, announced

    output: Output = context.obj
    built_in = built_in_tasks()
    tasks = {name: listed["summary"] for name, listed in built_in.items()} | {
        name: f"Announced by {ref.place}." for name, ref in announced(TASKS_GROUP).items()
    }
    tasks["FILE.py:CLASS"] = "A task class of your own; `strop tasks new` writes a task to start from."
    if json:
        output.give_json(tasks)
        return
    plain = {name for name, listed in built_in.items() if listed["kind"].startswith("strop.tasks")}
    rows = [(name, "one" if name in plain else "several", text) for name, text in tasks.items()]
    output.give_table(("task", "turns", "what it asks"), rows)


@task_commands.command("new")
def new_task(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="[FOLDER/]NAME", help="Name of the task and of its files; where they are put."
        ),
    ],
) -> None:
    """Create a starter task: ten rows, a reward function, its test and a run file."""
    from strop.run.tasks import write_new_task

    output: Output = context.obj
    for written in write_new_task(path.name, path.parent):
        output.give(f"wrote {written}")
    output.give(f"next: strop tasks check {path}.toml")


@task_commands.command("check")
def check_task(
    context: typer.Context,
    target: Annotated[
        list[str],
        typer.Argument(
            metavar=f"{_TARGET} [key=value ...]",
            help="The task; its settings; and num=32, how many examples are tested and attacked.",
        ),
    ],
    json: Json = False,
) -> None:
    """Show what a task asks, and audit it. Exits with 76 if training would refuse it."""
    from strop.audit import Verdict
    from strop.errors import CheckRefused
    from strop.run.tasks import check_task_here, follow_task, read_audit
    from strop.view import make_harmless

    output: Output = context.obj
    settings, words = read_audit(target[1:])
    checked = check_task_here(context.with_resource(follow_task(target[0], words)), settings)
    is_red = checked.report.verdict is Verdict.RED
    faults = [result.describe() for result in checked.report.broken()] if is_red else []
    if json:
        output.give_json({"task": checked.task, "faults": faults, "audit": checked.report.to_json()})
    else:
        sizes = ", ".join(f"{number} {split.value}" for split, number in checked.num_examples.items())
        output.give(f"{checked.task}: {sizes} examples" + (f"; {checked.counts}" if checked.counts else ""))
        for message in checked.asked:
            output.give(f"{message.role}: {make_harmless(message.text)}")
        gold = "none is known" if checked.gold is None else make_harmless(checked.gold)
        output.give(f"right: {gold}")
        output.give(f"audit {checked.report.verdict}")
    if faults:
        raise CheckRefused(
            f"{checked.report.lost}task {checked.task} may not train a model: {'; '.join(faults[:3])}",
            allowed="a task that pays for right replies and for nothing else",
            next_step=f"mend it; `strop audit` shows each probe; {len(faults)} findings in all",
        )


def audit(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            help="Run file, FILE.py:CLASS, or task name; see `strop tasks ls`. all: every task whose files"
            " are here.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="Settings of the task, max_value=50; for all after its name, gsm8k.source=folder; and"
            " seed=1, which picks the examples, num=32, how many.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the report to this file.")] = None,
    json: Json = False,
) -> None:
    """Attack a task before training on it. Exits with 76 if it is red: training refuses it too."""
    if task == "all" and out is not None:
        raise typer.BadParameter("--out takes the report of one task, not of all")
    from strop.audit import Verdict
    from strop.errors import CheckRefused
    from strop.run.tasks import audit_here, follow_task, read_audit

    output: Output = context.obj
    audit_settings, words = read_audit(settings or ())
    if task == "all":
        _audit_all(output, audit_settings, words, is_json=json)
        return
    report = audit_here(context.with_resource(follow_task(task, words)), audit_settings, out=out)
    if json:
        output.give_json(report.to_json())
    else:
        _show(output, report)
    if report.verdict is Verdict.RED:
        names = ", ".join(result.probe for result in report.broken())
        raise CheckRefused(
            f"{report.lost}task {report.task} is red: {names}",
            allowed="a task that pays for nothing but right replies",
            next_step="mend the task, or train all the same with train.accept = 'audit.PROBE: reason'",
        )


def _show(output: Output, report: AuditReport) -> None:
    from strop.view import make_harmless

    rows = [
        (
            result.probe,
            result.status.value,
            "-" if result.value is None else f"{result.value:.4g}",
            "-" if result.limit is None else f"{result.limit:.4g}",
            str(result.num),
            result.detail,
        )
        for result in report.probes
    ]
    output.give_table(("probe", "status", "value", "limit", "judged", "what"), rows)
    for result in report.broken():
        for entry in result.evidence:
            reply = make_harmless(repr(entry.reply))
            why = f"; {make_harmless(entry.detail)}" if entry.detail else ""
            output.give(
                f"{result.probe}: example {entry.example_id}, reward {entry.reward}, reply {reply}{why}"
            )
    if report.unjudged:
        output.give(f"judged nothing: {', '.join(report.unjudged)}")
    output.give(f"{report.task} {report.verdict.value} in {report.seconds:.1f} s")


def _audit_all(output: Output, settings: AuditSettings, words: Sequence[str], *, is_json: bool) -> None:
    """Audit every task whose files are here. A red task is a finding and not a failure."""
    from strop.errors import ConfigError, DataError
    from strop.run.tasks import audit_here, list_audits

    rows, reports = [], {}
    for label, spec in list_audits(words):
        if spec is None:
            needed = {"mixture": "files: mixture.parts"}
            needed |= {"verifiers": "a taskset: verifiers.taskset", "mlgym": "a checkout: mlgym.root"}
            needed |= {"harbor": "task directories: harbor.root", "openenv": "a server: openenv.url"}
            cause = f"needs {needed.get(label, f'files: {label}.source')}=..."
            rows.append((label, "-", cause))
            reports[label] = {"verdict": None, "cause": cause}
            continue
        try:
            report = audit_here(spec, settings)
        except (ConfigError, DataError) as error:
            rows.append((label, "-", str(error).splitlines()[0][:100]))
            reports[label] = {"verdict": None, "cause": str(error)}
            continue
        reports[label] = report.to_json()
        rows.append((label, report.verdict.value, ", ".join(result.probe for result in report.broken())))
        output.say(" ".join(rows[-1]))
    if is_json:
        output.give_json(reports)
    else:
        output.give_table(("task", "verdict", "what"), rows)


environment_commands = typer.Typer(
    help="Environments: tasks whose attempts have several turns.", no_args_is_help=True
)


@environment_commands.command("run")
def play(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar=f"{_TARGET} [key=value ...]",
            help="The environment, see `strop tasks ls`; its settings; and seed=1, which picks the example.",
        ),
    ],
) -> None:
    """Play an environment in the model's place: a line is a reply, /TOOL key=value a call."""
    from strop.run.tasks import follow_task, play_here, read_audit
    from strop.tasks.failures import describe_failure
    from strop.view import make_harmless

    output: Output = context.obj
    audit_settings, settings = read_audit(words[1:])

    def read() -> str | None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    outcome = play_here(
        context.with_resource(follow_task(words[0], settings)),
        audit_settings.seed,
        read,
        lambda text: output.give(make_harmless(text)),
    )
    if outcome.failure is not None:
        output.give(f"no score: {make_harmless(describe_failure(outcome.failure))}")
    reward = "-" if outcome.reward is None else f"{outcome.reward:.4g}"
    right = {None: "", True: ", right", False: ", not right"}[outcome.is_correct]
    metrics = "".join(f", {name} {value:g}" for name, value in outcome.metrics.items())
    output.give(f"score: {reward}{right}{metrics}")
    if outcome.failure is not None:
        raise typer.Exit(EXIT_FAILED)
