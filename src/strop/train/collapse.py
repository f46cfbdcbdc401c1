"""Collapse: the policy learns to be paid without learning what it is asked.

It comes while the reward rises: one short reply to every prompt earns a part of the marks, accuracy stays
where it was, and entropy falls. What tells it from learning is held against each sign: a run that is right
more often than at first may change its replies as it likes, and a reward that grades partial work may rise
as long as different prompts get different replies.

An alarm is a word to the user; `CollapseWatch` says when several of them, step after step, end the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from strop.train.history import NUM_BEGIN, NUM_FIRST, NUM_LOW, History

Alarm = tuple[str, str]
"""Cause and detail."""

SIGNS = frozenset(
    {
        *("reply_collapse", "entropy_collapse", "reward_collapse", "unearned_reward", "entropy_fall"),
        *("length_collapse", "duplicate_completions"),
    }
)
"""Alarms that a collapse raises. It takes two of them, one of them about what the policy says."""
_DIRECT = frozenset({"reply_collapse", "entropy_collapse", "entropy_fall"})
NUM_STOP = 5
"""Steps in a row with two signs of a collapse that end a run."""
NUM_LOST = 16
"""Steps in a row with `reward_collapse` alone that do: with few replies a step, eight low may be luck."""
_MIN_RISE_RATIO = 2.0
_MIN_DEPENDENCE = 0.15
"""Of replies on their prompts (`train.replies`); 0 is chance."""
_NUM_ERRORS_RIGHT = 2.0
_MIN_UNEARNED_SHARE = 0.5
_RIGHT_ENOUGH = 0.5
"""Accuracy of a policy that has not collapsed, however narrow it is."""


def is_more_right(metrics: Mapping[str, float], history: History) -> bool:
    """Whether the last steps are right more often than the first ones; no where a task does not say."""
    accuracy = history.compare("accuracy", metrics)
    return accuracy is not None and accuracy.now - accuracy.then > _NUM_ERRORS_RIGHT * accuracy.error


def ignores_prompts(metrics: Mapping[str, float], history: History) -> bool:
    """Whether the last steps' replies could as well answer other prompts, and are not right more often."""
    dependence = history.compare("prompt_dependence", metrics)
    is_low = dependence is not None and dependence.now < _MIN_DEPENDENCE
    return is_low and not is_more_right(metrics, history)


def find_one_reply(bound: float | None, metrics: Mapping[str, float], history: History) -> Alarm | None:
    """Find different prompts that get one wrong reply, or replies that no longer depend on them."""
    if bound is None or is_more_right(metrics, history):
        return None
    # The begin as well: a fast collapse is over before the first steps are, and they look as the last ones.
    for num_first in (NUM_FIRST, NUM_BEGIN):
        common, distinct, dependence = (
            history.compare(name, metrics, num_first)
            for name in ("common_reply_frac", "distinct_reply_frac", "prompt_dependence")
        )
        is_one = (
            common is not None and common.now > max(bound, _MIN_RISE_RATIO * common.then) and common.is_rise
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
        f"above tripwires.max_common_reply_frac={bound:g} the same wrong reply is given to different prompts"
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


def find_entropy_fall(
    bound: float | None, metrics: Mapping[str, float], history: History, *, is_narrow: bool
) -> Alarm | None:
    """Find a policy that says fewer things than at first and gains nothing by it.

    `is_narrow`: different prompts get one reply, so that a better reward counts for nothing.
    """
    entropy, reward = (history.compare(name, metrics) for name in ("entropy_nats", "reward_mean"))
    if bound is None or entropy is None or reward is None or is_more_right(metrics, history):
        return None
    is_gain = reward.now > reward.then and not is_narrow
    if is_gain or not entropy.is_fall or entropy.now >= bound * entropy.then:
        return None
    return "entropy_fall", (
        f"entropy_nats={entropy.now:.4g} over the last {NUM_LOW} steps was {entropy.then:.4g} in the first"
        f" {NUM_FIRST}, below tripwires.min_entropy_kept_frac={bound:g} of it, at a reward of"
        f" {reward.now:.4g} from {reward.then:.4g}{_say_accuracy(metrics, history)}: the policy gives up what"
        " it could have tried; lower optimizer.lr, raise sampling.temperature, or go back to an earlier"
        " checkpoint"
    )


def _say_accuracy(metrics: Mapping[str, float], history: History) -> str:
    accuracy = history.compare("accuracy", metrics)
    return "" if accuracy is None else f", while accuracy went from {accuracy.then:.1%} to {accuracy.now:.1%}"


class CollapseWatch:
    """Counts the steps in a row whose alarms together are a collapse, and remembers what they were."""

    def __init__(self, *, is_ordered: bool) -> None:
        """Take whether the task orders its examples: then later ones may be harder, and earn less."""
        self._is_ordered = is_ordered
        self._num_of_signs = 0
        self._num_lost = 0
        self._causes: dict[str, None] = {}

    def note(self, causes: Collection[str], metrics: Mapping[str, float], history: History) -> None:
        """Take the alarms of the next step; `history` does not hold the step yet."""
        signs = set() if _is_right(metrics, history) else set(causes) & SIGNS
        is_sign = bool(signs & _DIRECT) and len(signs) > 1
        # What was learned is lost: a sign of its own, unless the examples themselves may have changed.
        is_lost = "reward_collapse" in signs and not self._is_ordered
        self._num_of_signs = self._num_of_signs + 1 if is_sign else 0
        self._num_lost = self._num_lost + 1 if is_lost else 0
        self._causes = {**self._causes, **dict.fromkeys(sorted(signs))} if is_sign or is_lost else {}

    @property
    def reason(self) -> str | None:
        """Why the run has to end; None while it has not."""
        if self._num_of_signs < NUM_STOP and self._num_lost < NUM_LOST:
            return None
        return f"for {self.num_in_a_row} steps in a row the policy collapses: {', '.join(self._causes)}"

    @property
    def num_in_a_row(self) -> int:
        """Steps up to the last one that are part of a collapse."""
        return max(self._num_of_signs, self._num_lost)


def _is_right(metrics: Mapping[str, float], history: History) -> bool:
    """Whether a step is of a policy that does what it is asked, however narrow it is."""
    accuracy = history.compare("accuracy", metrics)
    # Before there are two windows, of this step alone.
    now = metrics.get("accuracy", 0.0) if accuracy is None else accuracy.now
    return now >= _RIGHT_ENOUGH or is_more_right(metrics, history)
