"""The answers of the page's API, as JSON values: all runs, one run, one rollout, a comparison of runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.errors import StropError
from strop.record import EventKind
from strop.record.prediction import compare_prediction
from strop.rollout import ToolCall
from strop.tasks.tool_calls import read_any
from strop.view.live import EVALUATION, NOTES, TRAINING, LiveRun
from strop.view.terminal import describe_duration, describe_usd

if TYPE_CHECKING:
    from strop.evaluate import EvalResult
    from strop.view.run_record import RunRecord


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
                "name": state.name,
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
    from strop.view.alarms import count_alarms
    from strop.view.run_record import NOTED_KINDS, compare_ends, describe_protocol, read_live

    events, events_offset = live.read_events()
    run = read_live(live, events)
    ends = compare_ends(run.evals)
    train = run.spec.get("train", {})
    return {
        "key": live.key,
        "name": run.state.name,
        "phase": live.find_phase(),
        "plot_range": describe_plot_range(run),
        "task": run.state.facts.get("task") or run.spec.get("task", {}).get("name"),
        "model": run.spec.get("model", {}).get("uri"),
        "algorithm": _name_method(run),
        "created_at": run.state.created_at,
        "finished_at": run.state.finished_at,
        "num_attempts": run.state.num_attempts,
        "wanted_steps": train.get("steps"),
        "evals": [_describe_eval(result) for result in run.evals],
        "protocol": describe_protocol(run.evals[-1]) if run.evals else {},
        "change": None if ends is None or ends.change is None else asdict(ends.change),
        "alarms": [asdict(alarm) for alarm in count_alarms(run.events)],
        "gate": [asdict(event) for event in run.events if event.kind is EventKind.GATE],
        "log": [asdict(event) for event in run.events if event.kind in NOTED_KINDS],
        "compared": compare_with_plan(run),
        "audit": run.audit,
        "facts": collect_facts(run),
        "spec": run.spec_text,
        "notes": (live.record.read(NOTES) or b"").decode(errors="replace"),
        "notes_path": live.record.describe(NOTES),
        "rollout_steps": live.rollout_steps(),
        "reply_steps": live.rollout_steps(EVALUATION),
        # Read first: events between this and the rest are sent twice, and never missed.
        "events_offset": events_offset,
    }


def _name_method(run: RunRecord) -> str | None:
    """Return the run's algorithm, or the name of its objective."""
    terms, algorithm = (_lookup(run.spec, *path) for path in (("train", "terms"), ("algorithm", "name")))
    own = {"sft": "sft", "dpo": _lookup(run.spec, "dpo", "loss") or "dpo", "distill": "distillation"}
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
        "sampled_low": None if sampled is None else sampled.low,
        "sampled_high": None if sampled is None else sampled.high,
        "pass_at_k": {str(k): estimate.value for k, estimate in result.pass_at_k.items()},
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
        "turn_rewards": list(outcome.turn_rewards),
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
    from strop.view.run_record import read_live

    records = [read_live(run) for run in runs]
    answer: dict[str, Any] = {
        "runs": [
            {"key": run.key, "last": _describe_eval(record.evals[-1]) if record.evals else None}
            for run, record in zip(runs, records, strict=True)
        ],
        "changes": [],
        "notes": [],
    }
    arms = [
        Arm(
            name=run.key,
            paths=(record.path,),
            results=tuple(record.evals[-1:]),
            values=list_values(record.spec),
        )
        for run, record in zip(runs, records, strict=True)
    ]
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
        ("Started", instant(state.created_at)),
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


def _lookup(spec: Mapping[str, Any], section: str, key: str) -> str | None:
    value = spec.get(section, {}).get(key)
    return None if value is None else str(value)


def instant(seconds: float) -> str:
    """Format a time."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
