"""Numbers that cannot be, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from strop.rollout import FinishReason, Group, Outcome, Rollout, Sampling, Turn, make_example
from strop.tasks.bounds import within_bounds
from strop.tasks.contract import TaskLimits
from strop.train.impossible import find_impossible, find_impossible_rollouts
from strop.train.measure import measure_time

POSSIBLE = {
    "accuracy": 1.0,
    "reward_mean": 3.5,
    "failed_frac": 0.0,
    "changed_frac": 1.0,
    "entropy_nats": 0.0,
    "drift_mean_nats": 1e-7,
    "loss": -0.3,
    "grad_norm": 0.0,
    "grad_cosine": -1.0,
    "judge_length_correlation": 0.5,
    "kl_mean_nats": -0.001,
    "num_scored_tokens": 12.0,
    **measure_time({"generate": 4.0, "verify": 1.0, "learn": 3.0, "sync": 0.5}, 10.0, 500.0),
}


def test_what_can_be_raises_nothing() -> None:
    assert find_impossible(3, POSSIBLE) == []
    assert find_impossible(3, {}) == []
    # Rounding is no sign.
    assert find_impossible(3, {"accuracy": 1.0 + 1e-9, "entropy_nats": -1e-9}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 2.39),
        ("accuracy", -0.1),
        ("failed_frac", 1.2),
        ("loop_late_frac", 90.0),
        ("entropy_nats", -0.4),
        ("drift_max_nats", -1.0),
        ("grad_norm", -2.0),
        ("grad_cosine", 1.5),
        ("judge_length_correlation", -1.1),
        ("num_scored_tokens", -1.0),
        ("scored_tokens_per_s", -1.0),
        ("seconds_learn", -0.1),
        ("accuracy", float("nan")),
        ("loss", float("nan")),
    ],
)
def test_a_number_that_cannot_be_is_named_with_its_bounds(name: str, value: float) -> None:
    (alarm,) = find_impossible(3, POSSIBLE | {name: value})
    assert (alarm.kind, alarm.step, alarm.cause) == ("tripwire", 3, "impossible_value")
    assert alarm.detail.startswith(f"{name}={value:.6g} is not within ")


def test_durations_that_ran_beside_each_other_do_not_add_up() -> None:
    metrics = measure_time({"generate": 8.0, "verify": 7.0, "learn": 3.0}, 10.0, 500.0)
    (alarm,) = find_impossible(1, metrics)
    assert "the stages of the step add up to 18 s, and it took seconds_step=10" in alarm.detail
    (alarm,) = find_impossible(1, POSSIBLE | {"seconds_compute": 11.0})
    assert "seconds_compute=11 is longer than seconds_step=10" in alarm.detail
    # Two clocks that were read one after the other are not two that ran at once.
    assert find_impossible(1, POSSIBLE | {"seconds_step": 10.0 - 1e-4}) == []


LIMITS = TaskLimits(max_reply_tokens=8)


def rollout(number: int, parts: dict[str, float | None], logprob: float = -1.0) -> Rollout:
    reply = Turn(
        role="assistant",
        text="7",
        token_ids=np.array([7], dtype=np.int32),
        logprobs=np.array([logprob], dtype=np.float32),
        policy_version=0,
        finish_reason=FinishReason.EOS,
    )
    return Rollout(
        example=make_example("toy", {"n": number}, "7"),
        step=0,
        sample_index=0,
        turns=(Turn(role="prompt", text="?", token_ids=np.array([1], dtype=np.int32)), reply),
        outcome=within_bounds(Outcome(parts=parts), LIMITS),
        sampling=Sampling(),
    )


def groups(*rollouts: Rollout) -> list[Group]:
    return [Group(example=one.example, rollouts=(one,)) for one in rollouts]


def test_scores_that_cannot_be_are_alarms_with_their_examples() -> None:
    fine, high, low = (rollout(n, {"score": value}) for n, value in enumerate((1.0, 2.39, -0.5)))
    assert find_impossible_rollouts(2, groups(fine)) == []
    ceiling, impossible = find_impossible_rollouts(2, groups(fine, high, low))
    assert (ceiling.cause, ceiling.example_ids) == ("ceiling", (high.example.example_id,))
    assert ceiling.detail.startswith(
        "1 of 3 rollouts have a score that cannot be, and are not trained on: task,"
    )
    assert "a score of 2.39 (score 2.39). Allowed: 0 to 1" in ceiling.detail
    assert (impossible.cause, impossible.example_ids) == ("impossible_value", (low.example.example_id,))


def test_a_token_that_is_likelier_than_certain_is_an_alarm() -> None:
    sure, odd = rollout(0, {"score": 1.0}, logprob=0.005), rollout(1, {"score": 0.0}, logprob=0.7)
    assert find_impossible_rollouts(2, groups(sure)) == []
    (alarm,) = find_impossible_rollouts(2, groups(sure, odd))
    assert (alarm.cause, alarm.example_ids) == ("impossible_value", (odd.example.example_id,))
    # e ** 0.7 = 2.014
    assert "1 of 2 rollouts hold a token of log-probability 0.7, a probability of 2.014" in alarm.detail
