"""The static report of a run: one HTML file, without scripts and external fonts or pictures.

It opens from a disk or an attachment in ten years, in light and dark, on paper and in a screen reader. Texts
of a model are escaped as HTML and cleared of control and invisible characters.
Left out on purpose: interaction; `strop query` answers further questions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from strop import __version__
from strop.io import write_bytes_atomically
from strop.record.files import RecordFiles
from strop.record.prediction import compare_prediction
from strop.rollout import Rollout
from strop.tasks.failures import describe_failure
from strop.view.alarms import count_alarms
from strop.view.charts import SMALL, Chart, Estimate, Series, build_chart, smooth
from strop.view.run_record import (
    NOTED_KINDS,
    RolloutsAtStep,
    RunRecord,
    compare_ends,
    describe_protocol,
    list_checks,
    read_record,
    read_run_record,
    sum_stages,
)
from strop.view.terminal import describe_duration, describe_usd, make_harmless

REPORT_NAME = "report.html"
MAX_TEXT_CHARACTERS = 4000
SMOOTHED_STEPS = 5
_TEMPLATES = Path(__file__).parent / "templates"

Points = list[tuple[float, float | None]]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRollout:
    """A rollout for the page."""

    prompt: str
    reply: str
    answer: str | None
    reward: float | None
    verdict: str
    """'solved', 'not solved', 'unscored' or 'scored'."""
    facts: str


def write_report(run_dir: Path) -> Path:
    """Write a run's report into its directory atomically, and return its path.

    Works while the run goes on; a later call replaces the file.
    Raises: StoreError if it is not a run directory or the disk fails; CorruptRecord if a record in it
        is damaged.
    """
    path = run_dir / REPORT_NAME
    write_bytes_atomically(path, render_report(read_run_record(run_dir)).encode())
    return path


def write_report_of(name: str, files: RecordFiles, folder: Path) -> Path:
    """Write the report of a job's or a store's run as NAME-report.html in a folder; return its path.

    Raises: like `write_report`.
    """
    path = folder / f"{name.replace('/', '-')}-{REPORT_NAME}"
    write_bytes_atomically(path, render_report(read_record(name, files)).encode())
    return path


def render_report(record: RunRecord) -> str:
    """Render the page."""
    stages = sum_stages(record.metrics)
    # The stages of a step with the length and the start of their bar, in percent.
    total_s, start, rows = sum(stages.values()) or 1.0, 0.0, []
    for name, seconds in stages.items():
        share = seconds / total_s * 100
        rows.append({"name": name, "seconds": seconds, "share": share, "start": start})
        start += share
    passed, accepted = list_checks(record.events)
    # The run's algorithm, or the name of its objective.
    algorithm, terms = _lookup(record.spec, "algorithm", "name"), _lookup(record.spec, "train", "terms")
    own = {"sft": "sft", "dpo": _lookup(record.spec, "dpo", "loss") or "dpo", "distill": "distillation"}
    return (
        open_templates()
        .get_template("report.html.j2")
        .render(
            name=record.path.name,
            task=_lookup(record.spec, "task", "name"),
            model=_lookup(record.spec, "model", "uri"),
            algorithm=f"{algorithm} and sft" if terms == "rl+sft" else own.get(terms or "", algorithm),
            status=describe_status(record),
            plot_range=describe_plot_range(record),
            ends=compare_ends(record.evals),
            evals=record.evals,
            protocol=describe_protocol(record.evals[-1]) if record.evals else {},
            outcome_charts=_present(chart_accuracy(record), chart_reward(record)),
            part_charts=chart_parts(record.metrics),
            health_charts=chart_health(record.metrics),
            stages=rows,
            stage_total_s=sum(stages.values()),
            prediction=record.prediction,
            compared=compare_with_plan(record),
            alarms=count_alarms(record.events),
            checks=passed,
            accepted=accepted,
            audit=describe_audit(record.audit),
            fates=list_fates(record.metrics),
            noted=[event for event in record.events if event.kind in NOTED_KINDS],
            examples=_present(
                _show_step("At the start", record.early), _show_step("At the end", record.late)
            ),
            facts=collect_facts(record),
            spec_text=record.spec_text,
            version=__version__,
        )
    )


def open_templates() -> Environment:
    """Return the templates of the pages; foreign texts need the filter `harmless`."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["harmless"] = make_harmless
    environment.filters["duration"] = describe_duration
    return environment


def chart_accuracy(record: RunRecord) -> Chart | None:
    """Chart training accuracy per step, its trailing mean, and held-out accuracy with intervals."""
    points = _series(record.metrics, "accuracy")
    series = [
        Series(label="training, each step", style="faint", points=points),
        Series(
            label=f"training, mean of {SMOOTHED_STEPS} steps",
            style="main",
            points=smooth(points, SMOOTHED_STEPS),
        ),
    ]
    estimates = [
        Estimate(
            step=result.step,
            value=accuracy,
            low=result.greedy.low,
            high=result.greedy.high,
            label=f"Held-out, step {result.step}: {accuracy:.1%}, 95% interval"
            f" {result.greedy.low:.1%} to {result.greedy.high:.1%}",
        )
        for result in record.evals
        if (accuracy := result.greedy.accuracy) is not None
    ]
    return build_chart("accuracy", "Accuracy", series if points else [], estimates=estimates, is_share=True)


def chart_reward(record: RunRecord) -> Chart | None:
    """Chart the mean reward of each step and its trailing mean."""
    points = _series(record.metrics, "reward_mean")
    mean = smooth(points, SMOOTHED_STEPS)
    return build_chart(
        "reward",
        "Reward",
        [
            Series(label="each step", style="faint", points=points),
            Series(label=f"mean of {SMOOTHED_STEPS} steps", style="main", points=mean),
        ],
    )


def chart_health(metrics: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Chart the metrics that diagnose a run; a metric never measured is left out."""
    wanted = [
        ("zero_variance_frac", "Groups without signal", True),
        ("truncated_frac", "Replies cut at their limit", True),
        ("entropy_nats", "Entropy (nats per token)", False),
        ("prompt_dependence", "How far replies tell their prompts (0: by chance)", False),
        ("drift_mean_nats", "Engine-trainer drift (nats)", False),
        ("staleness_mean", "Staleness (steps behind the weights)", False),
        ("reply_tokens_mean", "Reply length (tokens)", False),
        ("grad_norm", "Gradient norm", False),
        ("update_ratio", "Change of the weights by a step, over the weights", False),
        ("reference_kl_nats", "KL to the reference (nats per token)", False),
        ("approx_kl_nats", "KL from where the batch began (nats per token)", False),
        ("clip_low_frac", "Tokens stopped at the lower bound", True),
        ("clip_high_frac", "Tokens stopped at the upper bound", True),
        ("policy_entropy_nats", "Entropy over the vocabulary (nats per token)", False),
        ("seconds_step", "Step time (seconds)", False),
        ("scored_tokens_per_s", "Scored tokens per second", False),
    ]
    if any("num_sft_tokens" in line for line in metrics):
        # A mixed run has a separate loss for SFT; pure SFT has only one loss.
        loss = "loss_sft" if any("loss_sft" in line for line in metrics) else "loss"
        wanted += [
            (loss, "Cross-entropy of demonstrations (weighted nats per token)", False),
            ("grad_norm_rl", "Gradient norm of the rollouts", False),
            ("grad_norm_sft", "Gradient norm of the demonstrations", False),
            ("grad_cosine", "Cosine between the two gradients", False),
        ]
    if any("num_pairs" in line for line in metrics):
        wanted += [
            ("loss", "Loss of the pairs", False),
            ("pair_accuracy", "Pairs whose better reply gained more", True),
            ("pair_margin_nats", "Margin of the pairs (nats)", False),
            ("pair_better_gain_nats", "What the better replies gained (nats)", False),
            ("pair_worse_gain_nats", "What the worse replies gained (nats)", False),
        ]
    ratios = [
        Series(label="99th percentile", style="faint", points=_series(metrics, "ratio_p99")),
        Series(label="median", style="main", points=_series(metrics, "ratio_p50")),
        Series(label="1st percentile", style="faint", points=_series(metrics, "ratio_p01")),
    ]
    charts = [
        build_chart("ratio", "Probability ratio of trained tokens", ratios, size=SMALL),
        *(
            _small_chart(key.replace("_", "-"), title, metrics, key, is_share=is_share)
            for key, title, is_share in wanted
        ),
    ]
    return _present(*charts)


def chart_parts(metrics: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Chart each part of the reward and of a mixture of tasks; none if there is only one of each."""
    wanted = [
        ("reward_part_", "Part of the reward", False),
        ("reward_mean_", "Reward", False),
        ("accuracy_", "Accuracy", True),
        ("reply_tokens_mean_", "Reply length (tokens)", False),
    ]
    measured = dict.fromkeys(name for line in metrics for name in line)
    parts = [
        (name, f"{title}: {make_harmless(name.removeprefix(prefix))}", is_share)
        for prefix, title, is_share in wanted
        for name in measured
        if name.startswith(prefix)
    ]
    charts = [
        _small_chart(f"part-{index}", title, metrics, name, is_share=is_share)
        for index, (name, title, is_share) in enumerate(parts)
    ]
    return _present(*charts)


def _small_chart(
    key: str, title: str, metrics: Sequence[Mapping[str, float]], name: str, *, is_share: bool
) -> Chart | None:
    line = Series(label=title, style="main", points=_series(metrics, name))
    return build_chart(key, title, [line], is_share=is_share, size=SMALL)


_FATES = (
    ("zero_variance_frac", "Groups without signal: all attempts earned the same"),
    ("failed_frac", "Rollouts that could not be scored"),
    ("refilled_frac", "Rollouts that were attempted again, because machinery failed"),
    ("prompt_too_long_frac", "Rollouts not attempted, because the prompt left no room"),
    ("truncated_frac", "Replies cut at their limit"),
    ("wasted_token_frac", "Sampled tokens that were not trained on"),
)
_GROUP_FATES = (
    ("num_trained_groups", "Groups that moved the weights"),
    ("num_skipped_groups", "Groups of a batch that gave no gradient"),
    ("num_failed_groups", "Groups of a batch of which too few rollouts could be scored"),
    ("num_filtered_groups", "Groups replaced, because their rewards were equal"),
    ("num_evicted_groups", "Groups discarded: too old when their step came"),
)


def list_fates(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return, as label and text, how samples were used over all steps; metrics never measured are left out.

    Shares are means over steps, groups are counted.
    """
    values = {name: [line[name] for line in metrics if name in line] for name in _FATE_METRICS}
    fates = [(label, f"{statistics.fmean(values[name]):.1%}") for name, label in _FATES if values[name]]
    fates += [(label, f"{sum(values[name]):,.0f}") for name, label in _GROUP_FATES if values[name]]
    if values["staleness_mean"]:
        mean, most = statistics.fmean(values["staleness_mean"]), max(values["staleness_max"], default=0.0)
        fates.append(
            ("Steps that rollouts were behind the weights", f"{mean:.2f} in the mean, {most:g} at most")
        )
    return fates


_FATE_METRICS = [*dict(_FATES), *dict(_GROUP_FATES), "staleness_mean", "staleness_max"]


def describe_audit(audit: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an audit's verdict, the number of passed probes, and the other probes."""
    if audit is None:
        return None
    probes = [probe for probe in audit.get("probes", ()) if isinstance(probe, Mapping)]
    accepted = {entry.get("probe"): entry.get("reason", "") for entry in audit.get("accepted", ())}
    return {
        "verdict": str(audit.get("verdict", "unknown")),
        "num_passed": sum(probe.get("status") == "pass" for probe in probes),
        "findings": [
            {
                "probe": str(probe.get("probe")),
                "status": str(probe.get("status")),
                "detail": str(probe.get("detail", "")),
                "accepted": accepted.get(probe.get("probe")),
            }
            for probe in probes
            if probe.get("status") not in ("pass", "n/a")
        ],
    }


def _series(metrics: Sequence[Mapping[str, float]], key: str) -> Points:
    """Return a metric over steps, None where it is missing; empty if it is missing everywhere."""
    points: Points = [(line["step"], line.get(key)) for line in metrics]
    return points if any(value is not None for _, value in points) else []


def compare_with_plan(record: RunRecord) -> list[dict[str, Any]]:
    """Return planned numbers with their measured ones; none if nothing was planned or measured."""
    if record.prediction is None:
        return []
    return [
        {
            "name": row.name,
            "planned": describe_amount(row.planned, row.unit),
            "measured": describe_amount(row.measured, row.unit),
            "ratio": row.ratio,
        }
        for row in compare_prediction(record.prediction, record.metrics)
    ]


def describe_amount(amount: float, unit: str) -> str:
    """Format a number of a plan; `unit` is 's', 'bytes', 'USD' or a rate."""
    if unit == "s":
        return f"{1e3 * amount:.0f} ms" if amount < 0.1 else describe_duration(amount)
    if unit == "USD":
        return describe_usd(amount)
    return f"{amount / 1e9:.2f} GB" if unit == "bytes" else f"{amount:,.0f} {unit}"


def describe_status(record: RunRecord) -> str:
    """Return the run's progress in one line."""
    wanted = _lookup(record.spec, "train", "steps")
    progress = f"{record.num_steps} of {wanted} steps" if wanted else f"{record.num_steps} steps"
    if record.state.finished_at is not None:
        return f"finished on {_instant(record.state.finished_at)}, {progress}"
    return f"not finished, {progress} so far"


def describe_plot_range(record: RunRecord) -> str | None:
    """Return the range of the charts' steps, with a warning if it is not the whole run; None: no steps."""
    if not record.metrics:
        return None
    first, last = int(record.metrics[0]["step"]), record.num_steps
    wanted = int(_lookup(record.spec, "train", "steps") or last)
    if first <= 1 and last >= wanted:
        return f"The charts show the whole run, steps 1 to {last}."
    return (
        f"Cut short: the charts show steps {first} to {last} of the {wanted} of the run. What is not recorded"
        " may look otherwise."
    )


def collect_facts(record: RunRecord) -> list[tuple[str, str]]:
    """Collect the run's identity and cost, as label and text."""
    state, num = record.state, record.state.num_attempts
    facts = [
        ("Started", _instant(state.created_at)),
        ("Processes", "one" if num <= 1 else f"{num}, each resumed from a checkpoint"),
        ("Seed", str(record.spec.get("seed", "default"))),
        ("Spec digest", state.spec_digest),
    ]
    facts += [(name.replace("_", " ").capitalize(), _plain(value)) for name, value in state.facts.items()]
    seconds = [line["seconds_step"] for line in record.metrics if "seconds_step" in line]
    if seconds:
        facts.append(("Training time", describe_duration(sum(seconds))))
        facts.append(("Median step", describe_duration(statistics.median(seconds))))
    planned = record.prediction
    if planned is not None and (rate := planned.usd_per_hour) is not None:
        price = describe_usd(rate * sum(seconds) / 3600.0)
        wanted = f"; planned {describe_usd(rate * planned.total_s / 3600.0)}" if planned.total_s else ""
        facts.append(("Price of the steps", f"{price} at {describe_usd(rate)} an hour{wanted}"))
    tokens = sum(line.get("num_scored_tokens", 0) for line in record.metrics)
    if tokens:
        facts.append(("Scored tokens", f"{tokens:,.0f}"))
    peak_bytes = max((line.get("peak_memory_bytes", 0) for line in record.metrics), default=0)
    if peak_bytes:
        facts.append(("Peak memory", f"{peak_bytes / 1e9:.2f} GB"))
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def _show_step(title: str, chosen: RolloutsAtStep | None) -> dict[str, Any] | None:
    if chosen is None:
        return None
    return {"title": title, "step": chosen.step, "rollouts": [show_rollout(r) for r in chosen.rollouts]}


def show_rollout(rollout: Rollout) -> ShownRollout:
    """Prepare a rollout for the page: harmless texts, cut if they are very long."""
    outcome, reply = rollout.outcome, rollout.reply
    if outcome.failure is not None:
        verdict = "unscored"
    elif outcome.is_correct is None:
        verdict = "scored" if outcome.is_scored else "unscored"
    else:
        verdict = "solved" if outcome.is_correct else "not solved"
    facts = [f"{rollout.num_sampled_tokens} tokens"]
    if outcome.truncated:
        facts.append("cut at its limit")
    if outcome.format_ok is False:
        facts.append("not in the asked form")
    if outcome.failure is not None:
        facts.append(_cut(describe_failure(outcome.failure)))
    return ShownRollout(
        prompt=_cut("\n".join(turn.text for turn in rollout.heard)),
        reply=_cut(reply.text if reply is not None else ""),
        answer=rollout.example.answer,
        reward=outcome.reward,
        verdict=verdict,
        facts=", ".join(facts),
    )


def _cut(text: str) -> str:
    shown = make_harmless(text).strip("\n")
    if len(shown) <= MAX_TEXT_CHARACTERS:
        return shown
    return f"{shown[:MAX_TEXT_CHARACTERS]} ... {len(shown) - MAX_TEXT_CHARACTERS} characters cut"


def _lookup(spec: Mapping[str, Any], section: str, key: str) -> str | None:
    value = spec.get(section, {}).get(key)
    return None if value is None else str(value)


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _present(*parts: T | None) -> list[T]:
    return [part for part in parts if part is not None]
