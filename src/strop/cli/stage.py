"""`strop stage RUN.toml [key=value ...] [--check] [--replace]`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from strop.cli.arguments import Json, Overrides, RunFile
from strop.cli.output import Output


def stage(
    context: typer.Context,
    run_file: RunFile,
    overrides: Overrides = None,
    json: Json = False,
    check: Annotated[bool, typer.Option("--check", help="Dry run: show what would be sent.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace complete records whose content differs.")
    ] = False,
) -> None:
    """Upload the model and data of a run to its store; skip what is already there."""
    from strop.run.stage import stage_run
    from strop.spec import load_spec

    output: Output = context.obj
    staged = stage_run(load_spec(run_file, overrides or ()), is_check=check, may_replace=replace)
    if json:
        output.give_json([asdict(one) for one in staged])
    else:
        rows = [
            (
                f"{one.kind} {one.name}",
                f"{one.num_files} files, {one.size_bytes / 1e6:.1f} MB",
                f"{one.num_moved} files, {one.moved_bytes / 1e6:.1f} MB" if one.num_moved else "nothing",
                one.digest[:12],
                one.uri,
            )
            for one in staged
        ]
        columns = ("staged", "size", "would send" if check else "sent", "digest", "in the store")
        output.give_table(columns, rows)
    for one in staged:
        if one.advice is not None:
            output.say(f"where {one.name} is not on the disk, write into the run file: {one.advice}")
