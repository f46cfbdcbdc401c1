"""`strop slurm sft|rl RUN.toml`: `strop submit --on slurm` for those who know it by these names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import typer

from strop.cli.options import takes
from strop.cli.submit import Site, SubmitArguments, send

slurm_commands = typer.Typer(
    no_args_is_help=True, help="Send a run to a SLURM cluster: `strop submit --on slurm`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmArguments(SubmitArguments):
    """As for `strop submit`; the site is a SLURM cluster unless another one is named."""

    on: Site = "slurm"


@slurm_commands.command("sft")
@takes(SlurmArguments)
def slurm_sft(context: typer.Context, given: SlurmArguments) -> None:
    """Send fine-tuning on demonstrations to a SLURM cluster; settings of the run file follow after --."""
    send(context.obj, _named(replace(given, command="sft")))


@slurm_commands.command("rl")
@takes(SlurmArguments)
def slurm_rl(context: typer.Context, given: SlurmArguments) -> None:
    """Send reinforcement learning to a SLURM cluster; settings of the run file follow after --."""
    send(context.obj, _named(replace(given, command="train")))


def _named(given: SlurmArguments) -> SlurmArguments:
    """Return the arguments with the name that this launcher gives jobs."""
    if given.job_name is not None:
        return given
    from pathlib import Path

    kind = "sft" if given.command == "sft" else "rl"
    stem = "".join(
        character if character.isalnum() else "-" for character in Path(given.run_file).stem.lower()
    )
    return replace(given, job_name=f"{stem.strip('-')[:36] or 'run'}-{kind}")
