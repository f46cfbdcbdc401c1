"""`strop watch JOB|RUN`: a run that trains elsewhere, shown as if it trained here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from strop.cli.arguments import brief, lasting
from strop.cli.jobs import RUNS, open_job
from strop.cli.output import Output
from strop.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from strop.view.live import LiveRun
    from strop.view.watching import RunEnd

_POLL_S, _REMOTE_POLL_S = 0.5, 5.0


@brief
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
    """Show a run that trains elsewhere, live, to its end and with its exit code. Ctrl-C leaves it alone."""
    from strop.view import TerminalObserver, open_progress
    from strop.view.watching import Watcher
    from strop.view.watching import watch as watch_run

    output: Output = context.obj
    run, find_end = open_run(reference, output.say)
    progress = open_progress(sys.stdout)
    observer = TerminalObserver(progress)
    every_s = _POLL_S if run.is_local else _REMOTE_POLL_S
    try:
        with lasting():
            end = watch_run(Watcher(run, observer), observer, find_end, pause=lambda: time.sleep(every_s))
    except KeyboardInterrupt:
        progress.end("no longer watched; the run goes on")
        raise typer.Exit(EXIT_FAILED) from None
    if end.exit_code:
        raise typer.Exit(end.exit_code)


def refuse_job(reference: str) -> NoReturn:
    """Refuse: where a place is named, no job is."""
    raise ConfigError(f"{reference} holds no run", allowed="a run", next_step="see `strop ls`")


def open_run(reference: str, say: Callable[[str], None]) -> tuple[LiveRun, Callable[[], RunEnd | None]]:
    """Return the run that is meant, and what finds out whether it has ended.

    Raises: ConfigError if there is none, or several; StoreError if the place does not answer.
    """
    from strop.launch.ending import TrialEnd, exit_code_of
    from strop.launch.job_dir import has_plan
    from strop.launch.submit import describe_status
    from strop.record.run_dir import STATE_NAME
    from strop.view.live import LiveRun
    from strop.view.places import find_runs
    from strop.view.watching import RunEnd
    from strop.view.watching import find_end as find_run_end

    places = [Path(reference), RUNS / reference]
    here = next((one for one in places if (one / STATE_NAME).is_file() and not has_plan(one)), None)
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
    asked = TrialEnd(launcher, ref, trial or 0, say)

    def find_end() -> RunEnd | None:
        status = asked.find()
        return (
            None if status is None else RunEnd(cause=describe_status(status), exit_code=exit_code_of(status))
        )

    return LiveRun(key=ref.name, record=launcher.backend.open_record(ref, trial or 0)), find_end
