"""Alarms that compare a step with the steps before it, by hand-made numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.spec import RunSpec, TripwireSpec
from strop.tasks import Task
from strop.train.observer import EvalSummary
from strop.train.watch.trends import NUM_LOST, NUM_STOP, SIGNS, History, find_divergence, find_trend_alarms
from strop.train.watch.tripwires import StepWatch
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import tiny_spec

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


# Collapses that were recorded are named and end a run; learning that looks like one from afar does not.

Curve = Sequence[Mapping[str, float]]
RECORDED: dict[str, Curve] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "recorded_curves.json").read_text()
)
"""The steps of real runs. "one letter": a random model, paid for short replies; "fast": at
four times the rate. "any order": a random model that is to write texts backwards, paid for
letters in any order. "demo": recipes/arithmetic.toml, the real model."""


class OrderedTask(SpellTask):
    """Shows its examples in an order of its own, as a curriculum does."""

    is_ordered = True

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        return range(12)


def watch_curve(
    curve: Curve, spec: RunSpec | None = None, task: Task | None = None
) -> tuple[list[list[str]], int | None]:
    """Return the alarms of each step, and after which step the run would have ended."""
    watch = StepWatch(spec or tiny_spec(), task or SpellTask(), None)
    alarms: list[list[str]] = []
    ended = None
    for step, metrics in enumerate(curve, start=1):
        alarms.append([alarm.cause for alarm in watch.find_alarms(step, metrics, [])])
        if ended is None and watch.collapse.reason is not None:
            ended = step
    return alarms, ended


def straight(num_steps: int, **ends: tuple[float, float]) -> list[dict[str, float]]:
    """Return steps whose metrics go from one value to another in equal parts."""
    return [
        {name: low + (high - low) * step / (num_steps - 1) for name, (low, high) in ends.items()}
        for step in range(num_steps)
    ]


REPORTED = straight(
    40,
    reward_mean=(0.11, 0.27),
    unearned_reward_mean=(0.11, 0.27),
    accuracy=(0.0, 0.0),
    reply_tokens_mean=(22.5, 2.6),
    entropy_nats=(4.0, 1.65),
    common_reply_frac=(0.0, 13 / 36),
)
"""Texts backwards, paid for letters in any order: known are the ends; the steps between are straight."""
GRADED_CLIMB = straight(
    60,
    reward_mean=(0.02, 0.6),
    unearned_reward_mean=(0.02, 0.6),
    accuracy=(0.0, 0.0),
    reply_tokens_mean=(30.0, 6.0),
    entropy_nats=(4.0, 0.5),
    common_reply_frac=(0.0, 0.02),
    prompt_dependence=(0.4, 0.9),
)
"""Partial work that gets better, to each prompt its own, before anything is right."""
CONCISE = straight(
    60,
    reward_mean=(0.6, 0.9),
    unearned_reward_mean=(0.02, 0.02),
    accuracy=(0.9, 0.9),
    reply_tokens_mean=(500.0, 90.0),
    entropy_nats=(0.9, 0.2),
    common_reply_frac=(0.0, 0.0),
    prompt_dependence=(0.9, 0.9),
)
"""Right as often as before, in a fifth of the tokens, which is paid for."""
MULTIPLE_CHOICE = straight(
    60,
    reward_mean=(0.3, 0.6),
    unearned_reward_mean=(0.0, 0.0),
    accuracy=(0.3, 0.6),
    reply_tokens_mean=(40.0, 2.0),
    entropy_nats=(2.0, 0.2),
    common_reply_frac=(0.05, 0.3),
    prompt_dependence=(0.5, 0.1),
)
"""Learns to answer with a letter: wrong ones are alike, and right ones become more frequent."""


@pytest.mark.parametrize(
    ("curve", "causes"),
    [
        (RECORDED["one letter"], {"reply_collapse", "entropy_fall", "length_collapse"}),
        (RECORDED["one letter, fast"], {"reply_collapse", "entropy_fall"}),
        (RECORDED["any order"], {"unearned_reward", "entropy_fall"}),
        (REPORTED, {"unearned_reward", "reply_collapse", "entropy_fall", "length_collapse"}),
    ],
    ids=["one letter", "fast", "any order", "reported"],
)
def test_a_recorded_collapse_is_named_and_ends_the_run(curve: Curve, causes: set[str]) -> None:
    alarms, ended = watch_curve(curve)
    found = [set(of_step) & SIGNS for of_step in alarms]
    assert causes <= set().union(*found)
    # Not before there is something to compare with, and not in the last steps only.
    assert ended is not None
    assert 16 < ended < len(curve)
    for of_step in found[ended - NUM_STOP : ended]:
        assert len(of_step) > 1


@pytest.mark.parametrize(
    ("curve", "causes"),
    [(GRADED_CLIMB, {"unearned_reward"}), (CONCISE, set()), (MULTIPLE_CHOICE, set())],
    ids=["graded", "concise", "choice"],
)
def test_learning_that_looks_like_a_collapse_from_afar_goes_on(curve: Curve, causes: set[str]) -> None:
    alarms, ended = watch_curve(curve)
    assert set().union(*map(set, alarms)) == causes
    assert ended is None


def test_the_demo_raises_nothing() -> None:
    """Replies shrink from rambling of 28 tokens to 10, entropy falls, and accuracy rises: as it should be."""
    demo = RECORDED["demo"]
    assert len(demo) == 40
    assert demo[-1]["reply_tokens_mean"] < 0.5 * demo[0]["reply_tokens_mean"]
    spec = tiny_spec(tripwires={"max_truncated_frac": 0.9})
    assert watch_curve(demo, spec) == ([[]] * 40, None)


def test_a_reward_that_grades_partial_work_is_not_watched_where_so_is_said() -> None:
    alarms, _ = watch_curve(REPORTED, tiny_spec(tripwires={"max_unearned_ratio": None}))
    assert "unearned_reward" not in {one for of_step in alarms for one in of_step}


def test_a_policy_that_stops_reading_its_prompts_is_a_collapse_whatever_it_says() -> None:
    """No two replies are one text, and any of them could answer any prompt."""
    numbers = {"reward_mean": (0.2, 0.5), "unearned_reward_mean": (0.2, 0.5), "accuracy": (0.0, 0.0)}
    deaf = straight(60, **numbers, entropy_nats=(3.0, 1.0), prompt_dependence=(0.6, 0.0))
    alarms, ended = watch_curve(deaf)
    assert {"reply_collapse", "entropy_fall", "unearned_reward"} <= set().union(*map(set, alarms))
    assert ended is not None
    # At chance from the beginning, as with a random model, and still saying many things: no sign.
    alarms, ended = watch_curve(
        straight(60, **numbers, entropy_nats=(3.0, 2.0), prompt_dependence=(0.0, 0.0))
    )
    assert (set().union(*map(set, alarms)), ended) == ({"unearned_reward"}, None)


LOST = [
    *straight(30, reward_mean=(0.5, 0.88), accuracy=(0.5, 0.88)),
    *[{"reward_mean": 0.09, "accuracy": 0.09}] * 30,
]


def test_a_reward_that_is_lost_for_good_ends_the_run() -> None:
    """Incident: the training reward went from .88 to .09 by step 208, unattended."""
    alarms, ended = watch_curve(LOST)
    assert alarms[37] == ["reward_collapse"]  # the eighth step of 0.09
    assert ended == 38 + NUM_LOST - 1


def test_where_examples_come_in_an_order_a_lost_reward_alone_ends_nothing() -> None:
    """A curriculum gets harder; what it is paid then says nothing about what was learned."""
    alarms, ended = watch_curve(LOST, task=OrderedTask())
    assert alarms[-1] == ["reward_collapse"]
    assert ended is None


def test_steps_that_are_right_more_often_than_not_are_no_collapse() -> None:
    """One question, answered with one reply, always: nothing is left to learn, and nothing is lost."""
    solved = [
        {"accuracy": 1.0, "reward_mean": 1.0, "entropy_nats": 0.001, "duplicate_frac": 0.99}
        for _ in range(30)
    ]
    alarms, ended = watch_curve(solved)
    assert alarms[-1] == ["entropy_collapse"]
    assert ended is None
    lost = [{**step, "accuracy": 0.0, "reward_mean": 0.0} for step in solved]
    assert watch_curve(lost)[1] == NUM_STOP


def test_one_odd_step_begins_the_count_anew() -> None:
    bad = {"accuracy": 0.0, "reward_mean": 0.0, "entropy_nats": 0.001, "duplicate_frac": 0.99}
    calm = {**bad, "entropy_nats": 1.0}
    assert watch_curve([*[bad] * 4, calm, *[bad] * 4])[1] is None
    assert watch_curve([*[bad] * 4, calm, *[bad] * 5])[1] == 10


def test_a_resumed_run_counts_on_from_its_record() -> None:
    whole = StepWatch(tiny_spec(), SpellTask(), None)
    for step, metrics in enumerate(REPORTED, start=1):
        whole.find_alarms(step, metrics, [])
    resumed = StepWatch(tiny_spec(), SpellTask(), None)
    resumed.recall([{"step": step, **metrics} for step, metrics in enumerate(REPORTED[:-1], start=1)])
    resumed.find_alarms(len(REPORTED), REPORTED[-1], [])
    assert resumed.collapse.reason == whole.collapse.reason is not None


def test_what_a_teacher_makes_surer_is_no_alarm() -> None:
    """Distillation pays nobody: its entropy falls to the teacher's, and rewards are looked at only."""
    teacher: dict[str, Any] = {"source": "model", "model": "org/teacher"}
    spec = tiny_spec(train={"terms": "distill"}, teacher=teacher)
    falls = straight(60, reward_mean=(0.2, 0.1), accuracy=(0.0, 0.0), entropy_nats=(3.0, 0.5))
    assert set().union(*map(set, watch_curve(falls, spec)[0])) == set()
    assert set().union(*map(set, watch_curve(falls)[0])) == {"entropy_fall"}


def test_a_task_without_right_and_wrong_is_watched_by_its_replies_alone() -> None:
    """A judge's taste: nobody is right, and one reply to everybody that it likes is a collapse."""
    liked = straight(60, reward_mean=(0.2, 0.6), common_reply_frac=(0.0, 0.6), entropy_nats=(3.0, 0.4))
    alarms, ended = watch_curve(liked)
    assert set().union(*map(set, alarms)) == {"reply_collapse", "entropy_fall"}
    assert ended is not None
    various = straight(60, reward_mean=(0.2, 0.6), common_reply_frac=(0.0, 0.0), entropy_nats=(3.0, 0.4))
    assert watch_curve(various) == ([[]] * 60, None)


def test_every_alarm_is_on_the_page() -> None:
    root = Path(__file__).parents[2]
    source = "".join(path.read_text() for path in (root / "src" / "strop" / "train").rglob("*.py"))
    named = re.findall(r'cause="(\w+)"|TRIPWIRE, "(\w+)"|return "(\w+)", \(', source)
    causes = {cause for names in named for cause in names if cause} | SIGNS - {"tripwire"}
    causes |= {"ceiling", "impossible_value", "length_explosion"}
    assert len(causes) > 25
    page = (root / "docs" / "alarms.md").read_text()
    assert {cause for cause in causes - {"tripwire", "notice"} if f"`{cause}`" not in page} == set()
