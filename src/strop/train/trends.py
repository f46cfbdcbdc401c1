"""Signs of trouble that no single step shows: numbers compared with those of earlier steps.

Every bound is relative to the run's own past, and replies may change length as far as they like while
the reward gets better: a healthy run may end with replies a tenth as long as its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from strop.record.events import Event, EventKind
from strop.spec.tripwires import TripwireSpec
from strop.train.collapse import (
    find_entropy_fall,
    find_one_reply,
    find_unearned_reward,
    ignores_prompts,
)
from strop.train.history import NUM_LOW, History, change_between
from strop.train.observer import EvalSummary

_MIN_NORMS = 4


def find_trend_alarms(
    spec: TripwireSpec, step: int, metrics: Mapping[str, float], history: History
) -> list[Event]:
    """Return the alarms that a step raises beside the steps before it. `history` does not hold it yet."""
    one_reply = find_one_reply(spec.max_common_reply_frac, metrics, history)
    is_narrow = one_reply is not None or ignores_prompts(metrics, history)
    found = (
        one_reply,
        find_unearned_reward(spec.max_unearned_ratio, metrics, history),
        find_entropy_fall(spec.min_entropy_kept_frac, metrics, history, is_narrow=is_narrow),
        _find_length_change(spec.max_length_ratio, metrics, history, is_narrow=is_narrow),
        _find_norm_spike(spec.max_grad_norm_ratio, metrics, history),
        _find_reward_fall(spec.min_reward_kept_frac, metrics, history),
        _find_selection(spec.min_used_length_ratio, metrics, history),
    )
    return [
        Event(kind=EventKind.TRIPWIRE, step=step, cause=cause, detail=detail)
        for cause, detail in (alarm for alarm in found if alarm is not None)
    ]


def _find_length_change(
    bound: float | None, metrics: Mapping[str, float], history: History, *, is_narrow: bool
) -> tuple[str, str] | None:
    """Find replies far shorter or longer than in the first steps, without a better reward.

    A better one counts for nothing where it is paid for one reply to different prompts.
    """
    lengths, rewards = history.first_values("reply_tokens_mean"), history.first_values("reward_mean")
    now, reward = metrics.get("reply_tokens_mean"), metrics.get("reward_mean")
    if bound is None or now is None or reward is None or not lengths or not rewards:
        return None
    usual, usual_reward = median(lengths), fmean(rewards)
    # Growing or shrinking replies that earn more are what was asked for.
    if (reward > usual_reward and not is_narrow) or usual / bound <= now <= usual * bound:
        return None
    cause, word = ("length_collapse", "shorter") if now < usual else ("length_explosion", "longer")
    return cause, (
        f"reply_tokens_mean={now:.4g} was {usual:.4g} in the first steps, more than"
        f" tripwires.max_length_ratio={bound:g} times {word} at a reward of {reward:.4g} from"
        f" {usual_reward:.4g}: the policy is falling apart; lower optimizer.lr and go back to an earlier"
        " checkpoint"
    )


def _find_norm_spike(
    bound: float | None, metrics: Mapping[str, float], history: History
) -> tuple[str, str] | None:
    """Find a gradient far above those of the last steps."""
    now = metrics.get("grad_norm")
    if bound is None or now is None or len(history.grad_norms) < _MIN_NORMS:
        return None
    usual = median(history.grad_norms)
    if now <= bound * usual:
        return None
    return "grad_norm", (
        f"grad_norm={now:.4g} is above tripwires.max_grad_norm_ratio={bound:g} times the usual {usual:.4g}:"
        " one step undoes what many have learned; lower optimizer.lr or optimizer.max_grad_norm, and look at"
        " the step's rollouts"
    )


def _find_reward_fall(
    bound: float | None, metrics: Mapping[str, float], history: History
) -> tuple[str, str] | None:
    """Find a reward that stays far below what the run once had."""
    now = metrics.get("reward_mean")
    if bound is None or now is None or not history.best_rewards:
        return None
    rewards, best = [*history.rewards, now][-NUM_LOW:], fmean(history.best_rewards)
    # A few lucky replies of a policy that earns nothing are no reward that could be lost.
    is_fall = change_between(history.best_rewards, rewards).is_fall
    if best <= 0.0 or max(rewards) >= bound * best or not is_fall:
        return None
    return "reward_collapse", (
        f"reward_mean={now:.4g} stays below tripwires.min_reward_kept_frac={bound:g} of the best"
        f" {NUM_LOW} steps' {best:.4g} for {NUM_LOW} steps: what was learned is lost; lower optimizer.lr and"
        " go back to an earlier checkpoint"
    )


def _find_selection(
    bound: float | None, metrics: Mapping[str, float], history: History
) -> tuple[str, str] | None:
    """Find long replies that keep coming too late to be trained on."""
    now = metrics.get("used_length_ratio")
    if bound is None or now is None:
        return None
    ratio = fmean([*history.used_lengths, now][-NUM_LOW:])
    if ratio >= bound:
        return None
    return "selection_bias", (
        f"used_length_ratio={ratio:.4g} over {NUM_LOW} steps is below tripwires.min_used_length_ratio="
        f"{bound:g}: long replies come too late and are evicted, so the policy is trained on short ones;"
        " raise train.max_staleness, or look for the engine that serves old weights"
    )


def find_divergence(summary: EvalSummary, records: Sequence[Mapping[str, float]]) -> list[Event]:
    """Return an alarm where the training reward rose while held-out accuracy fell.

    `records` are the metrics of all steps so far. The fall is since the best earlier evaluation, on the
    same examples, and larger than chance; the rise is over the steps between the two.
    """
    before, high = summary.best_step, summary.change_high
    if before is None or summary.change is None or high is None or high >= 0.0:
        return []
    rewards = [(line["step"], line["reward_mean"]) for line in records if "reward_mean" in line]
    between = [reward for step, reward in rewards if before < step <= summary.step]
    # Neither window may hold the other's steps: at most half of what lies between, from either end.
    width = min(NUM_LOW, max(len(between) // 2, 1))
    if len(between) < 2:
        return []
    earlier = [reward for step, reward in rewards if step <= before][-width:] or between[:width]
    then, now = fmean(earlier), fmean(between[-width:])
    if now <= then:
        return []
    detail = (
        f"the training reward rose from {then:.4g} to {now:.4g} since step {before}, and held-out accuracy"
        f" changed by {summary.change:+.1%} (95 % interval up to {high:+.1%}): what is paid for is not what"
        " is asked for; look at the rollouts with the highest reward, and go back to the checkpoint of step"
        f" {before}"
    )
    return [Event(kind=EventKind.TRIPWIRE, step=summary.step, cause="reward_eval_divergence", detail=detail)]
