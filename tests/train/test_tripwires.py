"""Tripwires: each alarm by hand-made numbers, and the ways in which one ends a run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.cluster import Roles
from strop.errors import RunStopped
from strop.io import verify_directory
from strop.record import Event
from strop.rollout import Example, Group, Outcome, Rollout, Turn, make_example
from strop.spec import TripwireSpec
from strop.tasks.task import TaskLimits, within_bounds
from strop.train.measure import measure_time
from strop.train.watch.tripwires import (
    find_alarms,
    find_format_drift,
    find_impossible,
    find_impossible_rollouts,
)
from tests.fixtures.builders import rollout_of, spoken_turn
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, Notes, learner_of, new_run, read_curve, tiny_spec

HEALTHY = {
    "zero_variance_frac": 0.5,
    "duplicate_frac": 0.1,
    "truncated_frac": 0.2,
    "failed_frac": 0.0,
    "drift_mean_nats": 0.001,
    "entropy_nats": 0.4,
    "num_signal_tokens": 50.0,
    "master_changed_frac": 0.99,
}


@pytest.mark.parametrize(
    ("metric", "value", "cause"),
    [
        ("zero_variance_frac", 0.96, "zero_variance"),
        ("duplicate_frac", 0.96, "duplicate_completions"),
        ("truncated_frac", 0.51, "truncation"),
        ("failed_frac", 0.11, "verifier_errors"),
        ("drift_mean_nats", 0.07, "logprob_drift"),
        ("entropy_nats", 0.004, "entropy_collapse"),
        ("master_changed_frac", 0.0, "vanishing_updates"),
        ("grad_norm", 0.0, "no_gradient"),
        ("runaway_frac", 0.31, "runaway"),
    ],
)
def test_each_alarm_names_its_number(metric: str, value: float, cause: str) -> None:
    (alarm,) = find_alarms(TripwireSpec(), 3, HEALTHY | {metric: value})
    assert (alarm.kind, alarm.step, alarm.cause) == ("tripwire", 3, cause)
    assert alarm.detail.startswith(f"{metric}={value:.4g}")


@pytest.mark.parametrize(("large", "small", "way"), [("sft", "rl", "lower"), ("rl", "sft", "raise")])
def test_opt_3_a_term_that_drowns_another_is_named(large: str, small: str, way: str) -> None:
    def alarms(large_norm: float, small_norm: float) -> list[Event]:
        return find_alarms(
            TripwireSpec(), 3, {f"grad_norm_{large}": large_norm, f"grad_norm_{small}": small_norm}
        )

    # 5 / 0.005 is ten times the bound; at the bound there is no alarm, nor where one says nothing at all.
    (alarm,) = alarms(5.0, 0.005)
    assert (alarm.cause, alarm.step, f"{way} sft.weight" in alarm.detail) == ("term_dominates", 3, True)
    assert alarms(5.0, 0.05) == alarms(5.0, 0.0) == []


@pytest.mark.parametrize(
    ("spec", "metrics"),
    [
        (TripwireSpec(), HEALTHY),
        (TripwireSpec(), {}),
        # At its bound.
        (TripwireSpec(), {"zero_variance_frac": 0.95, "truncated_frac": 0.5, "entropy_nats": 0.005}),
        (TripwireSpec(max_truncated_frac=None), {"truncated_frac": 1.0}),
        # Replies that are right may be alike.
        (TripwireSpec(), {"duplicate_frac": 1.0, "accuracy": 0.51}),
    ],
)
def test_what_is_healthy_absent_or_switched_off_raises_nothing(
    spec: TripwireSpec, metrics: dict[str, float]
) -> None:
    assert find_alarms(spec, 3, metrics) == []


def test_opt_4_an_alarm_may_end_the_run_and_its_checkpoint_stays(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    notes = Notes()

    class PaysAlikeLater(SpellTask):
        async def verify(self, example: Example, text: str) -> Outcome:
            is_late = len(notes.steps) >= 3
            return Outcome(parts={"spelled": 0.1}) if is_late else await super().verify(example, text)

    spec = tiny_spec(train={"steps": 6, "checkpoint_every": 2}, tripwires={"on_alarm": "stop"})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=PaysAlikeLater(), notes=notes)
    with pytest.raises(RunStopped) as caught:
        made.run()
    assert str(caught.value).startswith("step 4 raised zero_variance. Allowed: ")
    assert "the same command goes on from checkpoint step-000002" in str(caught.value)
    assert not made.run_dir.is_finished
    # Step 4 is on record for whoever looks, and its weights are not what a resume starts from.
    assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2, 3, 4]
    assert made.run_dir.checkpoint_steps() == [2]
    verify_directory(made.run_dir.checkpoint_path(2))


class FailsInTraining(SpellTask):
    """Judges every fourth reply of the steps; what becomes of others alternates, so no two fail alike."""

    def __init__(self, notes: Notes, *, num_judged: int) -> None:
        super().__init__()
        self.notes = notes
        self.num_judged = num_judged
        self.calls = itertools.count()

    async def verify(self, example: Example, text: str) -> Outcome:
        turn = next(self.calls) % 4 if self.notes.is_past_gate else 0
        if not self.notes.is_past_gate or turn < self.num_judged:
            return await super().verify(example, text)
        raise TypeError("no operand") if turn % 2 else KeyError("no field")


@pytest.mark.parametrize(
    ("num_judged", "sections", "said"),
    [
        # Of 12 rollouts 6 fail, 3 of each kind; or all, step after step.
        (
            2,
            {"tripwires": {"on_alarm": "stop", "max_failed_frac": 0.4}},
            "6 of 12 .*step 1 raised .*verifier",
        ),
        (0, {"train": {"steps": 6}}, "all 12 rollouts of step 3 .*; step 3 is number 3 in a row"),
    ],
)
def test_a_run_that_failures_end_leads_with_their_cause(
    tmp_path: Path, tiny_model_dir: Path, num_judged: int, sections: dict[str, Any], said: str
) -> None:
    notes = Notes()
    task = FailsInTraining(notes, num_judged=num_judged)
    made = Composition(tiny_spec(**sections), tiny_model_dir, new_run(tmp_path), task=task, notes=notes)
    with pytest.raises(RunStopped, match=f"^{said}") as caught:
        made.run()
    assert "failed: task, KeyError: 'no field' (test_tripwires.py:" in str(caught.value)
    assert notes.causes("rollout_lost") == ["KeyError", "TypeError"]


def break_gradient(roles: Roles) -> Roles:
    """Make the gradient of every step NaN, with healthy log-probabilities."""
    weight = learner_of(roles).model.head_weight

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")

    weight.register_hook(poison)  # type: ignore[no-untyped-call]
    return roles


def test_three_updates_that_are_not_finite_end_the_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"steps": 6, "checkpoint_every": 1})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path))
    before: dict[str, torch.Tensor] = {}

    def keep_and_break(roles: Roles) -> Roles:
        before.update({name: p.detach().clone() for name, p in learner_of(roles).model.named_parameters()})
        return break_gradient(roles)

    with pytest.raises(RunStopped, match=r"step 3 is number 3 in a row without an update"):
        made.run(keep_and_break)
    assert made.notes.causes("tripwire") == ["non_finite"] * 3
    assert all("loss" not in line for line in made.notes.steps)
    assert [line["policy_version"] for line in made.notes.steps] == [0, 0, 0]
    # The refused updates never reached the weights.
    curve = read_curve(made.run_dir.path)
    assert len(curve.metrics) == 3
    assert made.run_dir.checkpoint_steps() == [1, 2]


@pytest.mark.parametrize(
    ("now", "is_alarm"),
    [
        ({"accuracy": 0.7, "format_ok_frac": 0.012}, True),
        ({"accuracy": 0.7, "format_ok_frac": 0.29}, False),  # exactly half of it is left
        ({"accuracy": 0.5, "format_ok_frac": 0.012}, False),  # it got worse altogether; that shows
        ({"accuracy": 0.7}, False),
    ],
)
def test_lost_format_is_an_alarm_where_nothing_else_shows_it(now: dict[str, float], is_alarm: bool) -> None:
    alarms = find_format_drift(9, now, {"accuracy": 0.6, "format_ok_frac": 0.58})
    assert [alarm.cause for alarm in alarms] == ["format_drift"] * is_alarm
    assert find_format_drift(9, now, {}) == []


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


def test_log_7_durations_that_ran_beside_each_other_do_not_add_up() -> None:
    metrics = measure_time({"generate": 8.0, "verify": 7.0, "learn": 3.0}, 10.0, 500.0)
    (alarm,) = find_impossible(1, metrics)
    assert "the stages of the step add up to 18 s, and it took seconds_step=10" in alarm.detail
    (alarm,) = find_impossible(1, POSSIBLE | {"seconds_compute": 11.0})
    assert "seconds_compute=11 is longer than seconds_step=10" in alarm.detail
    # Two clocks that were read one after the other are not two that ran at once.
    assert find_impossible(1, POSSIBLE | {"seconds_step": 10.0 - 1e-4}) == []


LIMITS = TaskLimits(max_reply_tokens=8)


def rollout(number: int, parts: dict[str, float | None], logprob: float = -1.0) -> Rollout:
    reply = spoken_turn("7", [7], logprob=logprob)
    return rollout_of(
        make_example("toy", {"n": number}, "7"),
        (Turn(role="prompt", text="?", token_ids=np.array([1], dtype=np.int32)), reply),
        within_bounds(Outcome(parts=parts), LIMITS),
    )


def groups(*rollouts: Rollout) -> list[Group]:
    return [Group(example=one.example, rollouts=(one,)) for one in rollouts]


def test_a_token_that_is_likelier_than_certain_is_an_alarm() -> None:
    sure, odd = rollout(0, {"score": 1.0}, logprob=0.005), rollout(1, {"score": 0.0}, logprob=0.7)
    assert find_impossible_rollouts(2, groups(sure)) == []
    (alarm,) = find_impossible_rollouts(2, groups(sure, odd))
    assert (alarm.cause, alarm.example_ids) == ("impossible_value", (odd.example.example_id,))
    # e ** 0.7 = 2.014
    assert "1 of 2 rollouts hold a token of log-probability 0.7, a probability of 2.014" in alarm.detail
