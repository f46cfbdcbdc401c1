"""The demo's run on Ray with two FSDP2 ranks and one vLLM replica, beside the run in one process.

What the machinery costs is what is left of a step when the work is taken away: the time in which vLLM was
sampling, by its server's own clock, and the time in which the ranks computed, by theirs, with their
collectives. The rest is Ray, the wire, weights on their way, judging, and the record.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.demo import read_metrics, train_demo
from benchmarks.figures import Figure, Measured

ON_RAY = (
    "placement.kind=ray",
    "placement.learners=2",
    "placement.engines=1",
    "engine.kind=vllm",
    "engine.max_model_tokens=512",
    # Two ranks and vLLM on two cores: a thread for each.
    "placement.threads=1",
)
MAX_OVERHEAD_FRAC = 0.15
SLACK = 0.10
"""100 sums: two runs of equal skill differ by less than this in greedy accuracy nineteen times of twenty."""
_SAMPLED = re.compile(r"serving version (\d+), .*sampled for ([0-9.]+) s")


def measure_ray_demo(*, is_quick: bool) -> Measured:
    """Train both arms, and take the work away from the steps of the second."""
    found: dict[str, Any] = {}

    def look(run_dir: Path) -> None:
        found.update(split_steps(run_dir))

    short = ("train.steps=3", "eval.num_examples=8") if is_quick else ()
    here = train_demo(*short)
    there = train_demo(*ON_RAY, *short, look=look)
    overheads = tuple(found["overhead_frac"])
    goal = None if is_quick else here.accuracy_after - SLACK
    return Measured(
        figures=(
            _free("accuracy in one process", "share", here.accuracy_after),
            Figure(
                name="accuracy on Ray",
                unit="share",
                value=there.accuracy_after,
                measured=(there.accuracy_after,),
                at_least=goal,
            ),
            Figure(
                name="machinery's share of a step on Ray",
                unit="share",
                value=median(overheads),
                measured=overheads,
                at_most=MAX_OVERHEAD_FRAC,
            ),
            _free("seconds of a step in one process", "s", here.train_s / here.num_steps),
            _free("seconds of a step on Ray", "s", there.train_s / there.num_steps),
        ),
        details={"settings": ON_RAY, "steps": found},
    )


def split_steps(run_dir: Path) -> dict[str, list[float]]:
    """Return seconds of each step on Ray: whole, sampling, computing, and the share that is neither.

    The engine's clock is read at each update, so it holds what was sampled for the step that made the update.
    The first one also holds the gate's probes, one behind an evaluation that too: such steps are left out.
    """
    metrics = read_metrics(run_dir)
    # A role's own log and that of its server; one of them holds these lines.
    said = "".join(path.read_text() for path in sorted(run_dir.rglob("engine*.log")))
    sampled = {int(version): float(s) for version, s in _SAMPLED.findall(said)}
    evaluated = {int(path.stem.rsplit("-", 1)[1]) for path in run_dir.glob("eval/*-step-*.json")}
    steps: dict[str, list[float]] = {
        name: [] for name in ("whole_s", "sample_s", "compute_s", "overhead_frac")
    }
    for line in metrics:
        version, whole_s = int(line["policy_version"]), line["seconds_step"]
        if int(line["step"]) - 1 in evaluated or version not in sampled:
            continue
        work = {"whole_s": whole_s, "sample_s": sampled[version], "compute_s": line["seconds_compute"]}
        work["overhead_frac"] = 1.0 - (work["sample_s"] + work["compute_s"]) / whole_s
        for name, value in work.items():
            steps[name].append(value)
    return steps


def _free(name: str, unit: str, value: float) -> Figure:
    return Figure(name=name, unit=unit, value=value, measured=(value,))
