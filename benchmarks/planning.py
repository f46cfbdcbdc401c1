"""Plan and simulation against a real run: the same file, the same machine, minutes apart.

The machine is measured as `strop plan --measure` does. Then a run with its engine in a process of its own is
trained, and its step time is compared with two predictions for the work that it turned out to have (length
of the replies, share of groups with signal): by the plan's formulas, and by the simulation, which takes the
same steps through the real source, router and walks of rollouts. The plan made before the run, which had to
assume both, is reported beside them.

Load from others between measuring and training shows in the ratios: a free machine is needed for the figures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.simulation import SimulationInput, SimulationWish, simulate
from strop.hardware import calibrate_machine
from strop.hardware.calibrate import Efficiency
from strop.plan.estimate import estimate_time
from strop.plan.planning import Planned, plan_work
from strop.record import RunDir
from strop.record.prediction import NUM_WARM_UP, compare_prediction, read_prediction
from strop.spec import load_spec
from strop.tokenizer import Tokenizer

BOUNDS = (0.67, 1.5)
"""A prediction may be off by half, as measured by predicted."""
WHOLE_LIMIT_S = 1200.0
_RUN = """
name = "planning"
seed = 3
[model]
uri = "{model_dir}"
[task]
name = "arithmetic"
max_value = 20
max_reply_tokens = 32
[train]
steps = {steps}
prompts_per_step = {prompts}
group_size = 8
checkpoint_every = 1000
[placement]
kind = "process"
[eval]
num_examples = 1
num_samples = 1
[tripwires]
max_truncated_frac = none
[output]
dir = "{out}"
"""


def measure_planning(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure, train, predict and simulate; return the ratios."""
    with tempfile.TemporaryDirectory(prefix="strop-planning-") as root:
        home = Path(root)
        run_file, out = home / "run.toml", home / "out"
        values = {"model_dir": model_dir, "out": out, "steps": 3 if is_quick else 8}
        text = _RUN.format(prompts=2 if is_quick else 8, **values)
        # TOML has no null, and a run file says "none".
        run_file.write_text(text.replace("= none", '= "none"'))
        cache = home / "cache"
        if is_quick:
            # The speed alone: shares are then the committed ones.
            calibrate_machine(cache_dir=cache)
        else:
            _strop(cache, "plan", str(run_file), "--measure", "--json")
        _strop(cache, "train", str(run_file))
        return compare(run_file, out, cache)


def compare(run_file: Path, out: Path, cache: Path) -> Measured:
    """Compare a finished run with plan and simulation for the work that it had."""
    metrics = RunDir.open(out).metrics.read()[NUM_WARM_UP:]
    planned = plan_work(load_spec(str(run_file), ()), cache_dir=cache)
    known = with_work_of(planned, metrics)
    predicted = estimate_time(known.work, known.speeds)
    solved = min(max(fmean(line["accuracy"] for line in metrics), 0.02), 0.98)
    simulated = simulate(
        SimulationInput(
            work=known.work,
            speeds=known.speeds,
            wish=SimulationWish(num_engines=1, num_steps=len(metrics), solved_frac=solved),
            task=known.task,
            tokenizer=Tokenizer.load(known.model_path),
        )
    )
    steps_s = tuple(line["seconds_step"] for line in metrics)
    before = read_prediction(out)
    assert before is not None
    parts = {part.name: part.amount for part in predicted.step_parts}
    stages = {
        name: {
            "measured": median(line[f"seconds_{name}"] for line in metrics),
            "planned": parts[name],
            "simulated": simulated.seconds.get(name),
        }
        for name in ("generate", "learn", "sync")
    }
    return Measured(
        figures=(
            _ratio("step by the plan for the run's work", median(steps_s), predicted.step_s, steps_s),
            _ratio("step by the simulation", median(steps_s), simulated.step_s, steps_s),
            *(
                _free(f"{one.name} by the plan made before it", one.ratio)
                for one in compare_prediction(before, RunDir.open(out).metrics.read())
                if one.name in {"step", "memory peak"} and one.ratio is not None
            ),
        ),
        details={
            "stages_s": stages,
            "step_s": {
                "measured": median(steps_s),
                "planned": predicted.step_s,
                "simulated": simulated.step_s,
            },
            "planned_before_s": before.step_s,
            "reply_tokens_mean": known.work.reply_tokens,
            "signal_frac": known.work.signal_frac,
            "efficiency": _facts(known.speeds.efficiency),
            "gflops": known.speeds.gflops,
        },
    )


def with_work_of(planned: Planned, metrics: Sequence[Mapping[str, float]]) -> Planned:
    """Replace what the plan assumes of a run by what its steps say."""
    signal = fmean(1.0 - line["zero_variance_frac"] for line in metrics)
    lengths = fmean(line["reply_tokens_mean"] for line in metrics)
    return replace(planned, work=replace(planned.work, reply_tokens_mean=lengths, signal_frac=signal))


def _facts(efficiency: Efficiency) -> dict[str, Any]:
    # Not its source, which names a folder of this machine: the model is in the head of every result.
    names = ("learn_frac", "decode_frac", "decode_layer_s", "update_frac")
    return {name: getattr(efficiency, name) for name in names}


def _ratio(name: str, measured: float, predicted: float, found: tuple[float, ...]) -> Figure:
    low, high = BOUNDS
    return Figure(
        name=name,
        unit="measured by said",
        value=measured / predicted,
        measured=tuple(one / predicted for one in found),
        at_least=low,
        at_most=high,
    )


def _free(name: str, ratio: float) -> Figure:
    return Figure(name=name, unit="measured by said", value=ratio, measured=(ratio,))


def _strop(cache: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "strop.cli", *words],
        env={**os.environ, "STROP_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        timeout=WHOLE_LIMIT_S,
        check=True,
    )
