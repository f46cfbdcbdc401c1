"""The program: its commands, and the place where every failure becomes a message and an exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from strop import __version__
from strop.cli.doctor import doctor
from strop.cli.eval import evaluate
from strop.cli.jobs import cancel, fetch, logs, status, watch
from strop.cli.model import model_commands, sample, stage
from strop.cli.output import Output
from strop.cli.plan import explain, plan
from strop.cli.runs import compare, list_runs, query, report, view
from strop.cli.runtime import runtime_commands
from strop.cli.submit import policy, submit
from strop.cli.tasks import audit, environment_commands, task_commands
from strop.cli.train import train
from strop.errors import EXIT_DONE, EXIT_FAILED, StropError, describe_error
from strop.io.exits import guarding_exit

_TYPER_CTRL_C = 130


class _Program(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command. Commands return or raise `typer.Exit`: a SystemExit is that of a user's code."""
        try:
            return super().invoke(ctx)
        except SystemExit as end:
            raise StropError(
                f"code that this command ran ended the process: {describe_error(end)}",
                allowed="code that returns, or raises another exception",
                next_step="remove that exit",
            ) from end


class _RunCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options. An unknown one may be a setting, which the refusal then names."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", "")
            if not (instead := _settings_like(option)):
                raise
            raise typer.BadParameter(
                f"No such option: {option}. Write {' or '.join(instead)}; `strop explain` says what it means."
            ) from error


def _settings_like(option: str) -> list[str]:
    """Return settings with the name of an unknown option: job.grace_s=VALUE, ..."""
    from strop.launch.backends import BACKENDS
    from strop.spec.job import JobSpec

    names = [f"job.{name}" for name in JobSpec.model_fields]
    names += dict.fromkeys(f"site.{name}" for section in BACKENDS.values() for name in section.settable())
    word = re.escape(option.removeprefix("--").removeprefix("no-").replace("-", "_"))
    return [f"{name}=VALUE" for name in names if re.fullmatch(rf"\w+\.(max_)?{word}(_limit|_s)?", name)]


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Take a language model and a verifiable task, and make the model better at it.",
)
for _name, _command in (
    ("train", train),
    ("eval", evaluate),
    ("sample", sample),
    ("plan", plan),
    ("stage", stage),
    ("submit", submit),
    ("policy", policy),
    ("status", status),
    ("logs", logs),
    ("watch", watch),
    ("cancel", cancel),
    ("fetch", fetch),
    ("explain", explain),
    ("ls", list_runs),
    ("view", view),
    ("query", query),
    ("report", report),
    ("compare", compare),
    ("audit", audit),
    ("doctor", doctor),
):
    app.command(_name, cls=_RunCommand if _command in (train, plan, submit) else TyperCommand)(_command)
app.add_typer(model_commands, name="model")
app.add_typer(task_commands, name="tasks")
app.add_typer(environment_commands, name="envs")
app.add_typer(runtime_commands, name="runtime")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"strop {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take a language model and a verifiable task, and make the model better at it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. `arguments`: by default those of this process."""
    output = Output()
    command = typer.main.get_command(app)
    try:
        with guarding_exit(), output.hear_notices():
            command(args=arguments, prog_name="strop", obj=output)
    except SystemExit as end:
        # Typer returns this way: with 0, or with 2 after printing an error of usage.
        return _finish(output, end.code)
    except StropError as error:
        output.say_refusal(error)
        return error.exit_code
    except Exception as error:
        output.say_bug(error)
        return EXIT_FAILED
    finally:
        output.close()
    return EXIT_DONE


def _finish(output: Output, code: object) -> int:
    """Flush standard output and translate Typer's exit code."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone. Redirect, or Python would fail when it flushes again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    if code == _TYPER_CTRL_C:
        # Not 75, which promises a saved state to resume from.
        output.say("strop: interrupted")
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_DONE
