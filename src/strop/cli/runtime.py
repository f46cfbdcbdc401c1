"""`strop runtime`: sandboxes as a service, and what proves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output
from strop.errors import EXIT_FAILED

runtime_commands = typer.Typer(help="Sandboxes as a service, for OpenHands' clients.", no_args_is_help=True)
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", metavar="FILE", help="File with the key that clients send.")
]


@runtime_commands.callback()
def _group() -> None:
    """Sandboxes as a service, for OpenHands' clients."""


@runtime_commands.command("node")
def run_node(
    context: typer.Context,
    controller: Annotated[str, typer.Option(metavar="URL", help="Where the controller is.")],
    key_file: Annotated[
        Path, typer.Option("--key-file", metavar="FILE", help="File with the key of the nodes, mode 0600.")
    ],
    host: Annotated[
        str, typer.Option(help="The address of this machine at which the agent and all sandboxes listen.")
    ] = "127.0.0.1",
    backend: Annotated[
        list[str] | None,
        typer.Option(help="A kind of sandbox that may be made; repeated. Default: all that work here."),
    ] = None,
    data_plane: Annotated[
        str, typer.Option(help="Who serves a sandbox's address: auto, image, inject or own.")
    ] = "auto",
    network: Annotated[str, typer.Option(help="What sandboxes reach: none or host.")] = "none",
    warm: Annotated[
        list[str] | None,
        typer.Option(metavar="IMAGE=N", help="Keep N sandboxes of an image ready; repeated."),
    ] = None,
) -> None:
    """Make sandboxes on this machine, as a controller orders, until a signal or until it is gone."""
    import asyncio

    from strop.runtime.node_options import NodeOptions, serve_node

    output: Output = context.obj
    options = NodeOptions(
        controller=controller,
        key_file=key_file,
        host=host,
        backends=tuple(backend or ()),
        data_plane=data_plane,
        network=network,
        warm=tuple(warm or ()),
    )
    asyncio.run(serve_node(options, say=output.say))


@runtime_commands.command("janitor")
def clear_up(context: typer.Context, json: Json = False) -> None:
    """End and remove what sandboxes of this machine have left whose agents were killed."""
    from strop.sandbox.janitor import clear_abandoned

    output: Output = context.obj
    cleared = clear_abandoned()
    if json:
        output.give_json(cleared)
        return
    for line in cleared or ["nothing is left"]:
        output.give(line)


@runtime_commands.command("conformance")
def prove_conformance(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="A server of OpenHands' runtime protocol.")],
    key_file: KeyFile = None,
    image: Annotated[str, typer.Option(help="What sandboxes are started from.")] = "host",
    case: Annotated[list[int] | None, typer.Option(help="A case of the matrix; repeated.")] = None,
    many: Annotated[int, typer.Option(min=1, help="Clients at once in case 17.")] = 64,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME=VALUE",
            help="What single cases need: slow_image (7), no_agent_image (10), oom_image (11), restart, a"
            " shell command that kills and restarts the service (16), base_image (22).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Ask a server all that OpenHands' clients ask, with the real client, and say what held."""
    from dataclasses import asdict

    from strop.runtime.conformance import CASES, ConformanceOptions, parse_extra, run_conformance
    from strop.runtime.node_options import read_key

    output: Output = context.obj
    extra = parse_extra(given or ())
    options = ConformanceOptions(image=image, extra=extra, many=many, cases=tuple(case or CASES))
    results = []
    for result in run_conformance(url, read_key(key_file) if key_file else "", options, say=output.say):
        results.append(result)
        output.say(f"{result.number:2d} {result.title}: {result.status} {result.detail}".rstrip())
    if json:
        output.give_json([{**asdict(one), "title": one.title} for one in results])
    else:
        rows = [(one.number, one.title, one.status, f"{one.seconds:.1f} s", one.detail) for one in results]
        output.give_table(("case", "situation", "result", "took", "detail"), rows)
    if any(one.status == "failed" for one in results):
        raise typer.Exit(EXIT_FAILED)
