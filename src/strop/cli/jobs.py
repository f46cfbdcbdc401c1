"""`strop status|logs|watch|cancel|fetch REF`: jobs, and runs on other machines."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output
from strop.errors import EXIT_FAILED, ConfigError, StoreError

if TYPE_CHECKING:
    from strop.launch.contract import JobRef, JobStatus
    from strop.launch.launcher import Launcher
    from strop.view.live import LiveRun
    from strop.view.watching import RunEnd

Reference = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="A job's directory or id, or a run's name or unique prefix. REF/members/I: a trial of a sweep.",
    ),
]
RUNS = Path("runs")
_POLL_S, _REMOTE_POLL_S = 0.5, 5.0


def open_job(reference: str) -> tuple[Launcher, JobRef, int | None]:
    """Return the launcher of a job's site, the job, and the referenced trial, or None for the whole job.

    Raises: ConfigError if there is no such job; StoreError if it was never accepted.
    """
    from strop.launch.backends import backend_of
    from strop.launch.build_request import TRIALS_FOLDER
    from strop.launch.index import find_job_dir
    from strop.launch.job_dir import REFUSED_NAME, has_ref, job_path_of, read_plan, read_ref
    from strop.launch.launcher import Launcher

    of_trial = re.fullmatch(rf"(.+)/{TRIALS_FOLDER}/(\d+)/?", reference)
    home = find_job_dir(of_trial[1] if of_trial else reference, [RUNS], os.environ)
    job_path = job_path_of(home)
    if not has_ref(home):
        refused = job_path / REFUSED_NAME
        words = refused.read_text().strip() if refused.is_file() else "it was never handed over"
        raise StoreError(
            f"{home} was not submitted: {words}",
            allowed="a job that a scheduler accepted",
            next_step="submit it again: the same command goes on where it stopped",
        )
    trial = int(of_trial[2]) if of_trial else None
    return Launcher(backend_of(read_plan(job_path))), read_ref(job_path), trial


def status(
    context: typer.Context,
    references: Annotated[list[str] | None, typer.Argument(metavar="[REF ...]")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job to end, as `strop submit --wait` does.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the status of jobs; without a name, of all your jobs that have not ended."""
    from strop.launch.status import list_statuses

    output: Output = context.obj
    if wait:
        from strop.launch.launcher import watch

        names = references or []
        if len(names) != 1:
            raise ConfigError(
                f"--wait with {len(names)} jobs",
                allowed="one job: its exit code is this command's",
                next_step="name the job, and start the command once for each",
            )
        launcher, ref, _ = open_job(names[0])
        watch(launcher, Path(ref.home), output.say)
    if references:
        jobs = [open_job(reference) for reference in references]
        statuses = [
            status
            for launcher, ref, trial in jobs
            for status in launcher.status([ref])
            if trial is None or status.trial == trial
        ]
    else:
        everything = list_statuses([RUNS], os.environ)
        statuses = [status for status in everything if not status.state.is_terminal]
    show_statuses(output, statuses, is_json=json)


def show_statuses(output: Output, statuses: Sequence[JobStatus], *, is_json: bool) -> None:
    """Print states, one row for each trial."""
    from strop.launch.status import status_to_json

    if is_json:
        output.give_json([status_to_json(status) for status in statuses])
        return
    if not statuses:
        output.say("no job is waiting or running")
        return
    num_shown = Counter(status.ref.home for status in statuses)
    rows = [
        (
            status.ref.name + (f"[{status.trial}]" if num_shown[status.ref.home] > 1 or status.trial else ""),
            status.state.value,
            status.ref.site,
            status.ref.job_id,
            "-" if status.attempt is None else status.attempt.number,
            status.nodes or "-",
            status.source.value + (f", {status.age_s:.0f} s old" if status.age_s else ""),
            status.reason.splitlines()[0] if status.reason else "-",
        )
        for status in statuses
    ]
    output.give_table(("run", "state", "site", "job", "attempt", "nodes", "according to", "why"), rows)
    for status in statuses:
        if len(status.reason.splitlines()) > 1:
            output.give(f"{status.ref.name}: {status.reason}")


def logs(
    context: typer.Context,
    reference: Reference,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
    attempt: Annotated[str | None, typer.Option(help="Attempt, by name or number. Default: all.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="Only this node.")] = None,
    role: Annotated[str | None, typer.Option(help="Only this role, such as train or agent.")] = None,
) -> None:
    """Show the logs of a job's roles; each line names its node and role."""
    from strop.launch.logs import LogFilter
    from strop.view import make_harmless

    launcher, ref, trial = open_job(reference)
    log_filter = LogFilter(attempt=attempt, node=node, role=role)
    for line in launcher.logs(ref, trial or 0, log_filter, is_followed=follow):
        print(f"[{line.attempt} {line.node} {line.role}] {make_harmless(line.text)}", flush=True)


def watch(
    context: typer.Context,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="JOB|RUN",
            help="A job, as `strop logs` takes it; a run's directory; its mirror in a store.",
        ),
    ],
) -> None:
    """Show a run on another machine live until it ends, with its exit code. Ctrl-C does not stop it."""
    from strop.view import TerminalObserver, open_progress
    from strop.view.watching import Watcher
    from strop.view.watching import watch as watch_run

    output: Output = context.obj
    run, find_end = open_run(reference, output.say)
    progress = open_progress(sys.stdout)
    observer = TerminalObserver(progress)
    every_s = _POLL_S if run.path is not None else _REMOTE_POLL_S
    try:
        end = watch_run(Watcher(run, observer), observer, find_end, pause=lambda: time.sleep(every_s))
    except KeyboardInterrupt:
        progress.end("no longer watched; the run goes on")
        raise typer.Exit(EXIT_FAILED) from None
    if end.exit_code:
        raise typer.Exit(end.exit_code)


def refuse_job(reference: str) -> NoReturn:
    """Refuse a job as a run: `watch` looks for jobs itself."""
    raise ConfigError(f"{reference} holds no run", allowed="a run", next_step="see `strop ls`")


def open_run(reference: str, say: Callable[[str], None]) -> tuple[LiveRun, Callable[[], RunEnd | None]]:
    """Return the referenced run, and a function that returns its end, or None while it runs.

    Raises: ConfigError if there is no run, or several; StoreError if the store does not answer.
    """
    from strop.launch.job_dir import has_plan
    from strop.launch.launcher import TrialEnd, ask_every_s, exit_code_of
    from strop.launch.submit import describe_status
    from strop.record.run_dir import STATE_NAME
    from strop.view.live import LiveRun
    from strop.view.places import find_runs
    from strop.view.watching import RunEnd
    from strop.view.watching import find_end as find_run_end

    places = [Path(reference), RUNS / reference]
    here = next((path for path in places if (path / STATE_NAME).is_file() and not has_plan(path)), None)
    if here is not None or "://" in reference:
        runs = find_runs(str(here or reference), refuse_job).list()
        if len(runs) != 1:
            raise ConfigError(
                f"{reference} holds {len(runs)} runs",
                allowed=", ".join(run.key for run in runs[:20]),
                next_step="name one of them",
            )
        return runs[0], lambda: find_run_end(runs[0])
    launcher, ref, trial = open_job(reference)
    trial_end = TrialEnd(launcher, ref, trial or 0, every_s=ask_every_s(ref), say=say)

    def find_end() -> RunEnd | None:
        status = trial_end.find()
        if status is None:
            return None
        return RunEnd(cause=describe_status(status), exit_code=exit_code_of(status))

    return LiveRun(key=ref.name, record=launcher.backend.open_record(ref, trial or 0)), find_end


def cancel(
    context: typer.Context,
    reference: Reference,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds before remaining processes are killed.")
    ] = 120.0,
) -> None:
    """Cancel a job by SIGTERM, then by SIGKILL after the grace. Prints which of them ended it."""
    output: Output = context.obj
    launcher, ref, trial = open_job(reference)
    outcome = launcher.cancel(ref, trial=trial, grace_s=grace)
    for ended in outcome.statuses:
        output.give(
            f"{ref.name} [{ended.trial}]: {ended.state.value}, ended by: {outcome.ended_by or 'nothing yet'}"
        )
    if not outcome.ended_by:
        raise StoreError(
            f"job {ref.job_id} was asked to end, and no end has been seen",
            allowed="an end that its record or its scheduler shows",
            next_step=f"ask again with `strop status {ref.job_id}`",
        )


def fetch(
    context: typer.Context,
    reference: Reference,
    to: Annotated[Path, typer.Option(help="Folder to create.")],
    only: Annotated[
        str,
        typer.Option(help="What to fetch: all, traces, checkpoints, latest, or the step of one checkpoint."),
    ] = "all",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Fetch new files until the job ends.")
    ] = False,
) -> None:
    """Fetch a job's artifacts. Repeat the command to resume."""
    from strop.launch.fetch import Part, fetch_run, follow_run
    from strop.launch.launcher import ask_every_s, require_trial

    output: Output = context.obj
    step = int(only) if only.isdecimal() else None
    if step is None and only not in set(Part):
        raise ConfigError(
            f"--only {only!r} is no part of a run",
            allowed=f"{', '.join(Part)}, or a step's number",
            next_step="choose one of them",
        )
    if step is not None and follow:
        raise ConfigError(
            f"--only {step} together with --follow", allowed="one of them", next_step="leave one out"
        )
    launcher, ref, trial = open_job(reference)
    require_trial(ref, trial)
    part = Part.CHECKPOINTS if step is not None else Part(only)
    record = launcher.backend.open_record(ref, trial or 0)
    if follow:
        # Requests to schedulers and stores are throttled and cost money.
        every_s = ask_every_s(ref)
        fetched = follow_run(
            record,
            to.absolute(),
            part,
            is_over=launcher.watch_end(ref, trial or 0),
            say=output.say,
            pause=lambda: time.sleep(every_s),
        )
    else:
        fetched = fetch_run(record, to.absolute(), part, step=step)
    steps = ", ".join(map(str, fetched.steps)) or "none"
    output.give(
        f"{fetched.path}: {fetched.num_files} files, {fetched.moved_bytes / 1e6:.1f} MB; checkpoints {steps}"
    )
