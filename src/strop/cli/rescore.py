"""`strop rescore PLACE [key=value ...]`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.eval import percent
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.run.evaluation import StoredRescored

CHANGES_SHOWN = 20


def rescore(
    context: typer.Context,
    place: Annotated[
        Path, typer.Argument(help="Result of `strop eval`, one of its shards, or a folder of them.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings of the task. Default: as evaluated."),
    ] = None,
    json: Json = False,
) -> None:
    """Score stored replies again with the current task; nothing is generated."""
    from strop.run.evaluation import find_kept, rescore_kept

    output: Output = context.obj
    found = []
    for folder in find_kept(place):
        stored = rescore_kept(folder, settings or ())
        output.say(f"{stored.rescored.result.full_name}: {stored.path}")
        found.append(stored)
    if json:
        output.give_json(
            [
                {
                    "path": str(stored.path),
                    "result": stored.rescored.result.model_dump(mode="json"),
                    "changes": [asdict(change) for change in stored.rescored.changes],
                }
                for stored in found
            ]
        )
        return
    for stored in found:
        _show(output, stored)


def _show(output: Output, stored: StoredRescored) -> None:
    result, changes = stored.rescored.result, stored.rescored.changes
    title = f"{result.full_name}, {result.num_examples} examples of {result.split.value}, step {result.step}"
    rows = [
        (name, percent(score.accuracy), f"{score.low:.1%} to {score.high:.1%}", score.num_unscored)
        for name, score in result.scores.items()
    ]
    rows += [
        (
            f"{label}: {name}",
            percent(score.accuracy),
            f"{score.low:.1%} to {score.high:.1%}",
            score.num_unscored,
        )
        for label, part in result.parts.items()
        for name, score in part.scores.items()
    ]
    output.give_table(("replies", "accuracy", "95% interval", "unscored"), rows, title=title)
    output.give(f"judged by version {result.task_version}, replies of version {result.replies_version}")
    if not result.is_valid:
        output.give(result.verdict)
    words = {True: "solved", False: "not solved", None: "unscored"}
    output.give(f"{len(changes)} verdicts changed")
    if changes:
        output.give_table(
            ("example", "reply", "before", "now", "compared"),
            [
                (change.example_id, change.reply, words[change.before], words[change.after], change.extracted)
                for change in changes[:CHANGES_SHOWN]
            ],
        )
    if len(changes) > CHANGES_SHOWN:
        output.give(f"and {len(changes) - CHANGES_SHOWN} more; --json lists all")
