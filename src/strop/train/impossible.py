"""Numbers that cannot be: a step that holds one was measured or judged wrong, whatever else it says.

Names say what a metric is (`_frac` a share, `seconds_` a duration), so a new metric is held to its name
without being listed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from strop.record.events import Event, EventKind
from strop.rollout import Group, Rollout
from strop.tasks.bounds import CEILING, IMPOSSIBLE
from strop.tasks.failures import describe_failure

MAX_IDS = 8
"""Examples that an alarm over rollouts names."""
_ROUNDING = 1e-6
_MAX_LOGPROB = 0.01
"""A log-probability may be so far (nats) above 0 by rounding, where logits are bfloat16."""
_STAGES = ("generate", "verify", "learn", "sync", "other")
"""They follow each other on one clock, so they add up to the step."""
_MIN_CLOCK_S = 1e-3
_NOT_NEGATIVE = ("num_", "seconds_", "grad_norm", "entropy_nats", "drift_", "offpolicy_", "reply_tokens")


def find_impossible(step: int, metrics: Mapping[str, float]) -> list[Event]:
    """Return an alarm where a number of a step cannot be, naming all such numbers. Absent ones are fine."""
    found = [text for name, value in metrics.items() if (text := _find_excess(name, value))]
    found += _find_time_twice(metrics)
    if not found:
        return []
    detail = (
        f"{'; '.join(found)}: this was measured wrong, and other numbers of the step may be. Nothing that the"
        " policy does leads here; report it with this run's metrics.jsonl"
    )
    return [_alarm(step, IMPOSSIBLE, detail)]


def _find_excess(name: str, value: float) -> str | None:
    low, high = -math.inf, math.inf
    if name.endswith("_frac") or name == "accuracy":
        low, high = 0.0, 1.0
    elif name.endswith(("_cosine", "_correlation")):
        low, high = -1.0, 1.0
    elif name.startswith(_NOT_NEGATIVE) or name.endswith(("_bytes", "_per_s")):
        low = 0.0
    # Never true of NaN.
    if low - _ROUNDING <= value <= high + _ROUNDING:
        return None
    return f"{name}={value:.6g} is not within {low:g} and {high:g}"


def _find_time_twice(metrics: Mapping[str, float]) -> list[str]:
    """Find durations that ran beside each other and were added up."""
    step_s = metrics.get("seconds_step")
    if step_s is None:
        return []
    sum_s = math.fsum(metrics.get(f"seconds_{stage}", 0.0) for stage in _STAGES)
    slack_s = max(_ROUNDING * step_s, _MIN_CLOCK_S)
    if sum_s > step_s + slack_s:
        return [f"the stages of the step add up to {sum_s:.6g} s, and it took seconds_step={step_s:.6g}"]
    parts = {name: value for name, value in metrics.items() if name.startswith("seconds_")}
    return [
        f"{name}={value:.6g} is longer than seconds_step={step_s:.6g}"
        for name, value in parts.items()
        if value > step_s + slack_s
    ]


def find_impossible_rollouts(step: int, groups: Sequence[Group]) -> list[Event]:
    """Return alarms where rollouts have scores that their task cannot give, or tokens likelier than certain.

    Such scores are masked already (`tasks.bounds`); the alarm says so, with the first of them.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    alarms = []
    for cause in (CEILING, IMPOSSIBLE):
        masked = [r for r in rollouts if r.outcome.failure is not None and r.outcome.failure.kind == cause]
        if masked:
            failure = masked[0].outcome.failure
            assert failure is not None
            detail = (
                f"{len(masked)} of {len(rollouts)} rollouts have a score that cannot be, and are not trained"
                f" on: {describe_failure(failure)}"
            )
            alarms.append(_alarm(step, cause, detail, masked))
    certain = [rollout for rollout in rollouts if _max_logprob(rollout) > _MAX_LOGPROB]
    if certain:
        highest = max(map(_max_logprob, certain))
        detail = (
            f"{len(certain)} of {len(rollouts)} rollouts hold a token of log-probability {highest:.4g}, a"
            f" probability of {math.exp(min(highest, 700.0)):.4g}: the engine does not say what it sampled"
            " from; look at its temperature and at what it normalises over"
        )
        alarms.append(_alarm(step, IMPOSSIBLE, detail, certain))
    return alarms


def _max_logprob(rollout: Rollout) -> float:
    given = [
        turn.logprobs.max() for turn in rollout.turns if turn.logprobs is not None and len(turn.logprobs)
    ]
    return float(max(given, default=-math.inf))


def _alarm(step: int, cause: str, detail: str, rollouts: Iterable[Rollout] = ()) -> Event:
    ids = tuple(dict.fromkeys(rollout.example.example_id for rollout in rollouts))
    return Event(kind=EventKind.TRIPWIRE, step=step, cause=cause, detail=detail, example_ids=ids[:MAX_IDS])
