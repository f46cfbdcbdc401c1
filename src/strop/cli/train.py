"""`strop train RUN.toml [key=value ...] [--new] [--from URI] [--json]`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from strop.cli.arguments import (
    FromMirror,
    JsonEvents,
    NewRun,
    OutputDir,
    Overrides,
    RunFile,
    add_output_dir,
    takes,
)

if TYPE_CHECKING:
    from strop.cli.output import Output
    from strop.record import RunDir
    from strop.run.held_out import TrainOutcome
    from strop.spec import ResolvedSpec
    from strop.train import Observer


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArguments:
    """Arguments of `strop train`."""

    run_file: RunFile
    overrides: Overrides = None
    output_dir: OutputDir = None
    new: NewRun = False
    from_uri: FromMirror = None
    json: JsonEvents = False


@takes(TrainArguments)
def train(context: typer.Context, args: TrainArguments) -> None:
    """Train a model. Repeat the command to resume a run that did not finish."""
    from strop.spec import load_spec

    output: Output = context.obj
    with open_observer(output, is_json=args.json) as observer:
        resolved = load_spec(args.run_file, add_output_dir(args.overrides, args.output_dir))
        if args.from_uri is not None:
            resolved = take_up_mirror(output, args.from_uri, resolved, is_new=args.new)
        words = (args.run_file, *(args.overrides or ()))
        run_to_end(output, resolved, observer, is_new=args.new, words=words)


@contextmanager
def open_observer(output: Output, *, is_json: bool) -> Iterator[Observer]:
    """Show a run on the terminal and in its log, and optionally as lines of JSON on standard output."""
    from strop.view import PlainProgress, TerminalObserver, open_progress

    # JSON lines on the same terminal would break a display that is updated in place.
    is_disturbed = is_json and sys.stdout.isatty()
    progress = PlainProgress(sys.stderr) if is_disturbed else open_progress()
    shown = TerminalObserver(progress, PlainProgress(output.log))
    if not is_json:
        yield shown
        return
    from strop.view.json_lines import json_lines

    with json_lines(shown) as lines:
        yield lines


def take_up_mirror(output: Output, uri: str, resolved: ResolvedSpec, *, is_new: bool) -> ResolvedSpec:
    """Restore a run from its mirror, and return the spec that resumes it."""
    from strop.errors import ConfigError
    from strop.run.mirroring import continue_from

    if is_new:
        raise ConfigError(
            f"--new and --from {uri} are given together",
            allowed="a new run, or one that goes on",
            next_step="leave one of them out",
        )
    continued = continue_from(uri, resolved)
    output.say(continued.detail)
    return continued.resolved


def run_to_end(
    output: Output, resolved: ResolvedSpec, observer: Observer, *, is_new: bool, words: Sequence[str]
) -> None:
    """Run a spec on this machine, show its progress, and print result, report and next steps.

    `words`: the run file and overrides of the command line.
    """
    from strop.run.training import train_here
    from strop.view.json_lines import JsonObserver
    from strop.view.report import write_report
    from strop.view.summary import describe_changes, describe_next, describe_outcome, describe_pace
    from strop.view.tracking import TrackingObserver

    facts = observer.facts if isinstance(observer, JsonObserver) else {}
    tracking = TrackingObserver(resolved.spec.trackers, observer)

    def open_run(run_dir: RunDir) -> None:
        output.open_run(run_dir)
        tracking.open_run(run_dir)
        facts["run"] = str(run_dir.path)

    def report(trained: TrainOutcome) -> None:
        facts["report"] = str(write_report(trained.run_path))

    outcome = train_here(resolved, tracking, is_new=is_new, on_run=open_run, on_trained=report)
    for line in (
        *describe_outcome(outcome),
        *describe_changes(outcome.changes, width=shutil.get_terminal_size((100, 24)).columns),
        *describe_pace(outcome.run_path),
        f"report {facts['report']}",
        *describe_next(outcome, words, seed=resolved.spec.seed),
    ):
        output.give(line)
