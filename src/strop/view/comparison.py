"""Comparison of runs with the first of them: a table of changes, and one self-contained page with curves.

The numbers come from `strop.run.runs.compare_many`; this module only shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from strop import __version__
from strop.io import write_bytes_atomically
from strop.run.runs import Arm, ManyComparison, compare_many, list_changes

if TYPE_CHECKING:
    from strop.evaluate import Interval, Summary
    from strop.view.charts import Chart
    from strop.view.run_record import RunRecord

COMPARISON_NAME = "comparison.html"
COLUMNS = ("run", "replies", "share", "first", "this", "change", "95% interval", "p", "p (Holm)")
"""Columns of `list_changes_in_words`. p (Holm) holds for all comparisons together."""
_NUM_STYLES = 6
_SMOOTHED_STEPS = 5
_CURVES = (
    ("accuracy", "Training accuracy", True),
    ("reward_mean", "Reward", False),
    ("entropy_nats", "Entropy (nats per token)", False),
    ("reply_tokens_mean", "Reply length (tokens)", False),
    ("zero_variance_frac", "Groups without signal", True),
    ("seconds_step", "Step time (seconds)", False),
)


def write_comparison(paths: Sequence[Path], folder: Path) -> Path:
    """Compare runs with `compare_many`, and write comparison.html into a folder; return its path.

    Raises: as `compare_many`; StoreError if the disk fails; CorruptRecord if a run is damaged.
    """
    path = folder / COMPARISON_NAME
    write_bytes_atomically(path, render_comparison(compare_many(paths)).encode())
    return path


def render_comparison(comparison: ManyComparison) -> str:
    """Render the page. Arms that are stored results have no curves."""
    from strop.view.report import open_templates
    from strop.view.run_record import read_run_record

    arms = [comparison.baseline, *(other.arm for other in comparison.others)]
    records = [read_run_record(path) for arm in arms for path in arm.paths if path.is_dir()]
    return (
        open_templates()
        .get_template("comparison.html.j2")
        .render(
            baseline=comparison.baseline.label,
            names=[arm.label for arm in arms],
            columns=COLUMNS,
            rows=list_changes_in_words(comparison),
            remarks=list(list_remarks(comparison, is_declared=False)),
            settings=comparison.settings,
            charts=_draw_curves(records),
            version=__version__,
        )
    )


def _draw_curves(records: Sequence[RunRecord]) -> list[Chart]:
    from strop.view.charts import Series, build_chart, smooth

    def draw(key: str, title: str, points: Sequence[Sequence[tuple[float, float | None]]]) -> Chart | None:
        lines = [
            Series(label=record.path.name, style=f"run-{place % _NUM_STYLES}", points=line)
            for place, (record, line) in enumerate(zip(records, points, strict=True))
            if any(value is not None for _, value in line)
        ]
        return build_chart(key, title, lines, is_share=key in shares)

    shares = {"held-out", *(name for name, _, is_share in _CURVES if is_share)}
    held_out = [
        [(float(result.step), result.greedy.accuracy) for result in record.evals] for record in records
    ]
    charts = [draw("held-out", "Held-out accuracy", held_out)]
    for name, title, _ in _CURVES:
        lines = [[(line["step"], line.get(name)) for line in record.metrics] for record in records]
        charts.append(draw(name, title, [smooth(line, _SMOOTHED_STEPS) for line in lines]))
    return [chart for chart in charts if chart is not None]


def list_changes_in_words(comparison: ManyComparison) -> list[tuple[str, ...]]:
    """Return the rows of the table of changes, in `COLUMNS`; shares are means over an arm's seeds."""
    rows: list[tuple[str, ...]] = []
    for other in comparison.others:
        name = other.arm.label
        for key, change in list_changes(other.change).items():
            before, after = (_scores_of(arm, key) for arm in (comparison.baseline, other.arm))
            shares = _mean_share(before, "accuracy"), _mean_share(after, "accuracy")
            p_values = f"{change.p_value:.2g}", f"{other.p_values[key]:.2g}"
            rows.append((name, key, "accuracy", *shares, *_show_change(change), *p_values))
            over_seeds = other.over_seeds.get(key)
            if over_seeds is not None:
                rows.append((name, key, "accuracy, over seeds", "", "", *_show_change(over_seeds), "", ""))
            if change.format_ok is not None:
                shares = _mean_share(before, "format_ok_frac"), _mean_share(after, "format_ok_frac")
                rows.append((name, key, "format ok", *shares, *_show_change(change.format_ok), "", ""))
                in_both = _show_change(change.in_format)
                rows.append((name, key, "accuracy where both have the format", "", "", *in_both, "", ""))
    return rows


def _scores_of(arm: Arm, key: str) -> list[Summary]:
    """Return the scores of an arm's results by a key of `ArmChange`."""
    label, _, kind = key.rpartition(": ")
    return [(result.parts[label] if label else result).scores[kind] for result in arm.results]


def _mean_share(scores: Sequence[Summary], name: str) -> str:
    values = [value for score in scores if (value := getattr(score, name)) is not None]
    return f"{fmean(values):.1%}" if values else "-"


def _show_change(change: Interval | None) -> tuple[str, str]:
    if change is None:
        return "-", "-"
    return f"{change.estimate:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}"


def list_remarks(comparison: ManyComparison, *, is_declared: bool) -> Iterator[str]:
    """Yield remarks on the table for the reader. `is_declared`: --vary named the settings that may differ."""
    others = comparison.others
    for other in others:
        for key, change in list_changes(other.change).items():
            prefix = f"{other.arm.label}: " if len(others) > 1 else ""
            yield (
                f"{prefix}{key}: {change.num_gained} of {change.num_examples} examples solved more often,"
                f" {change.num_lost} less often, p = {change.p_value:.2g}"
            )
    if len(others) > 1:
        number = "both" if len(others) == 2 else f"all {len(others)}"
        yield f"p (Holm) holds for {number} comparisons together; each interval is one of 95 % by itself"
    if any(other.over_seeds for other in others):
        yield "intervals are over problems, with the seeds as they are; those over seeds say so"
    else:
        num_seeds = max(len(arm.paths) for arm in (comparison.baseline, *(other.arm for other in others)))
        seeds = "of one seed each" if num_seeds == 1 else "of a few seeds"
        yield f"intervals are over problems, {seeds}: what another seed would change is not in them"
    yield from comparison.notes
    if comparison.settings and not is_declared:
        keys = ", ".join(setting.key for setting in comparison.settings)
        yield f"no verdict on a cause: nothing was declared with --vary, and these differ: {keys}"
