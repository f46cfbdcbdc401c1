"""`strop import prime-rl CONFIG.toml`: run files from the configurations of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output
from strop.io.notices import tell

import_commands = typer.Typer(help="Run files from configurations of other trainers.", no_args_is_help=True)


@import_commands.callback()
def _group() -> None:
    """Run files from configurations of other trainers."""


@import_commands.command("prime-rl")
def import_prime(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [key=value ...]",
            help="rl.toml or sft.toml of a whole run, or trainer=FILE orchestrator=FILE inference=FILE; then"
            " settings that win over it: job.train_gpus=4, name=NAME, or task.name=NAME for an environment"
            " that is no task of strop's.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run file. Default: CONFIG-strop.toml beside it.")] = None,
    json: Json = False,
) -> None:
    """Write a run file from a PRIME-RL configuration, and name each key that has no equivalent."""
    from strop.run.prime_rl import ROLES, ImportRequest, import_prime_rl

    output: Output = context.obj
    files, roles, settings = [], {}, []
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals:
            files.append(Path(word))
        elif key in ROLES:
            roles[key] = Path(value)
        else:
            settings.append(word)
    if len(files) > 1:
        raise typer.BadParameter(f"one CONFIG.toml, not {len(files)}: {' '.join(map(str, files))}")
    imported = import_prime_rl(
        ImportRequest(
            config=files[0] if files else None,
            roles=roles,
            words=settings,
            out=out,
        )
    )
    for notice in imported.notices:
        tell(notice)
    if json:
        output.give_json({"path": str(imported.path), "notices": imported.notices})
        return
    output.give(str(imported.path))
    output.say(f"next: strop plan {imported.path}")
