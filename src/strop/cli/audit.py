"""`strop audit TASK [key=value ...]` or `strop audit --all [TASK.key=value ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.audit import AuditReport, AuditSettings


def audit(
    context: typer.Context,
    task: Annotated[str | None, typer.Argument(help="Task name; see `strop tasks ls`.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="Settings of the task: max_value=50; with --all, after its name: gsm8k.source=folder.",
        ),
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="Number of examples to attack.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed that picks the examples.")] = 0,
    is_all: Annotated[
        bool, typer.Option("--all", help="Audit every task and reasoning-gym data set whose files are here.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the report to this file.")] = None,
    json: Json = False,
) -> None:
    """Attack a task before training on it. Exits with 76 if it is red: training refuses it too."""
    words = [word for word in (task, *(settings or ())) if word is not None]
    if (is_all and (out or not all("=" in word for word in words))) or not (is_all or words):
        raise typer.BadParameter("give either TASK with its settings, or --all with TASK.key=value settings")
    from strop.audit import AuditSettings, Verdict
    from strop.errors import CheckRefused
    from strop.run.audit import audit_here, read_task

    output: Output = context.obj
    wanted = AuditSettings(num_examples=num, seed=seed)
    if is_all:
        _audit_all(output, wanted, words, is_json=json)
        return
    report = audit_here(read_task(words[0], words[1:]), wanted, out=out)
    if json:
        output.give_json(report.to_json())
    else:
        _show(output, report)
    if report.verdict is Verdict.RED:
        names = ", ".join(result.probe for result in report.broken())
        lead = f"{report.lost}; " if report.lost else ""
        raise CheckRefused(
            f"{lead}task {report.task} is red: {names}",
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
    output.give(f"{report.task} {report.verdict.value} in {report.seconds:.1f} s")


def _audit_all(output: Output, settings: AuditSettings, words: Sequence[str], *, is_json: bool) -> None:
    """Audit everything whose files are here. A red data set is a finding here, not a failure."""
    from strop.errors import ConfigError, DataError
    from strop.run.audit import audit_here, list_audits

    rows, reports = [], {}
    for label, spec in list_audits(words):
        if spec is None:
            key = "parts" if label == "mixture" else "source"
            cause = f"needs files: --all {label}.{key}=..."
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
