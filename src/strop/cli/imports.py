"""`strop import prime-rl CONFIG.toml`: run files from the configurations of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output
from strop.io.notices import tell

import_commands = typer.Typer(help="Run files from configurations of other trainers.", no_args_is_help=True)
RoleFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Configuration of this role alone.")]


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
            help="rl.toml or sft.toml of a whole run, and settings that win over it: job.train_gpus=4, name=NAME,"
            " or task.name=NAME for an environment that is no task of strop's.",
        ),
    ] = None,
    trainer: RoleFile = None,
    orchestrator: RoleFile = None,
    inference: RoleFile = None,
    out: Annotated[Path | None, typer.Option(help="Run file. Default: CONFIG-strop.toml beside it.")] = None,
    json: Json = False,
) -> None:
    """Write a run file from a PRIME-RL configuration, and name each key that has no equivalent."""
    from strop.run.prime_rl import ImportRequest, import_prime_rl

    output: Output = context.obj
    files = [Path(word) for word in words or () if "=" not in word]
    if len(files) > 1:
        raise typer.BadParameter(f"one CONFIG.toml, not {len(files)}: {' '.join(map(str, files))}")
    roles = {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}
    imported = import_prime_rl(
        ImportRequest(
            config=files[0] if files else None,
            roles={role: path for role, path in roles.items() if path is not None},
            words=[word for word in words or () if "=" in word],
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
