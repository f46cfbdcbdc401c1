"""What the page is told, as JSON values: of all runs, of one, of a rollout, of several beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.errors import CheckRefused, StropError
from strop.record import EventKind
from strop.view.live import NOTES, LiveRun

if TYPE_CHECKING:
    from strop.evaluate import EvalResult, Interval


def list_runs(runs: Sequence[LiveRun]) -> list[dict[str, Any]]:
    """Return a line for each run, the newest first; a damaged one says so."""
    found = []
    for run in runs:
        key = run.key
        try:
            state = run.read_state()
            run.read_metrics()
            results = run.read_results()
        except StropError as error:
            found.append({"key": key, "created_at": 0.0, "phase": "damaged", "error": str(error)})
            continue
        last = results[-1].greedy if results else None
        line = run.metrics[-1] if run.metrics else {}
        found.append(
            {
                "key": key,
                "name": state.name,
                "phase": run.find_phase(),
                "created_at": state.created_at,
                "num_steps": int(line.get("step", 0)),
                "task": state.facts.get("task"),
                "model": state.facts.get("model_uri"),
                "accuracy": None if last is None else last.accuracy,
                "low": None if last is None else last.low,
                "high": None if last is None else last.high,
                "reward": line.get("reward_mean"),
            }
        )
    return sorted(found, key=lambda one: one["created_at"], reverse=True)


def describe_run(live: LiveRun) -> dict[str, Any]:
    """Return everything about a run but its curves and its rollouts."""
    # Here: the report's words need its template engine, which a list of runs does not.
    from strop.record.prediction import compare_prediction
    from strop.view.report import collect_facts, describe_amount, describe_status
    from strop.view.run_record import NOTED_KINDS, compare_ends, count_alarms, describe_protocol

    run = live.read_run()
    ends = compare_ends(run.evals)
    compared = compare_prediction(run.prediction, run.metrics) if run.prediction else []
    audit = live.record.read("audit.json")
    train = run.spec.get("train", {})
    return {
        "key": live.key,
        "name": run.state.name,
        "phase": live.find_phase(),
        "status": describe_status(run),
        "task": run.spec.get("task", {}).get("name"),
        "model": run.spec.get("model", {}).get("uri"),
        "algorithm": train.get("terms") if "algorithm" not in run.spec else run.spec["algorithm"].get("name"),
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
        "compared": [
            {
                "name": one.name,
                "planned": describe_amount(one.planned, one.unit),
                "measured": describe_amount(one.measured, one.unit),
                "ratio": one.ratio,
            }
            for one in compared
        ],
        "audit": None if audit is None else json.loads(audit),
        "facts": collect_facts(run),
        "spec": run.spec_text,
        "notes": (live.record.read(NOTES) or b"").decode(errors="replace"),
        "notes_path": live.record.describe(NOTES),
        "rollout_steps": live.rollout_steps(),
        "cursor": live.cursor(),
    }


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
        "pass_at_k": {str(k): one.value for k, one in result.pass_at_k.items()},
        "truncated": result.greedy.truncated_frac,
        "validity": result.validity.value,
        "is_valid": result.is_valid,
    }


def describe_row(live: LiveRun, step: int, index: int) -> dict[str, Any]:
    """Return a rollout turn by turn, what the policy sampled token by token."""
    from strop.record.rows import read_row

    found = read_row(*live.read_rollouts(step), index)
    rollout, outcome = found.rollout, found.rollout.outcome
    turns = []
    for turn, advantages in zip(rollout.turns, found.advantages, strict=True):
        told: dict[str, Any] = {
            "role": turn.role,
            "text": turn.text,
            "num_tokens": len(turn.token_ids),
            "version": turn.policy_version,
            "finish": turn.finish_reason and turn.finish_reason.value,
        }
        if turn.is_sampled:
            told |= {
                "token_ids": turn.token_ids.tolist(),
                "tokens": live.cut_tokens(turn),
                "logprobs": None if turn.logprobs is None else _round(turn.logprobs),
                "advantages": None if advantages is None else _round(advantages),
            }
        turns.append(told)
    return {
        "step": step,
        "index": index,
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
        "status": found.status,
        "staleness": found.staleness,
    }


def _round(values: Any) -> list[float | None]:
    """Return numbers with five digits, and None for what is none."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.tolist()]


def compare(runs: Sequence[LiveRun]) -> dict[str, Any]:
    """Return the paired change of the last evaluations of each run against the first one's."""
    from strop.evaluate import compare_results

    lasts = [results[-1] if (results := run.read_run().evals) else None for run in runs]
    compared = []
    for run, last in zip(runs[1:], lasts[1:], strict=True):
        told: dict[str, Any] = {"key": run.key, "against": runs[0].key}
        try:
            if lasts[0] is None or last is None:
                raise CheckRefused(
                    "one of the two runs has no evaluation",
                    allowed="runs with results",
                    next_step="evaluate a checkpoint with `strop eval`",
                )
            change = compare_results(lasts[0], last)
            told["change"] = None if change.greedy is None else _describe_change(change.greedy)
        except StropError as error:
            told["error"] = str(error)
        compared.append(told)
    return {
        "runs": [
            {
                "key": run.key,
                "last": None if last is None else _describe_eval(last),
                "spec": _flatten(run.read_run().spec),
            }
            for run, last in zip(runs, lasts, strict=True)
        ],
        "compared": compared,
    }


def _describe_change(change: Interval) -> dict[str, Any]:
    return {
        name: getattr(change, name, None)
        for name in ("estimate", "low", "high", "num_gained", "num_lost", "num_examples", "p_value")
    }


def _flatten(spec: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value, default=str)
    return found
