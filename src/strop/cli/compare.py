"""`strop compare RUN RUN`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.eval import percent
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.evaluate import Change, Comparison, Interval, Summary


def compare(
    context: typer.Context,
    before: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a result of `strop eval`.")],
    after: Annotated[Path, typer.Argument(metavar="RUN", help="The run or result to compare with it.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Setting that may differ; any other difference is refused. Repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare the last evaluations of two runs on the same examples, and list settings that differ."""
    from strop.run.runs import compare_runs

    output: Output = context.obj
    found = compare_runs(before, after, declared=vary or None)
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
    rows = _comparison_rows("", found.before.scores, found.after.scores, found.change)
    for label, change in found.change.parts.items():
        one, other = found.before.parts[label], found.after.parts[label]
        rows += _comparison_rows(f"{label}: ", one.scores, other.scores, change)
    output.give_table(("replies", "share", "first", "second", "change", "95% interval"), rows)
    for label, comparison in {"": found.change, **found.change.parts}.items():
        for name, moved in (("greedy", comparison.greedy), ("sampled", comparison.sampled)):
            if moved is not None:
                output.give(
                    f"{label}{': ' if label else ''}{name}: {moved.num_gained} of {moved.num_examples}"
                    f" examples solved more often, {moved.num_lost} less often, p = {moved.p_value:.2g}"
                )
    output.give(
        "intervals are over problems, of one seed each: what another seed would change is not in them"
    )
    if found.differences and not vary:
        keys = ", ".join(difference.key for difference in found.differences)
        output.give(f"no verdict on a cause: nothing was declared with --vary, and these differ: {keys}")
    if found.differences:
        settings = [(difference.key, difference.before, difference.after) for difference in found.differences]
        output.give_table(("setting", "first", "second"), settings)


def _comparison_rows(
    label: str, before: Mapping[str, Summary], after: Mapping[str, Summary], comparison: Comparison
) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, change in (("greedy", comparison.greedy), ("sampled", comparison.sampled)):
        if name in before and name in after:
            rows += _change_rows(f"{label}{name}", before[name], after[name], change)
    return rows


def _change_rows(name: str, one: Summary, other: Summary, change: Change | None) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (name, "accuracy", percent(one.accuracy), percent(other.accuracy), *_show_change(change))
    ]
    if change is not None and change.format_ok is not None:
        rows += [
            (
                name,
                "format ok",
                percent(one.format_ok_frac),
                percent(other.format_ok_frac),
                *_show_change(change.format_ok),
            ),
            (name, "accuracy where both have the format", "", "", *_show_change(change.in_format)),
        ]
    return rows


def _show_change(change: Interval | None) -> tuple[str, str]:
    if change is None:
        return "-", "-"
    return f"{change.estimate:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}"
