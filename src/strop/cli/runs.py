"""`strop ls [ROOT]`, `strop compare RUN RUN` and `strop view RUN`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json, brief
from strop.cli.eval import percent
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.evaluate import Comparison, Interval, Summary
    from strop.launch.contract import JobStatus
    from strop.run.runs import RunSummary


@brief
def list_runs(
    context: typer.Context,
    root: Annotated[Path, typer.Argument(help="Folder of runs.")] = Path("runs"),
    everywhere: Annotated[
        bool, typer.Option("--all", help="Include jobs whose directory is elsewhere.")
    ] = False,
    orphans: Annotated[
        bool,
        typer.Option("--orphans", help="Only jobs without a directory, and directories whose job is gone."),
    ] = False,
    json: Json = False,
) -> None:
    """List runs and jobs with their status, newest first."""
    from strop.launch.status import find_orphans, list_statuses, status_to_json
    from strop.run.runs import summarize_runs

    output: Output = context.obj
    if orphans:
        found = find_orphans([root], os.environ)
        if json:
            output.give_json([{"what": what, "why": why} for what, why in found])
        elif not found:
            output.say("no orphans")
        else:
            output.give_table(("what", "why it is one"), found)
        return
    runs = summarize_runs(root)
    known = list_statuses([root], os.environ)
    jobs = [one for one in known if everywhere or Path(one.ref.home).parent == root.resolve()]
    if json:
        by_home = {one.ref.home: status_to_json(one) for one in jobs}
        output.give_json(
            [
                asdict(run) | {"path": str(run.path), "job": by_home.get(str(run.path.resolve()))}
                for run in runs
            ]
            + [status_to_json(one) for one in jobs if not _has_begun(one, runs)]
        )
        return
    rows = [_row_of_run(run, jobs) for run in runs]
    for one in jobs:
        if not _has_begun(one, runs):
            name = Path(one.ref.home).name + (f"/members/{one.trial}" if one.trial else "")
            where = f"{one.ref.site} {one.ref.job_id}"
            rows.append((name, one.state.value, 0, "-", _show_time(one.ref.submitted_at), where))
    if not rows:
        output.say(f"no runs in {root}")
        return
    output.give_table(("run", "state", "steps", "held-out accuracy", "begun (UTC)", "job"), rows)


def _has_begun(status: JobStatus, runs: list[RunSummary]) -> bool:
    """Whether a job's run is in the list of runs by itself."""
    return any(str(run.path.resolve()) == status.ref.home for run in runs)


def _row_of_run(run: RunSummary, jobs: list[JobStatus]) -> tuple[object, ...]:
    job = next((one for one in jobs if one.ref.home == str(run.path.resolve())), None)
    return (
        run.path.name,
        run.phase.value if job is None else job.state.value,
        run.num_steps,
        "-" if run.last_accuracy is None else f"{run.last_accuracy:.1%}",
        _show_time(run.created_at),
        "-" if job is None else f"{job.ref.site} {job.ref.job_id}",
    )


def _show_time(at: float | None) -> str:
    return "-" if at is None else f"{datetime.fromtimestamp(at, tz=UTC):%Y-%m-%d %H:%M}"


def compare(
    context: typer.Context,
    before: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a result of `strop eval`.")],
    after: Annotated[Path, typer.Argument(metavar="RUN", help="The run or result to compare with it.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Setting that may differ; any other difference is refused. Repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare the last evaluations of two runs on the same examples, and list settings that differ."""
    from strop.run.runs import compare_runs

    output: Output = context.obj
    found = compare_runs(before, after, declared=vary or None)
    if json:
        output.give_json(
            {
                "change": asdict(found.change),
                "before": found.before.model_dump(mode="json"),
                "after": found.after.model_dump(mode="json"),
                "differences": [asdict(difference) for difference in found.differences],
            }
        )
        return
    rows = _comparison_rows("", found.before.scores, found.after.scores, found.change)
    for label, change in found.change.parts.items():
        one, other = found.before.parts[label], found.after.parts[label]
        rows += _comparison_rows(f"{label}: ", one.scores, other.scores, change)
    output.give_table(("replies", "share", "first", "second", "change", "95% interval"), rows)
    for label, comparison in {"": found.change, **found.change.parts}.items():
        for name, moved in (("greedy", comparison.greedy), ("sampled", comparison.sampled)):
            if moved is not None:
                output.give(
                    f"{label}{': ' if label else ''}{name}: {moved.num_gained} of {moved.num_examples}"
                    f" examples solved more often, {moved.num_lost} less often, p = {moved.p_value:.2g}"
                )
    output.give(
        "intervals are over problems, of one seed each: what another seed would change is not in them"
    )
    if found.differences and not vary:
        keys = ", ".join(difference.key for difference in found.differences)
        output.give(f"no verdict on a cause: nothing was declared with --vary, and these differ: {keys}")
    if found.differences:
        settings = [(difference.key, difference.before, difference.after) for difference in found.differences]
        output.give_table(("setting", "first", "second"), settings)


def _comparison_rows(
    label: str, before: Mapping[str, Summary], after: Mapping[str, Summary], comparison: Comparison
) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for kind, change in (("greedy", comparison.greedy), ("sampled", comparison.sampled)):
        if kind not in before or kind not in after:
            continue
        name, one, other = f"{label}{kind}", before[kind], after[kind]
        accuracies = percent(one.accuracy), percent(other.accuracy)
        rows.append((name, "accuracy", *accuracies, *_show_change(change)))
        if change is not None and change.format_ok is not None:
            shares = percent(one.format_ok_frac), percent(other.format_ok_frac)
            rows.append((name, "format ok", *shares, *_show_change(change.format_ok)))
            in_both = _show_change(change.in_format)
            rows.append((name, "accuracy where both have the format", "", "", *in_both))
    return rows


def _show_change(change: Interval | None) -> tuple[str, str]:
    if change is None:
        return "-", "-"
    return f"{change.estimate:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}"


def view(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
) -> None:
    """Rewrite the report of a run, finished or not, and print its path."""
    from strop.view.report import write_report

    output: Output = context.obj
    output.give(str(write_report(run)))
