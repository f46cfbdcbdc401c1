"""The summary at the end of a training: accuracy, changed examples, step time, and next commands."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.evaluate import compare_results
from strop.record import RunDir
from strop.record.prediction import compare_prediction, read_prediction
from strop.run.held_out import Changes, TrainOutcome
from strop.view.answers import describe_amount
from strop.view.display import cut
from strop.view.terminal import make_harmless, to_one_line

_MOST_ASKED = 60
"""Longest question, in characters, that is offered in a command."""


def describe_outcome(outcome: TrainOutcome) -> list[str]:
    """Return held-out accuracy before and after, and the change, as lines."""
    before, after = outcome.before, outcome.after
    lines = []
    for name, result in (("before", before), ("after", after)):
        if result is None:
            continue
        score = result.greedy
        if score.accuracy is None or not result.is_valid:
            lines.append(f"{name:6} held-out accuracy: {result.verdict}")
        else:
            lines.append(
                f"{name:6} held-out accuracy {score.accuracy:.1%} greedy (95% interval {score.low:.1%} to"
                f" {score.high:.1%}, {result.num_examples} examples)"
            )
    if before is not None and after is not None and before.is_valid and after.is_valid:
        change = compare_results(before, after).greedy
        if change is not None:
            lines.append(
                f"change {change.estimate:+.1%} (95% interval {change.low:+.1%} to {change.high:+.1%},"
                " same examples)"
            )
    return lines


def describe_pace(run_path: Path) -> list[str]:
    """Return planned and measured times as a line; nothing without a plan or a measurement."""
    prediction = read_prediction(run_path)
    if prediction is None:
        return []
    shown = {
        row.name: f"{row.name} {describe_amount(row.measured, row.unit)}"
        f" (planned {describe_amount(row.planned, row.unit)})"
        for row in compare_prediction(prediction, RunDir.open(run_path).metrics.read())
    }
    names = ("step", "generate", "wait for rollouts", "learn", "memory peak")
    parts = [shown[name] for name in names if name in shown]
    return [f"pace   {', '.join(parts)}"] if parts else []


def describe_changes(changes: Changes | None, *, width: int) -> list[str]:
    """Return the number of newly solved examples, and some of them with both replies, as lines."""
    if changes is None:
        return []
    lost = f"; {changes.num_lost} the other way round" if changes.num_lost else ""
    lines = [
        f"gained {changes.num_gained} of {changes.num_examples} examples, wrong before and right now{lost}"
    ]
    for example in changes.examples:
        texts = {"": example.question, "  before: ": example.before, "  now:    ": example.after}
        for label, text in texts.items():
            lines.append(cut(f"       {label}{to_one_line(text) or '(nothing)'}", width))
    return lines


def describe_next(outcome: TrainOutcome, words: Sequence[str], *, seed: int) -> list[str]:
    """Return useful next commands, as lines that can be pasted. `words`: the run file and its overrides."""
    program, run = _find_program(), str(outcome.run_path)
    commands = {(*program, "view", run): "every curve and every reply, in a browser"}
    question = next((example.question for example in outcome.changes.examples), "") if outcome.changes else ""
    # Only a question that can be pasted unchanged.
    is_plain = question.isprintable() and make_harmless(question) == question
    if 0 < len(question) <= _MOST_ASKED and is_plain:
        commands[(*program, "sample", run, "--prompt", question)] = "ask it something yourself"
    kept = [word for word in words if not word.startswith(("seed=", "output.dir="))]
    commands[(*program, "train", *kept, f"seed={seed + 1}")] = (
        "the same with other luck: how sure is the gain?"
    )
    lines: list[str] = []
    for command, purpose in commands.items():
        lines += [f"{'' if lines else 'next':7}{purpose}:", f"         {shlex.join(command)}"]
    return lines


def _find_program() -> tuple[str, ...]:
    """Return the words that start this program from here."""
    own = Path(sys.argv[0])
    if own.name != "strop":
        return (sys.executable, "-m", "strop.cli")
    on_path = shutil.which("strop")
    return ("strop",) if on_path is not None and Path(on_path).samefile(own) else (sys.argv[0],)
