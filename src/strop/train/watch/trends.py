"""Alarms that need several steps: metrics compared with those of the run's first and last steps.

Every bound is relative to the run's own past. Replies may change length as far as they like while
the reward gets better: a healthy run may end with replies a tenth as long as its first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean, median, stdev

from strop.record.events import Event, EventKind
from strop.spec.train import TripwireSpec
from strop.train.observer import EvalSummary

NUM_FIRST = 8
"""Steps at the start that later ones are compared with; their median is robust to one odd step."""
NUM_BEGIN = 2
"""Steps at the start that no collapse can have reached, where the first `NUM_FIRST` may hold a fast one."""
NUM_RECENT = 16
"""Steps back whose gradient norms a new one is compared with: a norm that grows slowly is no spike."""
NUM_LOW = 8
"""Steps in a row that make a trend; fewer may be the luck of one step's examples."""
_MIN_STEPS = 6
"""Steps of a window that must have a metric."""
_MAX_LENGTH_RATIO = 4.0
"""How many times shorter or longer the mean reply may become while the reward has not improved."""
_MAX_GRAD_NORM_RATIO = 20.0
"""Of a gradient norm before clipping to the median of the last ones."""
_MIN_REWARD_KEPT_FRAC = 0.5
"""Share of its best mean reward that a run must keep."""
_MIN_USED_LENGTH_RATIO = 0.9
"""Of the mean length of replies that arrived in time to that of all dispatched ones."""
_NUM_ERRORS = 3.0
"""Standard errors beyond which a difference between two windows is not chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """How a metric moved between the first steps and the last ones, by the means of both."""

    then: float
    now: float
    error: float
    """Standard error of the difference, from how far the single steps lie from their means."""

    @property
    def is_rise(self) -> bool:
        """Whether it rose by more than chance explains."""
        return self.now - self.then > _NUM_ERRORS * self.error

    @property
    def is_fall(self) -> bool:
        """Whether it fell by more than chance explains."""
        return self.then - self.now > _NUM_ERRORS * self.error


def change_between(first: Sequence[float], last: Sequence[float]) -> Change:
    """Compare two windows of single steps."""
    spread = stdev(first), stdev(last)
    if len(first) < _MIN_STEPS:  # So few may lie close by luck.
        spread = max(spread), max(spread)
    error = hypot(spread[0] / len(first) ** 0.5, spread[1] / len(last) ** 0.5)
    return Change(then=fmean(first), now=fmean(last), error=error)


class History:
    """The steps that later ones are compared with."""

    def __init__(self, records: Iterable[Mapping[str, float]] = ()) -> None:
        self.first: list[Mapping[str, float]] = []
        """The first steps of the run, of whichever attempt."""
        self.last: deque[Mapping[str, float]] = deque(maxlen=NUM_LOW - 1)
        """The last steps, none of which is in `first`: `NUM_LOW` together with the current step."""
        self.grad_norms: deque[float] = deque(maxlen=NUM_RECENT)
        """Gradient norms of the last steps with a gradient."""
        self.rewards: deque[float] = deque(maxlen=NUM_LOW)
        """Mean rewards of the last steps."""
        self.best_rewards: tuple[float, ...] = ()
        """The `NUM_LOW` rewards in a row with the highest mean."""
        self.used_lengths = deque([1.0] * NUM_LOW, maxlen=NUM_LOW)
        """Mean length of the trained replies over that of all dispatched ones, for each of the last steps.
        Full from the beginning: one odd step is no selection."""
        for record in records:
            self.add(record)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of the next step."""
        if len(self.first) < NUM_FIRST:
            self.first.append(dict(metrics))
        else:
            self.last.append(dict(metrics))
        # A step without signal has norm 0 and says nothing about the norms of others.
        if metrics.get("grad_norm"):
            self.grad_norms.append(metrics["grad_norm"])
        if "reply_tokens_mean" in metrics:
            self.used_lengths.append(metrics.get("used_length_ratio", 1.0))
        if "reward_mean" in metrics:
            self.rewards.append(metrics["reward_mean"])
            is_whole = len(self.rewards) == NUM_LOW
            if is_whole and (not self.best_rewards or fmean(self.rewards) > fmean(self.best_rewards)):
                self.best_rewards = tuple(self.rewards)

    def first_values(self, metric: str) -> list[float]:
        """Return a metric's values in the first steps."""
        return [metrics[metric] for metrics in self.first if metric in metrics]

    def compare(self, metric: str, metrics: Mapping[str, float], num_first: int = NUM_FIRST) -> Change | None:
        """Compare the last `NUM_LOW` steps, that of `metrics` among them, with the first `num_first`.

        None until `NUM_FIRST` steps lie before them, and where more than two steps of either lack the metric.
        """
        first = [step[metric] for step in self.first[:num_first] if metric in step]
        last = [step[metric] for step in (*self.last, metrics) if metric in step]
        is_early = len(self.last) < NUM_LOW - 1
        is_short = len(first) < min(_MIN_STEPS, num_first) or len(last) < _MIN_STEPS
        if is_early or metric not in metrics or is_short:
            return None
        return change_between(first, last)


# Collapse: the policy learns to earn reward without learning the task.
#
# The reward rises meanwhile: one short reply to every prompt earns partial marks, accuracy stays where it
# was, and entropy falls. Each sign is weighed against learning: a run that is right more often than at first
# may change its replies as it likes, and a reward that grades partial work may rise as long as different
# prompts get different replies. One alarm informs; several, step after step, end the run (`CollapseWatch`).

Alarm = tuple[str, str]
"""Cause and detail."""

SIGNS = frozenset(
    {
        *("reply_collapse", "entropy_collapse", "reward_collapse", "unearned_reward", "entropy_fall"),
        *("length_collapse", "duplicate_completions"),
    }
)
"""Alarms that a collapse raises. It takes two of them, one of them in `_DIRECT`: about the replies."""
_DIRECT = frozenset({"reply_collapse", "entropy_collapse", "entropy_fall"})
NUM_STOP = 5
"""Steps in a row with two signs of a collapse that end a run."""
NUM_LOST = 16
"""Steps in a row with `reward_collapse` alone that end a run: with few replies a step, eight may be luck."""
_MAX_COMMON_REPLY_FRAC = 0.25
"""Share of replies that are the same wrong text for different prompts."""
_MIN_ENTROPY_KEPT_FRAC = 0.5
"""Share of the first steps' entropy that the last ones must keep while nothing gets better."""
_MIN_RISE_RATIO = 2.0
_MIN_DEPENDENCE = 0.15
"""Of replies on their prompts (`measure.prompt_dependence`); 0 is chance."""
_NUM_ERRORS_RIGHT = 2.0
_MIN_UNEARNED_SHARE = 0.5
_RIGHT_ENOUGH = 0.5
"""Accuracy of a policy that has not collapsed, however narrow it is."""


def is_more_right(metrics: Mapping[str, float], history: History) -> bool:
    """Whether the last steps are right more often than the first ones; False where the task cannot say."""
    accuracy = history.compare("accuracy", metrics)
    return accuracy is not None and accuracy.now - accuracy.then > _NUM_ERRORS_RIGHT * accuracy.error


def ignores_prompts(metrics: Mapping[str, float], history: History) -> bool:
    """Whether the last steps' replies could as well answer other prompts, and are not right more often."""
    dependence = history.compare("prompt_dependence", metrics)
    is_low = dependence is not None and dependence.now < _MIN_DEPENDENCE
    return is_low and not is_more_right(metrics, history)


def find_one_reply(metrics: Mapping[str, float], history: History) -> Alarm | None:
    """Find different prompts that get one wrong reply, or replies that no longer depend on them."""
    if is_more_right(metrics, history):
        return None
    # The begin as well: a fast collapse is over before the first steps are, and they look as the last ones.
    for num_first in (NUM_FIRST, NUM_BEGIN):
        common, distinct, dependence = (
            history.compare(name, metrics, num_first)
            for name in ("common_reply_frac", "distinct_reply_frac", "prompt_dependence")
        )
        is_one = (
            common is not None
            and common.now > max(_MAX_COMMON_REPLY_FRAC, _MIN_RISE_RATIO * common.then)
            and common.is_rise
        )
        is_deaf = (
            dependence is not None
            and dependence.is_fall
            and dependence.now < min(_MIN_DEPENDENCE, dependence.then / _MIN_RISE_RATIO)
        )
        if is_one or is_deaf:
            break
    else:
        return None
    names = {
        "common_reply_frac": common,
        "distinct_reply_frac": distinct,
        "prompt_dependence": dependence,
    }
    numbers = [
        f"{name}={change.now:.4g} from {change.then:.4g}"
        for name, change in names.items()
        if change is not None
    ]
    limit = (
        f"above {_MAX_COMMON_REPLY_FRAC:g} the same wrong reply is given to different prompts"
        if is_one
        else f"below a prompt_dependence of {_MIN_DEPENDENCE:g} replies could as well answer other prompts"
    )
    return "reply_collapse", (
        f"{', '.join(numbers)}, over the last {NUM_LOW} steps and the first {num_first}"
        f"{_say_accuracy(metrics, history)}: {limit}, and the policy no longer reads what it is asked. Look"
        " at what the reward gives for such a reply, and go back to an earlier checkpoint"
    )


def find_unearned_reward(bound: float | None, metrics: Mapping[str, float], history: History) -> Alarm | None:
    """Find a reward that rises by wrong replies, while right ones get no more frequent."""
    unearned = history.compare("unearned_reward_mean", metrics)
    reward = history.compare("reward_mean", metrics)
    if bound is None or unearned is None or reward is None or is_more_right(metrics, history):
        return None
    is_more = unearned.is_rise and unearned.now > bound * max(unearned.then, 0.0)
    if not is_more or unearned.now < _MIN_UNEARNED_SHARE * reward.now:
        return None
    return "unearned_reward", (
        f"unearned_reward_mean={unearned.now:.4g} over the last {NUM_LOW} steps was {unearned.then:.4g} in"
        f" the first {NUM_FIRST}, more than tripwires.max_unearned_ratio={bound:g} times as much"
        f"{_say_accuracy(metrics, history)}: wrong replies are paid better and better. Look at the wrong"
        " replies with the highest reward; where they are on the way to right ones, set"
        " tripwires.max_unearned_ratio to none"
    )


def find_entropy_fall(metrics: Mapping[str, float], history: History, *, is_narrow: bool) -> Alarm | None:
    """Find a policy whose entropy fell without a better reward.

    `is_narrow`: different prompts get one reply, so that a better reward does not excuse it.
    """
    entropy, reward = (history.compare(name, metrics) for name in ("entropy_nats", "reward_mean"))
    if entropy is None or reward is None or is_more_right(metrics, history):
        return None
    is_gain = reward.now > reward.then and not is_narrow
    if is_gain or not entropy.is_fall or entropy.now >= _MIN_ENTROPY_KEPT_FRAC * entropy.then:
        return None
    return "entropy_fall", (
        f"entropy_nats={entropy.now:.4g} over the last {NUM_LOW} steps was {entropy.then:.4g} in the first"
        f" {NUM_FIRST}, below {_MIN_ENTROPY_KEPT_FRAC:g} of it, at a reward of"
        f" {reward.now:.4g} from {reward.then:.4g}{_say_accuracy(metrics, history)}: the policy gives up what"
        " it could have tried; lower optimizer.lr, raise sampling.temperature, or go back to an earlier"
        " checkpoint"
    )


def _say_accuracy(metrics: Mapping[str, float], history: History) -> str:
    accuracy = history.compare("accuracy", metrics)
    return "" if accuracy is None else f", while accuracy went from {accuracy.then:.1%} to {accuracy.now:.1%}"


class CollapseWatch:
    """Counts the steps in a row whose alarms together are a collapse, and keeps their causes."""

    def __init__(self, *, is_ordered: bool) -> None:
        """`is_ordered`: the task orders its examples, so later ones may be harder, and earn less."""
        self._is_ordered = is_ordered
        self._num_of_signs = 0
        self._num_lost = 0
        self._causes: dict[str, None] = {}

    def note(self, causes: Collection[str], metrics: Mapping[str, float], history: History) -> None:
        """Take the alarms of the next step; `history` does not hold the step yet."""
        signs = set() if _is_right(metrics, history) else set(causes) & SIGNS
        is_sign = bool(signs & _DIRECT) and len(signs) > 1
        # A lost reward is a sign by itself, unless the examples may have become harder.
        is_lost = "reward_collapse" in signs and not self._is_ordered
        self._num_of_signs = self._num_of_signs + 1 if is_sign else 0
        self._num_lost = self._num_lost + 1 if is_lost else 0
        self._causes = {**self._causes, **dict.fromkeys(sorted(signs))} if is_sign or is_lost else {}

    @property
    def reason(self) -> str | None:
        """Why the run has to end; None while it may go on."""
        if self._num_of_signs < NUM_STOP and self._num_lost < NUM_LOST:
            return None
        return f"for {self.num_in_a_row} steps in a row the policy collapses: {', '.join(self._causes)}"

    @property
    def num_in_a_row(self) -> int:
        """Steps up to the last one that are part of a collapse."""
        return max(self._num_of_signs, self._num_lost)


def _is_right(metrics: Mapping[str, float], history: History) -> bool:
    """Whether the policy solves its task, however narrow it is."""
    accuracy = history.compare("accuracy", metrics)
    # Before there are two windows, the accuracy of this step alone.
    now = metrics.get("accuracy", 0.0) if accuracy is None else accuracy.now
    return now >= _RIGHT_ENOUGH or is_more_right(metrics, history)


_MIN_NORMS = 4


def find_trend_alarms(
    spec: TripwireSpec,
    step: int,
    metrics: Mapping[str, float],
    history: History,
    *,
    is_paid: bool = True,
) -> list[Event]:
    """Return the alarms that a step raises beside the steps before it. `history` does not hold it yet.

    Where the policy is not paid but taught (`is_paid`), entropy falls on purpose: the teacher may be surer.
    """
    one_reply = find_one_reply(metrics, history)
    is_narrow = one_reply is not None or ignores_prompts(metrics, history)
    alarms = (
        one_reply,
        find_unearned_reward(spec.max_unearned_ratio, metrics, history) if is_paid else None,
        find_entropy_fall(metrics, history, is_narrow=is_narrow) if is_paid else None,
        _find_length_change(metrics, history, is_narrow=is_narrow),
        _find_norm_spike(metrics, history),
        _find_reward_fall(metrics, history),
        _find_selection(metrics, history),
    )
    return [
        Event(kind=EventKind.TRIPWIRE, step=step, cause=cause, detail=detail)
        for cause, detail in (alarm for alarm in alarms if alarm is not None)
    ]


def _find_length_change(metrics: Mapping[str, float], history: History, *, is_narrow: bool) -> Alarm | None:
    """Find replies far shorter or longer than in the first steps, without a better reward.

    A better one does not excuse them where it is paid for one reply to different prompts (`is_narrow`).
    """
    lengths, rewards = history.first_values("reply_tokens_mean"), history.first_values("reward_mean")
    now, reward = metrics.get("reply_tokens_mean"), metrics.get("reward_mean")
    if now is None or reward is None or not lengths or not rewards:
        return None
    usual, usual_reward = median(lengths), fmean(rewards)
    is_usual = usual / _MAX_LENGTH_RATIO <= now <= usual * _MAX_LENGTH_RATIO
    # Replies that earn more may grow and shrink.
    if (reward > usual_reward and not is_narrow) or is_usual:
        return None
    cause, word = ("length_collapse", "shorter") if now < usual else ("length_explosion", "longer")
    return cause, (
        f"reply_tokens_mean={now:.4g} was {usual:.4g} in the first steps, more than {_MAX_LENGTH_RATIO:g}"
        f" times {word} at a reward of {reward:.4g} from {usual_reward:.4g}: the policy is falling apart;"
        " lower optimizer.lr and go back to an earlier checkpoint"
    )


def _find_norm_spike(metrics: Mapping[str, float], history: History) -> Alarm | None:
    """Find a gradient far above those of the last steps."""
    now = metrics.get("grad_norm")
    if now is None or len(history.grad_norms) < _MIN_NORMS:
        return None
    usual = median(history.grad_norms)
    if now <= _MAX_GRAD_NORM_RATIO * usual:
        return None
    return "grad_norm", (
        f"grad_norm={now:.4g} is above {_MAX_GRAD_NORM_RATIO:g} times the usual {usual:.4g}:"
        " one step undoes what many have learned; lower optimizer.lr or optimizer.max_grad_norm, and look at"
        " the step's rollouts"
    )


def _find_reward_fall(metrics: Mapping[str, float], history: History) -> Alarm | None:
    """Find a reward that stays far below what the run once had."""
    now = metrics.get("reward_mean")
    if now is None or not history.best_rewards:
        return None
    rewards, best = [*history.rewards, now][-NUM_LOW:], fmean(history.best_rewards)
    # A few lucky replies of a policy that earns nothing are no reward that could be lost.
    is_fall = change_between(history.best_rewards, rewards).is_fall
    if best <= 0.0 or max(rewards) >= _MIN_REWARD_KEPT_FRAC * best or not is_fall:
        return None
    return "reward_collapse", (
        f"reward_mean={now:.4g} stays below {_MIN_REWARD_KEPT_FRAC:g} of the best"
        f" {NUM_LOW} steps' {best:.4g} for {NUM_LOW} steps: what was learned is lost; lower optimizer.lr and"
        " go back to an earlier checkpoint"
    )


def _find_selection(metrics: Mapping[str, float], history: History) -> Alarm | None:
    """Find long replies that keep coming too late to be trained on."""
    now = metrics.get("used_length_ratio")
    if now is None:
        return None
    ratio = fmean([*history.used_lengths, now][-NUM_LOW:])
    if ratio >= _MIN_USED_LENGTH_RATIO:
        return None
    return "selection_bias", (
        f"used_length_ratio={ratio:.4g} over {NUM_LOW} steps is below {_MIN_USED_LENGTH_RATIO:g}: long"
        " replies come too late and are evicted, so the policy is trained on short ones; raise"
        " train.max_staleness, or look for the engine that serves old weights"
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
    # The windows may not overlap: each is at most half of the steps between the two evaluations.
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
