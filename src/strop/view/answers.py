"""The answers of the page's API, as JSON values: all runs, one run, one rollout, a comparison of runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.errors import StropError
from strop.record import Event, EventKind, RunState
from strop.record.prediction import Prediction, compare_prediction
from strop.rollout import ToolCall
from strop.tasks.tool_calls import read_any
from strop.view.live import EVALUATION, NOTES, TRAINING, LiveRun
from strop.view.terminal import ALARM_KINDS, describe_duration, describe_usd

if TYPE_CHECKING:
    from strop.evaluate import EvalResult, Interval


_NOTED_KINDS = frozenset({EventKind.RESUME, EventKind.NOTICE, EventKind.STOP})


def list_runs(runs: Sequence[LiveRun]) -> list[dict[str, Any]]:
    """Return a line for each run, the newest first; damaged runs have their error."""
    lines = []
    for run in runs:
        key = run.key
        try:
            state = run.read_state()
            run.read_metrics()
            results = run.read_results()
        except StropError as error:
            lines.append({"key": key, "created_at": 0.0, "phase": "damaged", "error": str(error)})
            continue
        last = results[-1].greedy if results else None
        metrics = run.metrics[-1] if run.metrics else {}
        lines.append(
            {
                "key": key,
                "phase": run.find_phase(),
                "created_at": state.created_at,
                "num_steps": int(metrics.get("step", 0)),
                "task": state.facts.get("task"),
                "model": state.facts.get("model_uri"),
                "accuracy": None if last is None else last.accuracy,
                "low": None if last is None else last.low,
                "high": None if last is None else last.high,
                "reward": metrics.get("reward_mean"),
            }
        )
    return sorted(lines, key=lambda line: line["created_at"], reverse=True)


def describe_run(live: LiveRun) -> dict[str, Any]:
    """Return everything about a run except its curves and its rollouts."""
    events, events_offset = live.read_events()
    live.read_metrics()
    state, spec, evals, predicted = live.read_state(), live.read_spec(), live.read_evals(), live.read_plan()
    return {
        "key": live.key,
        "phase": live.find_phase(),
        "plot_range": describe_plot_range(live.metrics, _lookup(spec, "train", "steps")),
        "task": state.facts.get("task") or _lookup(spec, "task", "name"),
        "model": _lookup(spec, "model", "uri"),
        "algorithm": _name_method(spec),
        "created_at": state.created_at,
        "num_attempts": state.num_attempts,
        "wanted_steps": spec.get("train", {}).get("steps"),
        "evals": [_describe_eval(result) for result in evals],
        "change": None if (change := _compare_ends(evals)) is None else asdict(change),
        "alarms": count_alarms(events),
        "gate": [asdict(event) for event in events if event.kind is EventKind.GATE],
        "log": [asdict(event) for event in events if event.kind in _NOTED_KINDS],
        "compared": [] if predicted is None else compare_with_plan(predicted, live.metrics),
        "audit": live.read_audit(),
        "facts": collect_facts(state, spec, predicted, live.metrics),
        "spec": live.read_text("spec.toml"),
        "notes": live.read_text(NOTES),
        "notes_path": live.record.describe(NOTES),
        "rollout_steps": live.rollout_steps(),
        "reply_steps": live.rollout_steps(EVALUATION),
        # Read first: events between this and the rest are sent twice, and never missed.
        "events_offset": events_offset,
    }


def count_alarms(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Count alarms by cause, in order of first appearance.

    The log thins out repeated alarms; the last entry's `occurrence` is the count within one process, so the
    count over several processes is a lower bound.
    """
    by_cause: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in ALARM_KINDS:
            by_cause[event.kind.value, event.cause].append(event)
    return [
        {
            "kind": kind,
            "cause": cause,
            "num_times": max(len(group), *(event.occurrence for event in group)),
            "first_step": group[0].step,
            "last_step": group[-1].step,
            "detail": group[-1].detail,
        }
        for (kind, cause), group in by_cause.items()
    ]


def _compare_ends(evals: Sequence[EvalResult]) -> Interval | None:
    """Return the paired change of greedy accuracy from the first evaluation to the last.

    None if there are not two of different steps, or one is invalid: these are shown, but not compared.
    """
    from strop.evaluate import compare_results

    if not evals or evals[0].step == evals[-1].step or not (evals[0].is_valid and evals[-1].is_valid):
        return None
    return compare_results(evals[0], evals[-1]).greedy


def _name_method(spec: Mapping[str, Any]) -> str | None:
    """Return the run's algorithm, or the name of its objective."""
    terms, algorithm = (_lookup(spec, *path) for path in (("train", "terms"), ("algorithm", "name")))
    own = {"sft": "sft", "dpo": _lookup(spec, "dpo", "loss") or "dpo", "distill": "distillation"}
    return f"{algorithm} and sft" if terms == "rl+sft" else own.get(terms or "", algorithm or terms)


def _describe_eval(result: EvalResult) -> dict[str, Any]:
    sampled = result.sampled
    return {
        "step": result.step,
        "task": result.full_name,
        "num_examples": result.num_examples,
        "accuracy": result.greedy.accuracy,
        "low": result.greedy.low,
        "high": result.greedy.high,
        "sampled": None if sampled is None else sampled.accuracy,
        "truncated": result.greedy.truncated_frac,
        "validity": result.validity.value,
        "is_valid": result.is_valid,
    }


def describe_row(live: LiveRun, step: int, key: str, of: str = TRAINING) -> dict[str, Any]:
    """Return a rollout turn by turn, with the tokens of sampled turns.

    Raises: like `LiveRun.read_row`.
    """
    stored = live.read_row(step, key, of)
    rollout, outcome = stored.rollout, stored.rollout.outcome
    turns = []
    for turn, advantages in zip(rollout.turns, stored.advantages, strict=True):
        content: dict[str, Any] = {
            "role": turn.role,
            "text": turn.text,
            "num_tokens": len(turn.token_ids),
            "version": turn.policy_version,
            "finish": turn.finish_reason and turn.finish_reason.value,
            "calls": [asdict(call) for call in read_calls(turn.text)] if turn.is_sampled else [],
        }
        if turn.is_sampled:
            content |= {
                "token_ids": turn.token_ids.tolist(),
                "tokens": live.cut_tokens(turn),
                "logprobs": None if turn.logprobs is None else _round(turn.logprobs),
                "advantages": None if advantages is None else _round(advantages),
            }
        turns.append(content)
    return {
        "step": step,
        "key": key,
        "task": rollout.example.task,
        "example_id": rollout.example.example_id,
        "sample_index": rollout.sample_index,
        "answer": rollout.example.answer,
        "fields": dict(rollout.example.fields),
        "turns": turns,
        "reward": outcome.reward,
        "parts": dict(outcome.parts),
        "metrics": dict(outcome.metrics),
        "is_correct": outcome.is_correct,
        "format_ok": outcome.format_ok,
        "truncated": outcome.truncated,
        "timed_out": outcome.timed_out,
        "extracted": outcome.extracted,
        "isolation": outcome.isolation,
        "failure": outcome.failure
        and {
            "owner": outcome.failure.owner.value,
            "kind": outcome.failure.kind,
            "detail": outcome.failure.detail,
        },
        "sampling": asdict(rollout.sampling),
        "seconds": dict(rollout.seconds),
        "status": stored.status,
        "staleness": stored.staleness,
    }


def read_calls(text: str) -> Sequence[ToolCall]:
    """Return the tool calls in a reply, in the syntax of any model family."""
    # The tools are not recorded, so a call of any name counts.
    return read_any(text, {"any": {}}).calls


def _round(values: Any) -> list[float | None]:
    """Round to five digits; NaN and infinities become None."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.tolist()]


def compare(runs: Sequence[LiveRun]) -> dict[str, Any]:
    """Return the last evaluations of runs, and the paired change of each against the first.

    If runs cannot be compared, the answer has the reason; their curves are still shown.
    """
    from strop.run.runs import Arm, compare_arms, list_changes, list_values

    lasts = [run.read_evals()[-1:] for run in runs]
    arms = [
        Arm(name=run.key, paths=(Path(run.key),), results=tuple(last), values=list_values(run.read_spec()))
        for run, last in zip(runs, lasts, strict=True)
    ]
    answer: dict[str, Any] = {
        "runs": [
            {"key": arm.name, "last": _describe_eval(arm.results[-1]) if arm.results else None}
            for arm in arms
        ],
        "changes": [],
        "notes": [],
    }
    answer["settings"] = [
        {"key": key, "values": [str(arm.values.get(key, "not set")) for arm in arms]}
        for key in sorted({key for arm in arms for key in arm.values})
        if len({str(arm.values.get(key)) for arm in arms}) > 1
    ]
    lacking = [arm.name for arm in arms if not arm.results]
    if lacking:
        return answer | {"error": f"{', '.join(lacking)}: no evaluation to compare"}
    try:
        comparison = compare_arms(arms)
    except StropError as error:
        return answer | {"error": str(error)}
    answer["notes"] = list(comparison.notes)
    for other in comparison.others:
        for name, change in list_changes(other.change).items():
            over_seeds = other.over_seeds.get(name)
            answer["changes"].append(
                {
                    "arm": other.arm.label,
                    "against": comparison.baseline.label,
                    "replies": name,
                    "estimate": change.estimate,
                    "low": change.low,
                    "high": change.high,
                    "num_gained": change.num_gained,
                    "num_lost": change.num_lost,
                    "num_examples": change.num_examples,
                    "p_value": other.p_values.get(name),
                    "over_seeds": None if over_seeds is None else asdict(over_seeds),
                }
            )
    return answer


def compare_with_plan(plan: Prediction, metrics: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return planned numbers with their measured ones, those that were measured."""
    return [
        {
            "name": row.name,
            "planned": describe_amount(row.planned, row.unit),
            "measured": describe_amount(row.measured, row.unit),
            "ratio": row.ratio,
        }
        for row in compare_prediction(plan, metrics)
    ]


def describe_amount(amount: float, unit: str) -> str:
    """Format a number of a plan; `unit` is 's', 'bytes', 'USD' or a rate."""
    if unit == "s":
        return f"{1e3 * amount:.0f} ms" if amount < 0.1 else describe_duration(amount)
    if unit == "USD":
        return describe_usd(amount)
    return f"{amount / 1e9:.2f} GB" if unit == "bytes" else f"{amount:,.0f} {unit}"


def describe_plot_range(metrics: Sequence[Mapping[str, float]], wanted: str | None) -> str | None:
    """Return the range of the charts' steps, with a warning if it is not the whole run; None: no steps."""
    if not metrics:
        return None
    first, last = int(metrics[0]["step"]), int(metrics[-1]["step"])
    if first <= 1 and last >= int(wanted or last):
        return f"The charts show the whole run, steps 1 to {last}."
    return (
        f"Cut short: the charts show steps {first} to {last} of the {wanted or last} of the run. What is not"
        " recorded may look otherwise."
    )


def collect_facts(
    state: RunState,
    spec: Mapping[str, Any],
    planned: Prediction | None,
    metrics: Sequence[Mapping[str, float]],
) -> list[tuple[str, str]]:
    """Collect a run's identity and cost, as label and text."""
    num = state.num_attempts
    facts = [
        ("Started", instant(state.created_at)),
        ("Processes", "one" if num <= 1 else f"{num}, each resumed from a checkpoint"),
        ("Seed", str(spec.get("seed", "default"))),
        ("Spec digest", state.spec_digest),
    ]
    facts += [(name.replace("_", " ").capitalize(), _plain(value)) for name, value in state.facts.items()]
    seconds = [line["seconds_step"] for line in metrics if "seconds_step" in line]
    if seconds:
        facts.append(("Training time", describe_duration(sum(seconds))))
        facts.append(("Median step", describe_duration(statistics.median(seconds))))
    if planned is not None and (rate := planned.usd_per_hour) is not None:
        price = describe_usd(rate * sum(seconds) / 3600.0)
        wanted = f"; planned {describe_usd(rate * planned.total_s / 3600.0)}" if planned.total_s else ""
        facts.append(("Price of the steps", f"{price} at {describe_usd(rate)} an hour{wanted}"))
    tokens = sum(line.get("num_scored_tokens", 0) for line in metrics)
    if tokens:
        facts.append(("Scored tokens", f"{tokens:,.0f}"))
    peak_bytes = max((line.get("peak_memory_bytes", 0) for line in metrics), default=0)
    if peak_bytes:
        facts.append(("Peak memory", f"{peak_bytes / 1e9:.2f} GB"))
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def _lookup(spec: Mapping[str, Any], section: str, key: str) -> str | None:
    value = spec.get(section, {}).get(key)
    return None if value is None else str(value)


def instant(seconds: float) -> str:
    """Format a time."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
