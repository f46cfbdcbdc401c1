"""`strop compare RUN RUN`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output


def compare(
    context: typer.Context,
    before: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a result of `strop eval --json`.")],
    after: Annotated[Path, typer.Argument(metavar="RUN", help="The one to compare with it.")],
    json: Json = False,
) -> None:
    """Compare the last evaluations of two runs on the same examples, and list what was set otherwise."""
    from strop.launch.runs import compare_runs

    output: Output = context.obj
    found = compare_runs(before, after)
    if json:
        output.give_json(
            {
                "change": asdict(found.change),
                "before": found.before.model_dump(mode="json"),
                "after": found.after.model_dump(mode="json"),
                "differences": [asdict(difference) for difference in found.differences],
            }
        )
        return
    rows = [
        (
            name,
            _percent(one.accuracy),
            _percent(other.accuracy),
            "-" if change is None else f"{change.estimate:+.1%}",
            "-" if change is None else f"{change.low:+.1%} to {change.high:+.1%}",
        )
        for name, one, other, change in (
            ("greedy", found.before.greedy, found.after.greedy, found.change.greedy),
            ("sampled", found.before.sampled, found.after.sampled, found.change.sampled),
        )
        if one is not None and other is not None
    ]
    output.give_table(("replies", "first", "second", "change", "95% interval"), rows)
    if found.differences:
        settings = [(difference.key, difference.before, difference.after) for difference in found.differences]
        output.give_table(("setting", "first", "second"), settings)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
