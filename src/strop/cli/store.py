"""`strop store ls [URI]`: what a store holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

store_commands = typer.Typer(help="The store of models, data and runs.", no_args_is_help=True)


@store_commands.callback()
def _group() -> None:
    """The store of models, data and runs."""


@store_commands.command("ls")
def list_store(
    context: typer.Context,
    uri: Annotated[
        str | None, typer.Argument(metavar="[URI]", help="A place in a store. Default: STROP_STORE_URI.")
    ] = None,
    json: Json = False,
) -> None:
    """List what a store holds: records, runs, and what another tool sent."""
    from strop.store.contents import list_contents

    output: Output = context.obj
    found = list_contents(uri)
    if json:
        output.give_json([asdict(one) for one in found])
    elif not found:
        output.say("nothing is there")
    else:
        rows = [(one.name, one.state, one.num_files, f"{one.size_bytes / 1e6:.1f} MB") for one in found]
        output.give_table(("name", "state", "files", "size"), rows)
