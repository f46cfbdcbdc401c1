"""The numbers of one step, each from all rollouts or all tokens of the step.

A number that was not computed is absent, never 0. Durations come from one clock and add up to the
step. Names carry their unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from strop.algorithm.corrections import describe_mismatch
from strop.hardware import peak_rss_bytes, rss_bytes
from strop.policy.learner import Term
from strop.policy.step_report import StepReport, join_totals
from strop.rollout import RESTART, FloatArray, Group, Rollout
from strop.tasks import Task, part_of
from strop.tasks.llm_judge import correlation
from strop.train.batch import TrainBatch
from strop.train.data.demonstrations import Demonstration
from strop.train.generation import Batch, measure_discarded, measure_staleness
from strop.train.step import Update
from strop.train.watch.replies import measure_replies


def measure_rollouts(groups: Sequence[Group]) -> dict[str, float]:
    """Sum up what was sampled and how it was judged; nothing where every group was discarded."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    scored = [rollout for rollout in rollouts if rollout.outcome.is_scored]
    sampled = [rollout for rollout in rollouts if rollout.reply is not None]
    num_too_long = sum(rollout.outcome.is_too_long for rollout in rollouts)
    metrics = {
        # Apart: what was never attempted did not fail.
        "failed_frac": (len(rollouts) - len(scored) - num_too_long) / len(rollouts),
        "prompt_too_long_frac": num_too_long / len(rollouts),
        "duplicate_frac": _duplicate_frac(groups),
    }
    if scored:
        metrics["reward_mean"] = fmean(rollout.outcome.reward or 0.0 for rollout in scored)
        metrics["truncated_frac"] = fmean(rollout.outcome.truncated for rollout in scored)
        metrics["timed_out_frac"] = fmean(rollout.outcome.timed_out for rollout in scored)
        _add_mean(metrics, "accuracy", [rollout.outcome.is_correct for rollout in scored])
        if "accuracy" in metrics:
            wrong = [rollout.outcome.reward or 0.0 for rollout in scored if not rollout.outcome.is_correct]
            metrics["unearned_reward_mean"] = math.fsum(wrong) / len(scored)
        _add_mean(metrics, "format_ok_frac", [rollout.outcome.format_ok for rollout in scored])
    metrics |= _measure_judgements(rollouts)
    if sampled:
        metrics["reply_tokens_mean"] = fmean(rollout.num_sampled_tokens for rollout in sampled)
    if any(rollout.num_sampled_tokens for rollout in sampled):
        metrics["entropy_nats"] = _surprise(sampled)
    answers = [turn.role for r in rollouts for turn in r.turns[1:] if not turn.is_sampled]
    _add_mean(metrics, "prefix_break_frac", [role == RESTART for role in answers])
    return metrics


_PART_METRICS = ("reward_mean", "accuracy", "truncated_frac", "reply_tokens_mean")
"""What is said of the examples of each part of a task as well: the metric's name, and the part's label."""


def measure_parts(groups: Sequence[Group], task: Task) -> dict[str, float]:
    """Sum up the parts of a mixture by label, and those of the reward by name where it has several.

    `accuracy_LABEL` and the like; `reward_part_NAME` is the mean of one. Absent what the step had none of.
    """
    metrics: dict[str, float] = {}
    by_label: dict[str, list[Group]] = {}
    for group in groups:
        label = part_of(task, group.example)
        if label is not None:
            by_label.setdefault(label, []).append(group)
    for label, members in by_label.items():
        found = measure_rollouts(members)
        metrics |= {f"{name}_{label}": found[name] for name in _PART_METRICS if name in found}
    outcomes = [rollout.outcome for group in groups for rollout in group.rollouts]
    earned: dict[str, list[float]] = {}
    for name, value in (item for outcome in outcomes if outcome.is_scored for item in outcome.parts.items()):
        if value is not None:
            earned.setdefault(name, []).append(value)
    if len(earned) > 1:
        metrics |= {f"reward_part_{name}": fmean(values) for name, values in earned.items()}
    return metrics


def measure_batch(batch: TrainBatch) -> dict[str, float]:
    """Sum up what credit says about the batch."""
    credit = batch.credit
    num_signal = sum(
        int(reply.is_scored.sum())
        for group in batch.groups
        for reply in group.replies
        if reply.advantage != 0.0
    )
    return {
        "zero_variance_frac": credit.num_zero_variance_groups / max(credit.num_groups, 1),
        "num_scored_tokens": float(credit.num_counted_tokens),
        "num_signal_tokens": float(num_signal),
        "num_forwarded": float(credit.num_forwarded),
    }


def measure_groups(
    collected: Batch, batch: TrainBatch, task: Task, *, version: int, num_ahead: int | None
) -> dict[str, float]:
    """Sum up what a step sampled, before the weights of `version` are trained on.

    `num_ahead` groups were sampled ahead of the step; None where none ever are.
    """
    metrics = measure_rollouts(collected.groups) | measure_replies(collected.groups)
    metrics |= measure_batch(batch) | measure_parts(collected.groups, task)
    if num_ahead is not None:
        metrics |= measure_staleness(collected.groups, version)
        metrics["num_groups_ahead"] = float(num_ahead)
    return metrics | measure_discarded(collected)


def measure_memory() -> dict[str, float]:
    """Return the resident memory of this process, now where the system tells, and at its peak."""
    metrics: dict[str, float] = {"peak_memory_bytes": peak_rss_bytes()}
    now = rss_bytes()
    return metrics if now is None else metrics | {"memory_bytes": now}


def measure_demonstrations(members: Sequence[Demonstration]) -> dict[str, float]:
    """Count the demonstrations of a step and their tokens; nothing where there are none."""
    if not members:
        return {}
    num_tokens = sum(int(member.is_trained.sum()) for member in members)
    return {"num_sft_rows": float(len(members)), "num_sft_tokens": float(num_tokens)}


def measure_update(update: Update, *, is_mixed: bool = False, is_stale: bool = False) -> dict[str, float]:
    """Sum up what the optimizer steps of a batch did; nothing where none was computed.

    Loss and changes are means over the steps, tokens count alike over all of them, and `grad_norm` is the
    largest. In a mixed run each term is listed too, its weight included. Where the rollouts are `is_stale`,
    of earlier weights, the gap between learner and engine is mostly the weights' change since then: it has a
    name of its own, and no bound.
    """
    steps, taken = update.steps, [step for step in update.steps if step.is_taken]
    counted = {"num_refused_steps": update.num_refused, "num_left_out_steps": update.num_left_out}
    metrics = {name: float(count) for name, count in counted.items() if count}
    if not steps:
        return metrics
    metrics |= {
        "num_optimizer_steps": float(update.num_taken),
        "loss": fmean(step.loss for step in steps),
        "grad_norm": max(step.grad_norm for step in steps),
        "lr": steps[-1].lr,
        "num_positions": float(sum(step.num_positions for step in steps)),
        # Part of `seconds_learn`: the rest is the way to the ranks and back.
        "seconds_compute": math.fsum(step.compute_s for step in steps),
    }
    for name in sorted({name for step in steps for name in step.sums}):
        metrics[name] = fmean(step.sums.get(name, 0.0) for step in steps)
    if taken:
        metrics["changed_frac"] = fmean(step.changed_frac for step in taken)
        metrics["update_ratio"] = fmean(step.update_ratio for step in taken)
    shares = [step.master_changed_frac for step in taken if step.master_changed_frac is not None]
    if shares:
        metrics["master_changed_frac"] = fmean(shares)
    for term in steps[0].terms if is_mixed else ():
        metrics |= {f"loss_{term.name}": term.loss, f"grad_norm_{term.name}": term.grad_norm}
        if term.cosine is not None:
            metrics["grad_cosine"] = term.cosine
    # Later steps of the batch see what the first have moved.
    gaps = _describe_gaps(steps[0].drift_M, "offpolicy" if is_stale else "drift")
    return metrics | gaps | _measure_tokens(steps)


def _describe_gaps(gap_M: FloatArray, name: str) -> dict[str, float]:
    if not len(gap_M):
        return {}
    return {
        f"{name}_mean_nats": float(gap_M.mean()),
        f"{name}_p99_nats": float(np.quantile(gap_M, 0.99)),
        f"{name}_max_nats": float(gap_M.max()),
    }


def _measure_tokens(steps: Sequence[StepReport]) -> dict[str, float]:
    """Sum up what was said of single tokens: means, ratios and corrections, each over all steps."""
    joined = join_totals(step.totals for step in steps)
    metrics = {name: total.mean for name, total in joined.items()}
    ratio_M = np.concatenate([step.ratio_M for step in steps])
    if len(ratio_M):
        quantiles = np.quantile(ratio_M, (0.01, 0.5, 0.99)).tolist()
        metrics |= dict(zip(("ratio_p01", "ratio_p50", "ratio_p99"), quantiles, strict=True))
    correction_M = np.concatenate([step.correction_M for step in steps])
    if len(correction_M):
        log_ratio_M = np.concatenate([step.log_ratio_M for step in steps]).astype(np.float64)
        described = describe_mismatch(log_ratio_M, correction_M)
        # The ratios are the gap of learner and engine, unless the old log-probabilities stand between.
        metrics |= {name: value for name, value in described.items() if not name.startswith("mismatch")}
    return metrics


def measure_pairs(steps: Sequence[Sequence[Term]]) -> dict[str, float]:
    """Count the preference pairs of a step, and their tokens; nothing where there are none."""
    pairs = [pair for terms in steps for term in terms if term.name == "dpo" for pair in term.groups]
    if not pairs:
        return {}
    num_tokens = sum(int(reply.is_scored.sum()) for pair in pairs for reply in pair.replies)
    return {"num_pairs": float(len(pairs)), "num_pair_tokens": float(num_tokens)}


def count_trained_tokens(metrics: Mapping[str, float]) -> float:
    """Return the tokens in the normalisers of all terms."""
    names = ("num_scored_tokens", "num_sft_tokens", "num_pair_tokens")
    return sum(metrics.get(name, 0.0) for name in names)


def measure_time(seconds: Mapping[str, float], step_s: float, num_scored_tokens: float) -> dict[str, float]:
    """Split the step's wall time; what no stage claims is `other`."""
    other_s = max(step_s - math.fsum(seconds.values()), 0.0)
    metrics = {f"seconds_{stage}": value for stage, value in seconds.items()}
    return metrics | {
        "seconds_other": other_s,
        "seconds_step": step_s,
        "scored_tokens_per_s": num_scored_tokens / step_s,
    }


def _measure_judgements(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Sum up what a judge that is a model did; nothing where none was asked."""
    outcomes = [rollout.outcome for rollout in rollouts if "judge_cached" in rollout.outcome.metrics]
    if not outcomes:
        return {}
    unparsable = [outcome.metrics.get("judge_unparsable", 0.0) for outcome in outcomes]
    metrics = {
        "judge_unparsable_frac": fmean(unparsable),
        "judge_cached_frac": fmean(outcome.metrics["judge_cached"] for outcome in outcomes),
    }
    scored = [outcome.metrics for outcome in outcomes if "judge_score" in outcome.metrics]
    slope = correlation([(values["judge_score"], values["reply_chars"]) for values in scored])
    return metrics if slope is None else {**metrics, "judge_length_correlation": slope}


def _add_mean(metrics: dict[str, float], name: str, values: Sequence[bool | None]) -> None:
    """Add the share of True where the task says anything at all."""
    known = [value for value in values if value is not None]
    if known:
        metrics[name] = fmean(known)


def _surprise(rollouts: Sequence[Rollout]) -> float:
    """Estimate the policy's entropy (nats per token) by the mean surprise of what it sampled."""
    logprobs = [turn.logprobs for r in rollouts for turn in r.turns if turn.logprobs is not None]
    return float(-np.concatenate(logprobs).mean(dtype=np.float64))


def _duplicate_frac(groups: Sequence[Group]) -> float:
    """Return the share of rollouts whose sampled tokens repeat those of an earlier one in the group.

    Of those that have an earlier one, so that 1 is reached by groups of any size.
    """
    num_rollouts = num_distinct = num_groups = 0
    for group in groups:
        texts = [
            b"".join(turn.token_ids.tobytes() for turn in rollout.turns if turn.is_sampled)
            for rollout in group.rollouts
            if rollout.reply is not None
        ]
        num_rollouts += len(texts)
        num_distinct += len(set(texts))
        num_groups += bool(texts)
    num_later = num_rollouts - num_groups
    return (num_rollouts - num_distinct) / num_later if num_later else 0.0
