"""Alarms that the metrics of one step raise. Each has a name, a bound and advice.

An alarm is recorded and shown; where `tripwires.on_alarm` asks for it, it ends the run with its last
checkpoint intact. `StepWatch` runs every watch on the metrics of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from strop.record import Event, EventKind
from strop.record.prediction import Prediction
from strop.rollout import PROMPT_TOO_LONG, Group, Rollout
from strop.spec.run import RunSpec
from strop.spec.train import TripwireSpec
from strop.tasks import Task
from strop.tasks.failures import FailureCause, describe_failure, find_causes, key_of
from strop.tasks.task import CEILING, IMPOSSIBLE
from strop.train.measure import MAX_IDS, with_samples
from strop.train.watch.process import MemoryWatch, PaceWatch
from strop.train.watch.trends import CollapseWatch, History, find_trend_alarms

_MAX_DUPLICATE_FRAC = 0.95
"""Share of a step's rollouts that equal an earlier rollout of their group, token by token."""
_MAX_RUNAWAY_FRAC = 0.3
"""Share of a step's replies that go on to another question behind their answer."""
_MAX_TERM_NORM_RATIO = 100.0
"""Between the gradient norms of two terms of the loss in the same step."""
_MIN_MASTER_CHANGED_FRAC = 0.1
"""Below this share of changed masters, updates vanish in rounding. fp32 masters are near 1. The
share of changed bf16 copies tells nothing: at small learning rates it is near 0 in healthy runs."""

_MIN_FORMAT_KEPT_FRAC = 0.5
"""Share of the first step's format that a policy must keep while it is right as often as before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wire:
    """One bound on one metric."""

    cause: str
    metric: str
    bound: float | None
    """None: not watched."""
    advice: str
    setting: str = ""
    """Name of the setting that the bound comes from."""
    is_upper: bool = True
    max_accuracy: float = 1.0
    """Above it the policy solves its task, and the metric is no sign of anything."""


def _list_wires(spec: TripwireSpec) -> tuple[_Wire, ...]:
    return (
        _Wire(
            cause="zero_variance",
            metric="zero_variance_frac",
            bound=spec.max_zero_variance_frac,
            setting="max_zero_variance_frac",
            advice="almost all groups have equal rewards; make the task harder or easier, or raise"
            " temperature",
        ),
        _Wire(
            cause="duplicate_completions",
            metric="duplicate_frac",
            bound=_MAX_DUPLICATE_FRAC,
            advice="rollouts of a group repeat each other; look at seeds, temperature and entropy",
            max_accuracy=0.5,
        ),
        _Wire(
            cause="truncation",
            metric="truncated_frac",
            bound=spec.max_truncated_frac,
            setting="max_truncated_frac",
            advice="replies are cut at their limit; raise task.max_reply_tokens",
        ),
        _Wire(
            cause="runaway",
            metric="runaway_frac",
            bound=_MAX_RUNAWAY_FRAC,
            advice="replies go on to a question of their own behind their answer, which the verifier may"
            " judge and training pays for; add what begins it to task.stop",
        ),
        _Wire(
            cause="verifier_errors",
            metric="failed_frac",
            bound=spec.max_failed_frac,
            setting="max_failed_frac",
            advice="rollouts could not be scored and were masked; the events rollout_lost say why",
        ),
        _Wire(
            cause="logprob_drift",
            metric="drift_mean_nats",
            bound=spec.max_drift_nats,
            setting="max_drift_nats",
            advice="engine and trainer disagree about the same tokens; check weights, dtype and temperature",
        ),
        _Wire(
            cause="entropy_collapse",
            metric="entropy_nats",
            bound=spec.min_entropy_nats,
            setting="min_entropy_nats",
            is_upper=False,
            advice="the policy samples almost one reply only; lower the learning rate or stop here",
        ),
    )


def find_alarms(spec: TripwireSpec, step: int, metrics: Mapping[str, float]) -> list[Event]:
    """Return the alarms that the metrics of a step raise. An absent metric raises none."""
    alarms = []
    for wire in _list_wires(spec):
        bound, value = wire.bound, metrics.get(wire.metric)
        if bound is None or value is None or metrics.get("accuracy", 0.0) > wire.max_accuracy:
            continue
        if value > bound if wire.is_upper else value < bound:
            word = "above" if wire.is_upper else "below"
            limit = f"tripwires.{wire.setting}={bound:g}" if wire.setting else f"{bound:g}"
            detail = f"{wire.metric}={value:.4g} is {word} {limit}: {wire.advice}"
            alarms.append(Event(kind=EventKind.TRIPWIRE, step=step, cause=wire.cause, detail=detail))
    changed_frac = metrics.get("master_changed_frac", 1.0)
    has_signal = any(map(metrics.get, ("num_signal_tokens", "num_sft_tokens", "num_pair_tokens")))
    if has_signal and changed_frac < _MIN_MASTER_CHANGED_FRAC:
        detail = (
            f"master_changed_frac={changed_frac:.3g}: updates vanish in the rounding of the weights; raise"
            " optimizer.lr, and check that masters are float32"
        )
        alarms.append(Event(kind=EventKind.TRIPWIRE, step=step, cause="vanishing_updates", detail=detail))
    if has_signal and metrics.get("grad_norm") == 0.0:
        detail = (
            "grad_norm=0 although tokens of the step have an advantage: the loss has no gradient, so nothing"
            " can be learned; look at the algorithm's loss, and at a clip that holds every token"
        )
        alarms.append(Event(kind=EventKind.TRIPWIRE, step=step, cause="no_gradient", detail=detail))
    alarms += _find_dominant_term(step, metrics)
    broken_frac = metrics.get("prefix_break_frac", 0.0)
    if broken_frac > 0.0:
        detail = (
            f"prefix_break_frac={broken_frac:.3g} of the turns that answer a reply could not extend its ids;"
            " a new sample begins there. Look at the chat template, and at what the engine says it sampled"
        )
        alarms.append(Event(kind=EventKind.TRIPWIRE, step=step, cause="prefix_break", detail=detail))
    return alarms


def _find_dominant_term(step: int, metrics: Mapping[str, float]) -> list[Event]:
    """Return an alarm where one term of the loss drowns another; none where one has no gradient at all."""
    norms = {name: metrics.get(f"grad_norm_{name}", 0.0) for name in ("rl", "sft")}
    if not all(norms.values()):
        return []
    large, small = max(norms, key=lambda name: norms[name]), min(norms, key=lambda name: norms[name])
    ratio = norms[large] / norms[small]
    if ratio <= _MAX_TERM_NORM_RATIO:
        return []
    detail = (
        f"grad_norm_{large}={norms[large]:.4g} is {ratio:.4g} times grad_norm_{small}={norms[small]:.4g},"
        f" above {_MAX_TERM_NORM_RATIO:g}: almost only the {large} term moves the weights;"
        f" {'lower' if large == 'sft' else 'raise'} sft.weight"
    )
    return [Event(kind=EventKind.TRIPWIRE, step=step, cause="term_dominates", detail=detail)]


def find_format_drift(
    step: int, metrics: Mapping[str, float], first_metrics: Mapping[str, float]
) -> list[Event]:
    """Return an alarm where replies lose their format and not their rightness since the first step.

    A lenient verifier pays for right answers in any form, so neither reward nor accuracy shows it.
    """
    names = ("accuracy", "format_ok_frac")
    if any(name not in numbers for name in names for numbers in (metrics, first_metrics)):
        return []
    is_as_right = metrics["accuracy"] >= first_metrics["accuracy"] and metrics["accuracy"] > 0.0
    now, then = metrics["format_ok_frac"], first_metrics["format_ok_frac"]
    if not is_as_right or now >= _MIN_FORMAT_KEPT_FRAC * then:
        return []
    detail = (
        f"format_ok_frac={now:.4g} was {then:.4g} in the first step, at accuracy {metrics['accuracy']:.4g}"
        f" from {first_metrics['accuracy']:.4g}: answers are right in a form that the task did not ask for;"
        " make the reward depend on the form"
    )
    return [Event(kind=EventKind.TRIPWIRE, step=step, cause="format_drift", detail=detail)]


Key = tuple[str, int]
"""An attempt of a step: example id and sample index. A step has no example twice."""


def find_fate_leak(step: int, dispatched: Collection[Key], groups: Sequence[Group]) -> list[Event]:
    """Return an alarm where a dispatched attempt did not end in exactly one rollout, scored or not.

    An attempt with no rollout or with two, and a rollout without an attempt, would shift the batch in
    silence.
    """
    fates = Counter(
        (rollout.example.example_id, rollout.sample_index) for group in groups for rollout in group.rollouts
    )
    leaked = [key for key in dispatched if fates[key] != 1]
    strangers = sorted(fates.keys() - set(dispatched))
    if not leaked and not strangers:
        return []
    ids = tuple(dict.fromkeys(example_id for example_id, _ in (*leaked, *strangers)))
    detail = (
        f"{len(leaked)} of {len(dispatched)} attempts of the step did not end in exactly one fate, and"
        f" {len(strangers)} ended that nobody asked for; the first example is {ids[0]}. This is a fault of"
        " strop or of a part that was put into it; the step's numbers are not those of its prompts"
    )
    return [
        Event(kind=EventKind.TRIPWIRE, step=step, cause="fate_leak", detail=detail, example_ids=ids[:MAX_IDS])
    ]


# Impossible numbers: such a step was measured or judged wrong. A metric's name implies its range (`_frac` a
# share, `seconds_` a duration), so a new metric is checked without being listed here.

_ROUNDING = 1e-6
_MAX_LOGPROB = 0.01
"""Nats above 0 that a log-probability may reach by rounding, where logits are bfloat16."""
_STAGES = ("generate", "verify", "learn", "sync", "other")
"""They follow each other on one clock, so they add up to the step."""
_MIN_CLOCK_S = 1e-3
_NOT_NEGATIVE = ("num_", "seconds_", "grad_norm", "entropy_nats", "drift_", "offpolicy_", "reply_tokens")


def find_impossible(step: int, metrics: Mapping[str, float]) -> list[Event]:
    """Return an alarm that names all metrics of a step with an impossible value, if there are any."""
    flaws = [text for name, value in metrics.items() if (text := _find_excess(name, value))]
    flaws += _find_time_twice(metrics)
    if not flaws:
        return []
    detail = (
        f"{'; '.join(flaws)}: this was measured wrong, and other numbers of the step may be. Nothing that the"
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
    """Describe durations that add up to more than the step took."""
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
    highest = (
        turn.logprobs.max() for turn in rollout.turns if turn.logprobs is not None and len(turn.logprobs)
    )
    return float(max(highest, default=-math.inf))


def _alarm(step: int, cause: str, detail: str, rollouts: Iterable[Rollout] = ()) -> Event:
    ids = tuple(dict.fromkeys(rollout.example.example_id for rollout in rollouts))
    return Event(kind=EventKind.TRIPWIRE, step=step, cause=cause, detail=detail, example_ids=ids[:MAX_IDS])


class StepWatch:
    """Checks the metrics of each step of one run, in order: bounds, trends, the plan and memory."""

    def __init__(self, spec: RunSpec, task: Task, prediction: Prediction | None) -> None:
        self._wires = spec.tripwires
        self._is_paid = spec.train.terms != "distill"
        self._history = History()
        self._pace = PaceWatch(prediction)
        self._memory = MemoryWatch()
        self.collapse = CollapseWatch(is_ordered=task.is_ordered)
        """Whether the alarms of the last steps together are a collapse."""

    def recall(self, records: Iterable[Mapping[str, float]]) -> None:
        """Take the recorded steps of earlier attempts and processes."""
        for metrics in records:
            self._compare(int(metrics["step"]), metrics)

    def find_alarms(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> list[Event]:
        """Return the alarms of the next step, which sampled `groups`."""
        alarms = find_impossible(step, metrics) + self._compare(step, metrics)
        alarms += self._pace.find_slow(step, metrics)
        alarms += find_format_drift(step, metrics, self._history.first[0])
        if "memory_bytes" in metrics:
            alarms += self._memory.find_growth(step, metrics["memory_bytes"])
        return with_samples(alarms, groups)

    def _compare(self, step: int, metrics: Mapping[str, float]) -> list[Event]:
        """Compare a step with the bounds and with earlier steps, and add it to these."""
        alarms = find_alarms(self._wires, step, metrics)
        alarms += find_trend_alarms(self._wires, step, metrics, self._history, is_paid=self._is_paid)
        self.collapse.note([alarm.cause for alarm in alarms], metrics, self._history)
        self._history.add(metrics)
        return alarms


class CauseLog:
    """Publishes why rollouts were lost: each cause once, with its traceback."""

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish
        self._published: set[tuple[str, str, str | None]] = set()

    def note(self, step: int, causes: Sequence[FailureCause]) -> None:
        """Publish the causes that are new."""
        for cause in causes:
            if key_of(cause.failure) in self._published:
                continue
            self._published.add(key_of(cause.failure))
            self._publish(
                Event(
                    kind=EventKind.ROLLOUT_LOST,
                    step=step,
                    cause=cause.failure.kind,
                    detail=f"{describe_failure(cause.failure)}; {cause.num} times until now",
                    trace=cause.failure.detail,
                )
            )

    def note_groups(self, step: int, groups: Sequence[Group]) -> None:
        """Publish the new causes among the rollouts of groups."""
        outcomes = (rollout.outcome for group in groups for rollout in group.rollouts)
        self.note(step, find_causes(outcomes))

    def note_too_long(self, step: int, groups: Sequence[Group]) -> int:
        """Publish the examples whose prompts left no room for a reply; return how many were attempted."""
        too_long = [group for group in groups if all(r.outcome.is_too_long for r in group.rollouts)]
        if too_long:
            ids = tuple(group.example.example_id for group in too_long)
            failure = too_long[0].rollouts[0].outcome.failure
            detail = f"{len(ids)} examples were not attempted: {failure.detail if failure else ''}"
            self._publish(
                Event(
                    kind=EventKind.ROLLOUT_LOST,
                    step=step,
                    cause=PROMPT_TOO_LONG,
                    detail=detail,
                    example_ids=ids,
                )
            )
        return len(groups) - len(too_long)
