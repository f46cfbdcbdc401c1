"""`strop ls [ROOT]`."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.brief import brief
from strop.cli.output import Output

if TYPE_CHECKING:
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
        _show_orphans(output, find_orphans([root], os.environ), is_json=json)
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
    rows += [_row_of_job(one) for one in jobs if not _has_begun(one, runs)]
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


def _row_of_job(job: JobStatus) -> tuple[object, ...]:
    name = Path(job.ref.home).name + (f"/members/{job.member}" if job.member else "")
    where = f"{job.ref.site} {job.ref.job_id}"
    return (name, job.state.value, 0, "-", _show_time(job.ref.submitted_at), where)


def _show_time(at: float | None) -> str:
    return "-" if at is None else f"{datetime.fromtimestamp(at, tz=UTC):%Y-%m-%d %H:%M}"


def _show_orphans(output: Output, found: list[tuple[str, str]], *, is_json: bool) -> None:
    if is_json:
        output.give_json([{"what": what, "why": why} for what, why in found])
    elif not found:
        output.say("no orphans")
    else:
        output.give_table(("what", "why it is one"), found)
