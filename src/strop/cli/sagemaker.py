"""`strop sagemaker submit RUN.toml [key=value ...]`, `strop sagemaker policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.output import Output
from strop.cli.submit import alias

sagemaker_commands = typer.Typer(help="Training jobs of SageMaker.", no_args_is_help=True)


@sagemaker_commands.command("submit", cls=alias(on="sagemaker"))
def submit() -> None:
    """Submit a run to SageMaker: another name of `strop submit --on sagemaker`."""


@sagemaker_commands.command("policy")
def policy(
    context: typer.Context,
    on: Annotated[
        str,
        typer.Option("--on", metavar="SITE", help="A site of strop-sites.toml whose backend is sagemaker."),
    ] = "sagemaker",
) -> None:
    """Print the IAM policies that the submitting identity and the execution role need."""
    import os

    from strop.errors import ConfigError
    from strop.launch.sagemaker.options import SageMakerSite
    from strop.launch.sagemaker.probe import execution_policy, submitter_policy, trust_policy
    from strop.launch.sites import find_site

    output: Output = context.obj
    profile = find_site(on, Path.cwd(), os.environ).profile
    if not isinstance(profile, SageMakerSite):
        raise ConfigError(
            f"--on {on} is a site of backend {profile.kind()}",
            allowed="a site whose backend is sagemaker",
            next_step="name another site",
        )
    output.give_json(
        {
            "submitter": submitter_policy(profile),
            "execution_role": execution_policy(profile),
            "execution_role_trust": trust_policy(),
        }
    )
