"""The metrics of one step, each over all rollouts or all tokens of the step.

A metric that was not computed is absent, never 0. Durations come from one clock and add up to the step. Names
carry their unit. Three metrics show faults of replies that no reward shows: many prompts get one reply
(`common_reply_frac`), replies could answer any prompt (`prompt_dependence`), and replies go on to another
question behind their answer (`runaway_frac`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import correlation, fmean

import numpy as np
from numpy.typing import NDArray

from strop.algorithm.corrections import CORRECTION_SQUARE
from strop.environments.groups import NUM_REFILLS
from strop.hardware import peak_rss_bytes, rss_bytes
from strop.policy.learner import Term
from strop.policy.optimizer import NO_VALUES, StepReport, join_totals
from strop.record.events import Event
from strop.rollout import CONVERSATION, RESTART, Group, Rollout
from strop.tasks import Task
from strop.tasks.answers import text_after_thinking
from strop.thoughts import begun_thought
from strop.train.batch import TrainBatch
from strop.train.data.offline import Demonstration
from strop.train.generation import Batch, measure_discarded, measure_staleness
from strop.train.step import Update


def measure_rollouts(groups: Sequence[Group]) -> dict[str, float]:
    """Measure the rollouts of a step and their judgements; empty where every group was discarded."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    scored = [rollout for rollout in rollouts if rollout.outcome.is_scored]
    sampled = [rollout for rollout in rollouts if rollout.reply is not None]
    num_too_long = sum(rollout.outcome.is_too_long for rollout in rollouts)
    # Repeats among the rollouts that have an earlier one in their group: 1 is reached by groups of any size.
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
    metrics = {
        # Without prompts that were too long: an attempt that was never made did not fail.
        "failed_frac": (len(rollouts) - len(scored) - num_too_long) / len(rollouts),
        "prompt_too_long_frac": num_too_long / len(rollouts),
        "duplicate_frac": (num_rollouts - num_distinct) / num_later if num_later else 0.0,
    }
    num_refilled = sum(NUM_REFILLS in rollout.outcome.metrics for rollout in rollouts)
    if num_refilled:
        metrics["refilled_frac"] = num_refilled / len(rollouts)
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
        # The mean surprise of what was sampled estimates the policy's entropy.
        logprobs = [turn.logprobs for r in sampled for turn in r.turns if turn.logprobs is not None]
        metrics["entropy_nats"] = float(-np.concatenate(logprobs).mean(dtype=np.float64))
    prompts = [turn.role for r in rollouts for turn in r.turns[1:] if not turn.is_sampled]
    # A program that begins a conversation on purpose answers no reply.
    answers = [role == RESTART for role in prompts if role != CONVERSATION]
    _add_mean(metrics, "prefix_break_frac", answers)
    return metrics


_PART_METRICS = ("reward_mean", "accuracy", "truncated_frac", "reply_tokens_mean")
"""Metrics that are measured for each part of a mixture too, as `METRIC_LABEL`."""


def measure_parts(groups: Sequence[Group], task: Task) -> dict[str, float]:
    """Measure the parts of a mixture by label, and the parts of the reward by name where it has several.

    `accuracy_LABEL` and the like; `reward_part_NAME` is the mean of one. Absent for parts without rollouts.
    """
    metrics: dict[str, float] = {}
    by_label: dict[str, list[Group]] = {}
    for group in groups:
        label = task.part_of(group.example)
        if label is not None:
            by_label.setdefault(label, []).append(group)
    for label, members in by_label.items():
        of_part = measure_rollouts(members)
        metrics |= {f"{name}_{label}": of_part[name] for name in _PART_METRICS if name in of_part}
    outcomes = [rollout.outcome for group in groups for rollout in group.rollouts]
    earned: dict[str, list[float]] = {}
    for name, value in (item for outcome in outcomes if outcome.is_scored for item in outcome.parts.items()):
        if value is not None:
            earned.setdefault(name, []).append(value)
    if len(earned) > 1:
        metrics |= {f"reward_part_{name}": fmean(values) for name, values in earned.items()}
    return metrics


def measure_batch(batch: TrainBatch) -> dict[str, float]:
    """Measure the credit of a batch."""
    credit = batch.credit
    num_signal = sum(
        int(np.count_nonzero(reply.token_advantages))
        if reply.token_advantages is not None
        else int(reply.is_scored.sum()) * (reply.advantage != 0.0)
        for group in batch.groups
        for reply in group.replies
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
    """Measure the groups of a step that trained the weights of `version`.

    `num_ahead` groups were sampled ahead of the step; None in a run that never samples ahead.
    """
    metrics = measure_rollouts(collected.groups) | measure_replies(collected.groups)
    metrics |= measure_batch(batch) | measure_parts(collected.groups, task)
    if num_ahead is not None:
        metrics |= measure_staleness(collected.groups, version)
        metrics["num_groups_ahead"] = float(num_ahead)
    return metrics | measure_discarded(collected)


def measure_memory() -> dict[str, float]:
    """Return the resident memory of this process at its peak, and now where the system reports it."""
    metrics: dict[str, float] = {"peak_memory_bytes": peak_rss_bytes()}
    now = rss_bytes()
    return metrics if now is None else metrics | {"memory_bytes": now}


def measure_demonstrations(members: Sequence[Demonstration]) -> dict[str, float]:
    """Count the demonstrations of a step and their tokens; empty without any."""
    if not members:
        return {}
    num_tokens = sum(int(member.is_trained.sum()) for member in members)
    return {"num_sft_rows": float(len(members)), "num_sft_tokens": float(num_tokens)}


def measure_update(update: Update, *, is_mixed: bool = False, is_stale: bool = False) -> dict[str, float]:
    """Measure the optimizer steps of a batch; only counts where none was computed.

    Loss and changes are means over the steps, token metrics are means over the tokens of all steps, and
    `grad_norm` is the largest. In a mixed run each term is listed too, its weight included. Where rollouts
    are `is_stale` (sampled by earlier weights), the gap between learner and engine is mostly the change of
    the weights since then: its name is `offpolicy_*` instead of `drift_*`, and it has no bound.
    """
    steps = update.steps
    metrics = {"num_refused_steps": float(update.num_refused)} if update.num_refused else {}
    if not steps:
        return metrics
    metrics |= {
        "num_optimizer_steps": float(len(steps)),
        "loss": fmean(step.loss for step in steps),
        "grad_norm": max(step.grad_norm for step in steps),
        "lr": steps[-1].lr,
        "num_positions": float(sum(step.num_positions for step in steps)),
        # Part of `seconds_learn`: the rest is transport to the ranks and back.
        "seconds_compute": math.fsum(step.compute_s for step in steps),
    }
    for name in sorted({name for step in steps for name in step.sums}):
        metrics[name] = fmean(step.sums.get(name, 0.0) for step in steps)
    metrics["changed_frac"] = fmean(step.changed_frac for step in steps)
    metrics["update_ratio"] = fmean(step.update_ratio for step in steps)
    shares = [step.master_changed_frac for step in steps if step.master_changed_frac is not None]
    if shares:
        metrics["master_changed_frac"] = fmean(shares)
    for term in steps[0].terms if is_mixed else ():
        metrics |= {f"loss_{term.name}": term.loss, f"grad_norm_{term.name}": term.grad_norm}
        if term.cosine is not None:
            metrics["grad_cosine"] = term.cosine
    # Of the first step alone: later ones start from weights that it has moved.
    gap, name = steps[0].drift, "offpolicy" if is_stale else "drift"
    if gap.num_values:
        metrics[f"{name}_mean_nats"] = gap.mean
        metrics[f"{name}_p99_nats"] = gap.quantile(0.99)
        metrics[f"{name}_max_nats"] = gap.max
    return metrics | _measure_tokens(steps)


def _measure_tokens(steps: Sequence[StepReport]) -> dict[str, float]:
    """Measure per-token values: means, ratios and corrections, each over all steps."""
    joined = join_totals(step.totals for step in steps)
    metrics = {name: total.mean for name, total in joined.items()}
    log_ratio = sum((step.log_ratio for step in steps), NO_VALUES)
    if log_ratio.num_values:
        for name, share in (("ratio_p01", 0.01), ("ratio_p50", 0.5), ("ratio_p99", 0.99)):
            metrics[name] = math.exp(log_ratio.quantile(share))
    square = metrics.pop(CORRECTION_SQUARE, None)
    if square is not None:
        # (sum c)^2 / (n sum c^2): 1 when all corrections are equal, near 0 when one token carries the batch.
        metrics["effective_sample_frac"] = metrics["correction_mean"] ** 2 / square if square else 0.0
    return metrics


def measure_pairs(steps: Sequence[Sequence[Term]]) -> dict[str, float]:
    """Count the preference pairs of a step and their tokens; empty without any."""
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
    """Split the step's wall time; the time outside all stages is `other`."""
    other_s = max(step_s - math.fsum(seconds.values()), 0.0)
    metrics = {f"seconds_{stage}": value for stage, value in seconds.items()}
    return metrics | {
        "seconds_other": other_s,
        "seconds_step": step_s,
        "scored_tokens_per_s": num_scored_tokens / step_s,
    }


def _measure_judgements(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Measure the judgements of a model as judge; empty where it judged nothing."""
    outcomes = [rollout.outcome for rollout in rollouts if "reply_chars" in rollout.outcome.metrics]
    if not outcomes:
        return {}
    unparsable = [outcome.metrics.get("judge_unparsable", 0.0) for outcome in outcomes]
    metrics = {"judge_unparsable_frac": fmean(unparsable)}
    scored = [outcome.metrics for outcome in outcomes if "judge_score" in outcome.metrics]
    scores, lengths = ([values[name] for values in scored] for name in ("judge_score", "reply_chars"))
    if len(set(scores)) < 2 or len(set(lengths)) < 2:
        # Without a spread there is none.
        return metrics
    return {**metrics, "judge_length_correlation": correlation(scores, lengths)}


def _add_mean(metrics: dict[str, float], name: str, values: Sequence[bool | None]) -> None:
    """Add the share of True among the values that the task knows, if there are any."""
    known = [value for value in values if value is not None]
    if known:
        metrics[name] = fmean(known)


# Replies compared with each other, regardless of their rewards.

MAX_IDS = 8
"""Examples that an alarm over rollouts names."""

_MAX_CHARS = 8000
"""Characters of a reply that are searched for a question behind its answer: one begins early."""
_MAX_PROMPTS, _MAX_EACH = 16, 8
"""Prompts of a step whose replies are compared with each other, and replies of each."""
_MAX_BYTES = 1024
"""Bytes of a reply that are compared."""
_NUM_BUCKETS = 4096
_MAX_ANSWER_CHARS = 80
_NUM_OPENING_WORDS = 4
_NUM_QUESTION_WORDS = 3
_MAX_SAMPLE_CHARS = 160

# Linear in the text: each quantifier is over one character class, and the next character is not in the class.
_ANSWERED = re.compile(r"####\s*\S+|\\boxed\{[^{}]*\}|</answer>|\banswer(?: is|:)\s*\S+", re.IGNORECASE)
_BARE_NUMBER = re.compile(r"\s*[-+$(]*\d[\d.,/%]*\)?[.,]?(?=\s|$)")
# A sentence may begin on a new line, and behind a mark that ends one, a colon or a number.
_START = re.compile(r"\n\s*|(?<=[.!?:>\d*])[ \t]+")
_LABEL = re.compile(
    r"\W{0,4}(?:(?:next|new|another|more|practice|sample|test)\s+)?"
    r"(?:questions?|q|problems?|exercises?|puzzles?|tasks?|quiz|riddles?|quer(?:y|ies)|challenges?|prompt"
    r"|instructions?|user|human|student|teacher)\b"
    r"(?:\s{0,2}(?:no\.?|number|#)?\s{0,2}\d+\W{0,2}(?=\s)|[^\S\n]{0,2}(?:\W{0,2}[:>]|(?=\n)))",
    re.IGNORECASE,
)
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\W\d_]+|\d+")
_EDGES = " \t\r\n.,;:!?\"'`*"


def measure_replies(groups: Sequence[Group]) -> dict[str, float]:
    """Compare the replies of a step with each other; empty without replies.

    `common_reply_frac`: the share of replies that are one and the same wrong text (but for case and
    punctuation around it), given to at least two prompts. 0 where no two prompts share a wrong reply.
    `distinct_reply_frac`: the number of different texts by the number of replies. `prompt_dependence`: see
    the function of that name. `runaway_frac`: the share that goes on to another question behind its answer.
    """
    replied = _list_replied(groups)
    if not replied:
        return {}
    texts = [_reply_key(rollout) for rollout in replied]
    metrics = {
        "common_reply_frac": len(_find_common(replied)) / len(replied),
        "distinct_reply_frac": len(set(texts)) / len(replied),
        "runaway_frac": sum(map(_runs_on, replied)) / len(replied),
    }
    compared = [r for group in groups[:_MAX_PROMPTS] for r in _list_replied([group])[:_MAX_EACH]]
    dependence = prompt_dependence([r.turns[0].text for r in compared], list(map(_reply_key, compared)))
    return metrics if dependence is None else {**metrics, "prompt_dependence": dependence}


def prompt_dependence(prompts_S: Sequence[str], replies_S: Sequence[str]) -> float | None:
    """Return how much better than chance a reply's nearest other reply identifies its prompt.

    1: the nearest reply always answers the same prompt. 0: it does so no more often than by chance, as where
    replies do not depend on their prompts. None without two prompts with two replies each.
    The similarity of two texts is the cosine of their byte trigrams; equally near replies share the count.
    Shapes: S replies.
    """
    _, owner_S = np.unique(np.array(prompts_S, dtype=object), return_inverse=True)
    counts = np.bincount(owner_S)
    kept = counts[owner_S] > 1
    if np.count_nonzero(counts > 1) < 2:
        return None
    owner_S = owner_S[kept]
    texts = [text for text, is_kept in zip(replies_S, kept, strict=True) if is_kept]
    # The cosine of each pair of texts, by their byte trigrams.
    held_S_B = np.zeros((len(texts), _NUM_BUCKETS), dtype=np.float32)
    for row_B, text in zip(held_S_B, texts, strict=True):
        data = np.frombuffer(f" {text} ".encode(errors="replace")[:_MAX_BYTES], dtype=np.uint8)
        first, second, third = (data[at : len(data) - 2 + at].astype(np.int64) for at in range(3))
        row_B[(first * 961 + second * 31 + third) % _NUM_BUCKETS] = 1.0
    norm_S = np.linalg.norm(held_S_B, axis=1).clip(min=1e-6)
    near_S_S: NDArray[np.float32] = held_S_B @ held_S_B.T / (norm_S[:, None] * norm_S[None, :])
    np.fill_diagonal(near_S_S, -1.0)
    is_nearest_S_S = near_S_S >= near_S_S.max(axis=1, keepdims=True) - 1e-6
    is_own_S_S = owner_S[:, None] == owner_S[None, :]
    right_S = (is_nearest_S_S & is_own_S_S).sum(axis=1) / is_nearest_S_S.sum(axis=1)
    by_chance_S = (is_own_S_S.sum(axis=1) - 1) / (len(owner_S) - 1)
    return float((right_S.mean() - by_chance_S.mean()) / (1.0 - by_chance_S.mean()))


def with_samples(alarms: Sequence[Event], groups: Sequence[Group]) -> list[Event]:
    """Add to alarms about replies one such reply, and the ids of the examples."""
    completed = []
    replied = _list_replied(groups)
    for alarm in alarms:
        shown: list[Rollout] = []
        if alarm.cause == "runaway":
            shown = [rollout for rollout in replied if _runs_on(rollout)]
        elif alarm.cause == "reply_collapse":
            shown = _find_common(replied)
        if shown:
            assert shown[0].reply is not None
            text = shown[0].reply.text[:_MAX_SAMPLE_CHARS]
            ids = tuple(dict.fromkeys(rollout.example.example_id for rollout in shown))[:MAX_IDS]
            alarm = replace(alarm, detail=f"{alarm.detail}; for example {text!r}", example_ids=ids)
        completed.append(alarm)
    return completed


def _list_replied(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts if rollout.reply is not None]


def _reply_key(rollout: Rollout) -> str:
    """Return a reply's text for comparison: without case, and without punctuation around it."""
    assert rollout.reply is not None
    return rollout.reply.text.strip(_EDGES).casefold()


def _find_common(replied: Sequence[Rollout]) -> list[Rollout]:
    """Return the largest set of equal wrong replies to different prompts."""
    by_text: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in replied:
        if rollout.outcome.is_correct is not True:
            by_text[_reply_key(rollout)].append(rollout)
    # By prompt, not by example: several examples may have one prompt.
    common = [same for same in by_text.values() if len({r.turns[0].text for r in same}) > 1]
    return max(common, key=len, default=[])


def _runs_on(rollout: Rollout) -> bool:
    assert rollout.reply is not None
    text = text_after_thinking(begun_thought(rollout.heard[-1].text) + rollout.reply.text)
    return text is not None and runs_on(rollout.turns[0].text, text, rollout.example.answer)


def runs_on(prompt: str, reply: str, answer: str | None) -> bool:
    """Whether a reply holds another question behind its answer: the model goes on to talk to itself.

    An answer is the right one, one in a form that tasks ask for, or a number at the start of the reply. A
    question has a label in any numbering, begins as the prompt does, or ends with a question mark and is
    answered. A repetition of the prompt does not count.
    """
    reply = reply[:_MAX_CHARS].rstrip()
    answers = [_ANSWERED.search(reply), _BARE_NUMBER.match(reply)]
    if answer and len(answer) <= _MAX_ANSWER_CHARS:
        # At the end of a sentence: inside one it may be an intermediate number.
        answers.append(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)\W{{0,2}}(?=\n|$|(?<=[.!])\s)", reply))
    answered = min((match.end() for match in answers if match is not None), default=None)
    if answered is None:
        return False
    asked = _plain(prompt)
    openings = {words for line in prompt.splitlines() if (words := _opening(line))}
    for start in _START.finditer(reply, max(answered - 1, 0)):
        at = start.end()
        if at < answered:
            continue
        label = _LABEL.match(reply, at)
        space = _SPACE.match(reply, at if label is None else label.end())
        begin = at if space is None else space.end()
        end = reply.find("\n", begin)
        line = reply[begin : end if end >= 0 else len(reply)]
        question, mark, behind = line.partition("?")
        is_answered = bool(mark) and (end >= 0 or bool(behind.strip()))
        is_question = is_answered and len(_WORD.findall(question)) >= _NUM_QUESTION_WORDS
        is_new = bool(line) and _plain(question if is_question else line) not in asked
        if is_new and (label is not None or is_question or _opening(line) in openings):
            return True
    return False


def _opening(line: str) -> tuple[str, ...]:
    """Return the first words of a line, every number as the same word; none of a short line."""
    words = ["0" if word.isdigit() else word.casefold() for word in _WORD.findall(line[:_MAX_ANSWER_CHARS])]
    return tuple(words[:_NUM_OPENING_WORDS]) if len(words) >= _NUM_OPENING_WORDS else ()


def _plain(text: str) -> str:
    """Return a text without white space and case: 'What is 3+4' is in 'what is 3 + 4?'."""
    return "".join(text.casefold().split())
