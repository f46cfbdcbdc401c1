"""Does `recipes/reverse-text.toml` learn, and not to say one thing to everybody? Half an hour on two cores.

Its reward grades partial work, which is where a policy collapses: the reward rises, accuracy does not, and
different prompts get one short reply. So beside the reward the figures say whether replies still depend on
their prompts at the end. Nothing is timed, so other work beside it does no harm.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from benchmarks.demo import ROOT, DemoFailed, read_metrics, train_demo
from benchmarks.figures import Figure, Measured

RECIPE = ROOT / "recipes" / "reverse-text.toml"
NUM_AVERAGED = 8
"""Steps at either end whose means are compared."""
COLLAPSES = ("reply_collapse", "entropy_collapse", "entropy_fall", "length_collapse", "reward_collapse")
MAX_COMMON_FRAC = 0.25
MIN_DEPENDENCE = 0.15


def measure_reverse_text(*, is_quick: bool) -> Measured:
    """Train by the recipe once; compare the last steps with the first ones."""
    short = ("train.steps=2", "eval.num_examples=8") if is_quick else ()
    lines: list[dict[str, float]] = []
    causes: list[str] = []

    def look(run_dir: Path) -> None:
        lines.extend(read_metrics(run_dir))
        events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        causes.extend(event["cause"] for event in events if event["kind"] == "tripwire")

    # A collapse is a figure here, and no reason to end before it can be read.
    result = train_demo(*short, "tripwires.on_alarm=warn", look=look, recipe=RECIPE)
    num_averaged = 1 if is_quick else NUM_AVERAGED

    def mean_of(metric: str, steps: list[dict[str, float]]) -> float:
        values = [step[metric] for step in steps if metric in step]
        if not values:
            raise DemoFailed(f"no step has {metric}. Allowed: steps with rollouts.")
        return fmean(values)

    def figure(
        name: str, value: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> Figure:
        # Two steps show that it works; goals are for whole runs.
        goals = (None, None) if is_quick else (at_least, at_most)
        return Figure(name=name, unit="", value=value, measured=(value,), at_least=goals[0], at_most=goals[1])

    first, last = lines[:num_averaged], lines[-num_averaged:]
    begun_with = mean_of("reward_mean", first)
    figures = [
        figure("reward, first steps", begun_with),
        figure("reward, last steps", mean_of("reward_mean", last), at_least=begun_with),
        figure("accuracy before", result.accuracy_before),
        figure("accuracy after", result.accuracy_after),
        figure("reply tokens, first steps", mean_of("reply_tokens_mean", first)),
        figure("reply tokens, last steps", mean_of("reply_tokens_mean", last)),
        figure(
            "one wrong reply to different prompts",
            mean_of("common_reply_frac", last),
            at_most=MAX_COMMON_FRAC,
        ),
        figure("dependence on the prompt", mean_of("prompt_dependence", last), at_least=MIN_DEPENDENCE),
        figure("alarms of a collapse", float(sum(causes.count(cause) for cause in COLLAPSES)), at_most=0.0),
    ]
    return Measured(figures=figures, details={"steps": len(lines), "alarms": causes})
