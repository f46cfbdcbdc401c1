"""Collapses that were recorded are named and end a run; learning that looks like one from afar does not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.spec import RunSpec
from strop.tasks import Task
from strop.train.watch.trends import NUM_LOST, NUM_STOP, SIGNS
from strop.train.watch.tripwires import StepWatch
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import tiny_spec

Curve = Sequence[Mapping[str, float]]
RECORDED: dict[str, Curve] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "recorded_curves.json").read_text()
)
"""The steps of real runs. "one letter": a random model, paid for short replies; "fast": at
four times the rate. "any order": a random model
on reverse-text with `task.partial_marks = "any-order"`. "demo": recipes/arithmetic.toml, the real model."""


class OrderedTask(SpellTask):
    """Shows its examples in an order of its own, as a curriculum does."""

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
"""reverse-text as it was: known is how it began and ended; the steps between are drawn straight."""
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


def test_an_alarm_says_metric_bound_cause_and_what_to_do() -> None:
    watch = StepWatch(tiny_spec(), SpellTask(), None)
    found = [alarm for step, one in enumerate(REPORTED, 1) for alarm in watch.find_alarms(step, one, [])]
    last = {alarm.cause: alarm.detail for alarm in found}
    assert (
        "common_reply_frac=0.3287 from 0.03241, over the last 8 steps and the first 8"
        in last["reply_collapse"]
    )
    assert "accuracy went from 0.0% to 0.0%" in last["reply_collapse"]
    assert "above 0.25" in last["reply_collapse"]
    assert "Look at what the reward gives" in last["reply_collapse"]
    assert "more than tripwires.max_unearned_ratio=2 times as much" in last["unearned_reward"]
    assert "below 0.5 of it" in last["entropy_fall"]


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
