"""`strop sandbox doctor`: what sandboxes this host allows."""

from __future__ import annotations

from dataclasses import asdict

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

sandbox_commands = typer.Typer(help="Sandboxes: where untrusted code runs.", no_args_is_help=True)


@sandbox_commands.callback()
def _group() -> None:
    """Sandboxes: where untrusted code runs."""


@sandbox_commands.command("doctor")
def diagnose(context: typer.Context, json: Json = False) -> None:
    """Try every kind of sandbox on this machine: what it isolates, how quick it is, how to get more."""
    import asyncio

    from strop.sandbox.doctor import diagnose_sandboxes

    output: Output = context.obj
    found = asyncio.run(diagnose_sandboxes())
    if json:
        output.give_json(asdict(found))
        return
    rows: list[tuple[object, ...]] = []
    for one in found.backends:
        if one.isolation is None:
            rows.append((one.name, "none", *[None] * 8))
            continue
        reached = one.isolation
        guards = [guard.value for guard in (reached.memory, reached.pids, reached.cpu, reached.disk)]
        times = [f"{seconds * 1000:.0f} ms" for seconds in (one.start_s, one.command_s, one.stop_s)]
        rows.append((one.name, reached.level.word, *guards, reached.network, *times))
    limits = ("memory", "processes", "CPU time", "disk")
    output.give_table(("backend", "level", *limits, "network", "start", "command", "stop"), rows)
    output.give_table(("this host", "has"), list(found.facts.items()))
    for one in found.backends:
        if one.refusal:
            output.say(f"{one.name}: {one.refusal}")
    for sentence in found.advice:
        output.say(f"for more: {sentence}")
