"""`strop import prime-rl CONFIG.toml`: run files from the configurations of other trainers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Gpus, Json, SingleGpu, takes
from strop.cli.output import Output
from strop.io.notices import tell

import_commands = typer.Typer(help="Run files from configurations of other trainers.", no_args_is_help=True)
RoleFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Configuration of this role alone.")]
_OF_LAUNCHER = ("gpus", "train_gpus", "infer_gpus", "output_dir", "job_name", "cpus_per_gpu")


@import_commands.callback()
def _group() -> None:
    """Run files from configurations of other trainers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportArguments:
    """Arguments of `strop import prime-rl`; those of the older launcher have its names and ranges."""

    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="rl.toml or sft.toml of a whole run.")
    ] = None
    trainer: RoleFile = None
    orchestrator: RoleFile = None
    inference: RoleFile = None
    task: Annotated[
        str | None, typer.Option(help="Task of strop's for an environment that has none of its own.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Run file. Default: CONFIG-strop.toml beside it.")] = None
    gpus: Gpus = None
    train_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs for the learner.")] = None
    infer_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs for generation.")] = None
    single_gpu: SingleGpu = False
    output_dir: Annotated[str | None, typer.Option(help="Run directory.")] = None
    job_name: Annotated[str | None, typer.Option(help="Name of the run.")] = None
    cpus_per_gpu: Annotated[int | None, typer.Option(min=1, max=32, help="CPU cores per GPU.")] = None
    json: Json = False


@import_commands.command("prime-rl")
@takes(ImportArguments)
def import_prime(context: typer.Context, args: ImportArguments) -> None:
    """Write a run file from a PRIME-RL configuration, and name each key that has no equivalent."""
    from strop.run.prime_rl import ImportRequest, import_prime_rl

    output: Output = context.obj
    roles = {"trainer": args.trainer, "orchestrator": args.orchestrator, "inference": args.inference}
    options = {name: value for name in _OF_LAUNCHER if (value := getattr(args, name)) is not None}
    imported = import_prime_rl(
        ImportRequest(
            config=args.config,
            roles={role: path for role, path in roles.items() if path is not None},
            options=options | ({"single_gpu": True} if args.single_gpu else {}),
            task=args.task,
            out=args.out,
        )
    )
    for notice in imported.notices:
        tell(notice)
    if args.json:
        output.give_json({"path": str(imported.path), "notices": imported.notices})
        return
    output.give(str(imported.path))
    output.say(f"next: strop plan {imported.path}")
