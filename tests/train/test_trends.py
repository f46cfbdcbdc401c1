"""Alarms that compare a step with the steps before it, by hand-made numbers."""

from __future__ import annotations

import pytest

from strop.spec import TripwireSpec
from strop.train.observer import EvalSummary
from strop.train.watch.trends import History, find_divergence, find_trend_alarms

SPEC = TripwireSpec()

# Every third step of recipes/arithmetic.toml, as measured: replies get a third as long, gradients grow
# fourfold, and the reward rises.
HEALTHY = [
    {"reply_tokens_mean": length, "grad_norm": norm, "reward_mean": reward}
    for length, norm, reward in (
        *((27.3, 0.745, 0.078), (28.4, 0.998, 0.094), (28.0, 0.969, 0.094), (26.2, 0.794, 0.047)),
        *((26.1, 1.063, 0.141), (24.5, 1.186, 0.219), (25.5, 1.381, 0.141), (19.5, 1.915, 0.297)),
        *((17.8, 1.983, 0.406), (16.1, 2.554, 0.5), (15.3, 2.189, 0.75), (12.2, 2.342, 0.594)),
        *((11.2, 2.184, 0.781), (11.2, 2.374, 0.828), (10.0, 3.155, 0.891)),
    )
]


def causes(history: History, **metrics: float) -> list[str]:
    return [alarm.cause for alarm in find_trend_alarms(SPEC, 9, metrics, history)]


def test_a_healthy_run_raises_nothing() -> None:
    history = History()
    for index, metrics in enumerate(HEALTHY):
        assert find_trend_alarms(SPEC, index + 1, metrics, history) == []
        history.add(metrics)
    assert find_trend_alarms(SPEC, 16, {}, history) == []
    assert find_trend_alarms(SPEC, 1, HEALTHY[0], History()) == []


@pytest.mark.parametrize(
    ("length", "reward", "found"),
    [
        (1300.0, 0.3, ["length_collapse"]),  # 5500 / 1300 = 4.2
        (1376.0, 0.3, []),  # just above 5500 / 4 = 1375
        (1300.0, 0.41, []),  # a quarter as long, and better than the 0.4 it had
        (23_000.0, 0.4, ["length_explosion"]),
        (21_999.0, 0.4, []),
        (23_000.0, 0.7, []),  # longer reasoning that earns more
    ],
)
def test_replies_may_change_length_only_as_the_reward_gets_better(
    length: float, reward: float, found: list[str]
) -> None:
    """Incident: answers shrank from 5,500 to 1,300 tokens within 100 steps, and nothing stopped the run."""
    # Medians of the first eight steps: 5500 tokens; mean reward 0.4.
    history = History([{"reply_tokens_mean": 5500.0, "reward_mean": 0.4}] * 8)
    for _ in range(90):
        history.add({"reply_tokens_mean": 2000.0, "reward_mean": 0.4})
    assert causes(history, reply_tokens_mean=length, reward_mean=reward) == found


@pytest.mark.parametrize(("norm", "found"), [(20.1, ["grad_norm"]), (19.9, [])])
def test_a_gradient_far_above_the_last_ones_is_an_alarm(norm: float, found: list[str]) -> None:
    # Norms 1 but for two steps, one of which had no gradient: the median is 1.
    history = History({"grad_norm": value} for value in (1.0, 1.0, 0.0, 9.0, 1.0))
    assert causes(history, grad_norm=norm) == found
    # Fewer than four say nothing.
    assert causes(History([{"grad_norm": 1.0}] * 3), grad_norm=norm) == []


def test_a_reward_that_is_lost_for_eight_steps_is_an_alarm() -> None:
    """Incident: the training reward went from .88 to .09 by step 208, unattended."""
    # The best eight steps have mean 0.88; half of it is 0.44.
    history = History([{"reward_mean": 0.5}] * 4 + [{"reward_mean": 0.88}] * 8)
    for _ in range(7):
        assert causes(history, reward_mean=0.09) == []
        history.add({"reward_mean": 0.09})
    assert causes(history, reward_mean=0.09) == ["reward_collapse"]
    assert causes(history, reward_mean=0.45) == []


def test_a_few_lucky_replies_are_no_reward_that_could_be_lost() -> None:
    # Two of 256 replies earned something; by chance none of the next does.
    lucky = [0.0, 0.125, 0.0, 0.0, 0.125, 0.0, 0.0, 0.0]
    history = History([{"reward_mean": reward} for reward in [*lucky, *[0.0] * 7]])
    assert causes(history, reward_mean=0.0) == []
    # Rare, and steady: eight steps of one in forty are more than luck.
    steady = [0.025, 0.05, 0.0, 0.025, 0.025, 0.05, 0.0, 0.025]
    history = History([{"reward_mean": reward} for reward in [*steady, *[0.0] * 7]])
    assert causes(history, reward_mean=0.0) == ["reward_collapse"]


def test_long_replies_that_keep_coming_too_late_are_an_alarm() -> None:
    # A step whose used replies are 0.68 as long lacks 0.32; three of them 0.96 of 8: 0.88 is below 0.9.
    late = {"reply_tokens_mean": 9.0, "used_length_ratio": 0.68}
    in_time = {"reply_tokens_mean": 9.0}
    history = History([in_time] * 8)
    assert causes(history, **late) == []
    history.add(late)
    history.add(in_time)
    assert causes(history, **late) == []
    history.add(late)
    assert causes(history, **late) == ["selection_bias"]
    # A step without evictions says nothing, and eight of them forget.
    assert causes(history, **in_time) == []
    assert causes(History([late] * 2 + [in_time] * 7), **late) == []
    # Early evictions count as in a full window.
    assert causes(History([late]), **late) == []


def test_an_alarm_says_how_far_it_is_from_the_usual() -> None:
    history = History([{"reply_tokens_mean": 50.0, "reward_mean": 0.8, "grad_norm": 1.0}] * 16)
    metrics = {"reply_tokens_mean": 1.0, "reward_mean": 0.0, "grad_norm": 1e6}
    alarms = find_trend_alarms(SPEC, 17, metrics, history)
    assert [alarm.cause for alarm in alarms] == ["length_collapse", "grad_norm"]
    assert "more than 4 times shorter at a reward of 0 from 0.8" in alarms[0].detail
    assert "above 20 times the usual 1" in alarms[1].detail


def summary(step: int, **changes: float | None) -> EvalSummary:
    numbers = {"best_step": 0, "change": -0.06, "change_high": -0.02} | changes
    return EvalSummary(
        step=step,
        num_examples=500,
        greedy_accuracy=0.22,
        greedy_low=0.19,
        greedy_high=0.26,
        sampled_accuracy=None,
        **numbers,  # type: ignore[arg-type]
    )


def rewards(*values: float) -> list[dict[str, float]]:
    return [{"step": step, "reward_mean": value} for step, value in enumerate(values, start=1)]


RISING = rewards(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7)


def test_a_rising_reward_with_falling_accuracy_is_an_alarm() -> None:
    (alarm,) = find_divergence(summary(8), RISING)
    assert (alarm.cause, alarm.step) == ("reward_eval_divergence", 8)
    # Steps 1 to 4 against 5 to 8: (0.1 + 0.2 + 0.3 + 0.4) / 4 and (0.5 + 0.6 + 0.7 + 0.7) / 4.
    assert "rose from 0.25 to 0.625 since step 0, and held-out accuracy changed by -6.0%" in alarm.detail
    # From step 4: what the best evaluation stood behind, steps 3 and 4, against 7 and 8.
    (later,) = find_divergence(summary(8, best_step=4), RISING)
    assert "rose from 0.35 to 0.7 since step 4" in later.detail


@pytest.mark.parametrize(
    ("changes", "records"),
    [
        ({"change": 0.06, "change_high": 0.1}, RISING),  # both rise
        ({"change": -0.06, "change_high": 0.01}, RISING),  # a fall that chance explains
        ({}, rewards(*[0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.1])),  # both fall
        ({}, rewards(0.1)),  # one step is no trend
        ({"best_step": None, "change": None, "change_high": None}, RISING),  # nothing to compare with
        ({}, []),  # a run that only imitates has no reward
    ],
)
def test_what_is_no_divergence_raises_nothing(
    changes: dict[str, float | None], records: list[dict[str, float]]
) -> None:
    assert find_divergence(summary(8, **changes), records) == []
