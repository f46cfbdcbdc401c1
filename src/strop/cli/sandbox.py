"""`strop sandbox`: what sandboxes this host allows, and how well they hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.sandbox.attack import Verdict

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
            rows.append((one.name, "none", *[None] * 9))
            continue
        reached = one.isolation
        guards = [guard.value for guard in (reached.memory, reached.pids, reached.cpu, reached.disk)]
        times = [f"{seconds * 1000:.0f} ms" for seconds in (one.start_s, one.command_s, one.stop_s)]
        network = reached.network + (" or a list" if one.has_list else "")
        confirmed = one.confirmed.word if one.confirmed is not None else None
        rows.append((one.name, reached.level.word, confirmed, *guards, network, *times))
    limits = ("memory", "processes", "CPU time", "disk")
    output.give_table(
        ("backend", "level", "attacks confirm", *limits, "network", "start", "command", "stop"), rows
    )
    output.give_table(("this host", "has"), list(found.facts.items()))
    for one in found.backends:
        if one.refusal:
            output.say(f"{one.name}: {one.refusal}")
    for sentence in found.advice:
        output.say(f"for more: {sentence}")


@sandbox_commands.command("attack")
def attack(
    context: typer.Context,
    backend: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Backend. Default: all.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ATTACK", help="Attack. Default: all.")] = None,
    json: Json = False,
) -> None:
    """Attack the sandboxes of this machine; fails where one holds less than its record promises."""
    import asyncio

    from strop.sandbox.attack import ATTACKS, attack_sandboxes

    output: Output = context.obj
    found = asyncio.run(attack_sandboxes(backend or (), only or ()))
    worse = [(one, verdict) for one in found for verdict in one.verdicts if verdict.is_worse]
    if json:
        output.give_json([asdict(one) for one in found])
    else:
        by_name = [{verdict.attack: verdict for verdict in one.verdicts} for one in found]
        rows = [
            (attack.row, attack.name, *(_cell(of.get(attack.name)) for of in by_name))
            for attack in ATTACKS
            if any(attack.name in of for of in by_name)
        ]
        output.give_table(("row", "attack", *(one.name for one in found)), rows)
        for one in found:
            if one.isolation is None:
                output.say(f"{one.name}: {one.refusal}")
            elif one.confirmed is not None:
                level = f"level {one.isolation.level.word}"
                output.say(f"{one.name}: reached {level}; its attacks confirm {one.confirmed.word}")
    for one, verdict in worse:
        output.say(f"{one.name}, {verdict.attack}: {verdict.code}, where at most {verdict.expected} may be:")
        output.say(f"  {verdict.what}")
    if worse:
        raise typer.Exit(1)


def _cell(verdict: Verdict | None) -> str | None:
    if verdict is None:
        return None
    return f"{verdict.code}, not {verdict.expected}" if verdict.is_worse else str(verdict.code)
