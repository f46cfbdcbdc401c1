"""Commands about recorded runs: `strop ls`, `compare`, `view`, `query` and `report`."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output
from strop.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from strop.launch.contract import JobStatus
    from strop.record.files import RecordFiles
    from strop.run.runs import Arm, ManyComparison, RunSummary
    from strop.view.places import Runs

Place = Annotated[
    str,
    typer.Argument(
        metavar="[PLACE]", help="A run, a folder of runs, a job, or runs in a store (s3://bucket/prefix)."
    ),
]


def list_runs(
    context: typer.Context,
    root: Annotated[
        str | None,
        typer.Argument(
            metavar="[PLACE]",
            help="Folder of runs (default: runs, and run_root of each site), or a place in a store, such as"
            " s3://bucket/prefix, whose records and files are listed.",
        ),
    ] = None,
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
    from strop.launch.sites import list_run_roots
    from strop.launch.status import find_orphans, list_statuses, status_to_json
    from strop.run.runs import summarize_runs

    output: Output = context.obj
    if root is not None and "://" in root:
        _list_store(output, root, is_json=json)
        return
    roots = [Path(root)] if root else [Path("runs"), *list_run_roots(Path.cwd(), os.environ)]
    if orphans:
        orphaned = find_orphans(roots, os.environ)
        if json:
            output.give_json([{"what": what, "why": why} for what, why in orphaned])
        elif not orphaned:
            output.say("no orphans")
        else:
            output.give_table(("what", "why it is one"), orphaned)
        return
    places = [place for place in roots if place.is_dir()] or roots[:1]
    statuses = list_statuses(roots, os.environ)
    shown = {place.resolve() for place in places}
    jobs = [job for job in statuses if everywhere or Path(job.ref.home).parent in shown]
    # A folder that is not there hides no job that is elsewhere.
    lists = [] if jobs and not places[0].is_dir() else [summarize_runs(place) for place in places]
    runs = sorted(chain(*lists), key=lambda run: run.created_at or 0.0, reverse=True)
    if json:
        by_home = {job.ref.home: status_to_json(job) for job in jobs}
        output.give_json(
            [
                asdict(run) | {"path": str(run.path), "job": by_home.get(str(run.path.resolve()))}
                for run in runs
            ]
            + [status_to_json(job) for job in jobs if not _has_begun(job, runs)]
        )
        return
    rows = [_row_of_run(run, jobs) for run in runs]
    for job in jobs:
        if not _has_begun(job, runs):
            name = Path(job.ref.home).name + (f"/members/{job.trial}" if job.trial else "")
            where = f"{job.ref.site} {job.ref.job_id}"
            rows.append((name, job.state.value, 0, "-", _show_time(job.ref.submitted_at), where))
    if not rows:
        output.say(f"no runs in {', '.join(map(str, places))}")
        return
    output.give_table(("run", "state", "steps", "held-out accuracy", "begun (UTC)", "job"), rows)


def _list_store(output: Output, uri: str, *, is_json: bool) -> None:
    from strop.store.opening import list_contents

    contents = list_contents(uri)
    if is_json:
        output.give_json([asdict(entry) for entry in contents])
    elif not contents:
        output.say("nothing is there")
    else:
        rows = [
            (entry.name, entry.state, entry.num_files, f"{entry.size_bytes / 1e6:.1f} MB")
            for entry in contents
        ]
        output.give_table(("name", "state", "files", "size"), rows)


def _has_begun(status: JobStatus, runs: list[RunSummary]) -> bool:
    """Whether the list of runs already has a job's run."""
    return any(str(run.path.resolve()) == status.ref.home for run in runs)


def _row_of_run(run: RunSummary, jobs: list[JobStatus]) -> tuple[object, ...]:
    home = str(run.path.resolve())
    job = next((job for job in jobs if job.ref.home == home), None)
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
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN [RUN ...]",
            help="Runs, or results of `strop eval`. The others are compared with the first.",
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Setting that may differ; any other difference is refused. Repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare last evaluations with the first run's, on the same examples, and list settings that differ."""
    from strop.run.runs import compare_many
    from strop.view.comparison import COLUMNS, list_changes_in_words, list_remarks

    output: Output = context.obj
    comparison = compare_many(runs, declared=vary or None)
    if json:
        output.give_json(_comparison_to_json(comparison))
        return
    output.give_table(
        COLUMNS,
        list_changes_in_words(comparison),
        title=f"Compared with {comparison.baseline.label}",
    )
    for line in list_remarks(comparison, is_declared=bool(vary)):
        output.give(line)
    if comparison.settings:
        names = (comparison.baseline.label, *(other.arm.label for other in comparison.others))
        output.give_table(
            ("setting", *names), [(setting.key, *setting.values) for setting in comparison.settings]
        )


def _comparison_to_json(comparison: ManyComparison) -> dict[str, Any]:
    def show(arm: Arm) -> dict[str, Any]:
        return {
            "name": arm.name,
            "paths": [str(path) for path in arm.paths],
            "seeds": arm.seeds,
            "results": [result.model_dump(mode="json") for result in arm.results],
        }

    return {
        "baseline": show(comparison.baseline),
        "others": [
            {
                **show(other.arm),
                "change": asdict(other.change),
                "p_values_holm": dict(other.p_values),
                "over_seeds": {kind: asdict(interval) for kind, interval in other.over_seeds.items()},
            }
            for other in comparison.others
        ],
        "settings": [{"key": setting.key, "values": setting.values} for setting in comparison.settings],
        "notes": comparison.notes,
    }


def view(
    context: typer.Context,
    place: Place = "runs",
    address: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address of the page; any but the loopback needs a token."),
    ] = "127.0.0.1",
    notes: Annotated[bool, typer.Option("--notes", help="Let the page write a run's notes.md.")] = False,
) -> None:
    """Show runs in a browser, live: curves, rollouts token by token, alarms, comparisons."""
    from strop.engine.openai import require_server_part

    require_server_part("starlette", "the page")
    from strop.view.server import Address, serve

    output: Output = context.obj
    listening = Address.parse(address)
    serve(_find_runs(place), listening, writes_notes=notes, say=output.give)


def _find_runs(place: str) -> Runs:
    from strop.cli.jobs import open_job
    from strop.view.places import find_runs

    def open_job_record(reference: str) -> tuple[str, RecordFiles]:
        launcher, ref, trial = open_job(reference)
        return ref.name, launcher.backend.open_record(ref, trial or 0)

    return find_runs(place, open_job_record)


MOST_ROWS = 1000
"""The most rows of an answer on the terminal; --json has all."""
_CELL_CHARACTERS = 240


def query(
    context: typer.Context,
    sql: Annotated[
        str, typer.Argument(metavar="[SQL]", help="One SELECT. Without it, tables and columns are listed.")
    ] = "",
    place: Place = "runs",
    json: Json = False,
) -> None:
    """Ask the records of runs by SQL (DuckDB): rollouts, metrics, evals, events, timeline, runs."""
    from importlib.util import find_spec

    if find_spec("duckdb") is None:
        raise ConfigError(
            "strop query needs the package duckdb, which is not installed",
            allowed="an installation with the extra 'query'",
            next_step="pip install 'strop[query]'",
        )
    from strop.view import make_harmless
    from strop.view.query import LIST_COLUMNS, RunsDatabase, shorten, to_json

    output: Output = context.obj
    if sql and (len(sql.split()) == 1 or Path(sql).is_dir()):
        # A single word is no query but the place.
        sql, place = "", sql
    runs = _find_runs(place).list()
    if not runs:
        raise StoreError(
            f"{place} holds no run",
            allowed="a run, a folder of runs, a job, or runs in a store",
            next_step="name it: strop query SQL PLACE",
        )
    with RunsDatabase({run.key: run.record for run in runs}) as database:
        answer = database.ask(sql or LIST_COLUMNS)
        if json:
            output.give_json_list(
                dict(zip(answer.columns, map(to_json, row), strict=True)) for row in answer.rows
            )
            return
        cells = _CELL_CHARACTERS if sql else 80
        rows = [[shorten(value, cells) for value in row] for row in islice(answer.rows, MOST_ROWS)]
        output.give_table([make_harmless(name) for name in answer.columns], rows)
        if next(answer.rows, None) is not None:
            output.say(f"these are the first {MOST_ROWS} rows: narrow the question, or take all with --json")


def report(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...]",
            help="A run directory, a job, or a run's mirror (s3://bucket/prefix). Several directories are"
            " compared with the first.",
        ),
    ],
) -> None:
    """Write the report of a run, finished or not, as one HTML file, and print its path.

    It is written to the run's directory; for a job, a mirror or a comparison, to the current folder.
    """
    from strop.record.run_dir import STATE_NAME
    from strop.view.report import write_comparison, write_report, write_report_of

    output: Output = context.obj
    if len(runs) > 1:
        output.give(str(write_comparison([Path(run) for run in runs], Path())))
        return
    (run,) = runs
    records = [] if (Path(run) / STATE_NAME).is_file() else _find_runs(run).list()
    if not records:
        output.give(str(write_report(Path(run))))
        return
    if len(records) > 1:
        raise ConfigError(
            f"{run} holds {len(records)} runs",
            allowed="one run, or several by name",
            next_step="name one of them: " + ", ".join(record.key for record in records[:8]),
        )
    output.give(str(write_report_of(records[0].key, records[0].record, Path())))
