"""Each task of the research suite: its marks are right, its oracle reaches them, and cheats do not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from strop.environments.research.contract import (
    ArtefactRefused,
    Instance,
    Marks,
    Phase,
    load_function,
    play_with,
    profile_area,
)
from strop.environments.research.fixtrain import CLEAN, FAULTS
from strop.environments.research.suite import TASKS, make_instance

DATA = [name for name in TASKS if make_instance(name, 1).score is not None]
BASELINE_ERRORS = 5


def score_of(instance: Instance, artefact: bytes, phase: Phase = Phase.SEALED) -> float:
    if instance.score is not None:
        return instance.score(artefact, phase)
    assert instance.play is not None
    assert instance.function is not None
    return play_with(instance.play(phase), load_function(artefact, instance.function))


@pytest.mark.parametrize("name", TASKS)
def test_the_oracle_reaches_the_ceiling_and_the_starter_the_baseline(name: str) -> None:
    instance = make_instance(name, 1)
    marks = instance.marks
    sign = 1 if marks.is_higher_better else -1
    assert sign * marks.floor <= sign * marks.baseline < sign * marks.ceiling
    oracle = score_of(instance, instance.oracle)
    assert marks.share(oracle) >= 0.95
    assert not marks.is_alarming(oracle)
    try:
        starter = score_of(instance, instance.starter)
    except (ArithmeticError, ArtefactRefused):
        starter = 0.0  # a broken program may not even run
        assert name == "fixtrain"
    assert starter == pytest.approx(marks.baseline, abs=1e-3 + BASELINE_ERRORS * marks.standard_error)
    assert marks.normalise(oracle) > 0.75
    assert score_of(instance, instance.oracle, Phase.DEV) == pytest.approx(oracle, rel=0.2)


@pytest.mark.parametrize("name", TASKS)
def test_equal_seeds_make_equal_instances_and_others_do_not(name: str) -> None:
    first, again, other = (TASKS[name].make(seed) for seed in (3, 3, 4))
    assert (first.files, first.marks, first.statement, first.oracle) == (
        again.files,
        again.marks,
        again.statement,
        again.oracle,
    )
    assert score_of(first, first.oracle) == score_of(again, first.oracle)
    assert first.marks != other.marks
    assert first.files != other.files or name == "sat3"  # whose formulas are all hidden


@pytest.mark.parametrize("name", TASKS)
def test_nothing_hidden_stands_in_the_workspace(name: str) -> None:
    instance = make_instance(name, 1)
    for text in (instance.oracle, instance.leaked):
        assert text not in instance.files.values()
    assert not {"truth", "answer", "sealed", "label"} & {
        word for path in instance.files for word in path.split(".")
    }
    assert len(instance.oracle) < 1 << 20


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize(
    "artefact",
    [
        b"",
        b'{"score": 1.0}',
        b"RESULT 1.0\nscore: 1.0",
        b"\x80\x00\xff",
        b"nan\n" * 50,
        b"id,prediction\n0,nan\n",
        b"[]",
    ],
)
def test_data_in_another_form_is_refused(name: str, artefact: bytes) -> None:
    with pytest.raises(ArtefactRefused):
        score_of(make_instance(name, 1), artefact)


@pytest.mark.parametrize("name", DATA)
def test_cheats_with_data_earn_no_more_than_the_floor(name: str) -> None:
    instance = make_instance(name, 1)
    assert instance.cheats
    for cheat, artefact in instance.cheats.items():
        try:
            found = score_of(instance, artefact)
        except ArtefactRefused:
            continue
        marks = instance.marks
        sign = 1 if marks.is_higher_better else -1
        assert sign * (found - marks.floor) <= 3 * marks.standard_error + 1e-9, cheat


@pytest.mark.parametrize("name", TASKS)
def test_who_has_seen_the_hidden_draws_raises_the_alarm(name: str) -> None:
    marks = make_instance(name, 1).marks
    leaked = make_instance(name, 1).leaked
    if leaked is not None:
        assert marks.is_alarming(score_of(make_instance(name, 1), leaked))
    beyond = 1.0 if marks.is_higher_better else -1.0
    limit = marks.ceiling if marks.limit is None else marks.limit
    assert marks.is_alarming(limit + beyond * (6 * marks.standard_error + 0.01))
    assert marks.is_alarming(float("nan"))
    assert marks.is_alarming(beyond * float("inf"))


def test_a_reward_is_the_way_from_starter_to_ceiling() -> None:
    higher = Marks(floor=0.0, baseline=1.0, ceiling=3.0, ceiling_kind="exact")
    assert [higher.normalise(score) for score in (3.0, 2.0, 1.0, 0.0, -9.0, 4.0, None)] == [
        1,
        0.5,
        0,
        -0.5,
        -1,
        1,
        -0.5,
    ]
    lower = Marks(floor=4.0, baseline=2.0, ceiling=1.0, ceiling_kind="exact", is_higher_better=False)
    assert [lower.normalise(score) for score in (1.0, 1.5, 2.0, 3.0, None)] == [1, 0.5, 0, -1, -1]
    assert [lower.share(score) for score in (1.0, 2.5, 4.0, 9.0, None)] == [1, 0.5, 0, 0, 0]


def test_the_area_under_the_profile_is_that_of_its_definition() -> None:
    shares = [0.0, 0.05, 0.1, 0.3, 0.8, 1.0]
    folds = [10 ** ((step + 0.5) / 2000) for step in range(2000)]
    within = [sum(share > 0 and 1 / share <= fold for share in shares) / len(shares) for fold in folds]
    assert sum(map(profile_area, shares)) / len(shares) == pytest.approx(sum(within) / len(folds), abs=1e-3)


def test_each_fault_of_the_training_program_can_be_planted_and_hurts() -> None:
    instance = make_instance("fixtrain", 1)
    clean = score_of(instance, CLEAN.encode())
    for fault in FAULTS:
        assert CLEAN.count(fault.was) == 1
        broken = CLEAN.replace(fault.was, fault.became)
        try:
            found = score_of(instance, broken.encode())
        except (ArithmeticError, ValueError):
            continue
        assert found < clean - 0.01, fault


@pytest.mark.parametrize("name", ["mcar", "cpole"])
def test_the_simulator_of_the_workspace_is_the_machine_that_is_judged(name: str) -> None:
    instance = make_instance(name, 1)
    assert instance.function is not None
    episode = load_function(instance.files["simulator.py"], "episode")
    act = load_function(instance.starter, instance.function)
    rng = random.Random(0)
    mean = sum(episode(act, rng) for _ in range(200)) / 200
    assert mean == pytest.approx(instance.marks.baseline, rel=0.15)


FITTING: dict[str, list[float]] = {"mcar": [-1, 10**5, 0.5], "sat3": [-1]}
"""Odd answers that are answers all the same."""
ODD: list[Any] = [
    None,
    True,
    -1,
    10**5,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "1",
    "",
    [],
    [[]],
    {},
    {"score": 1.0},
]


@pytest.mark.parametrize("name", [name for name in TASKS if name not in DATA])
def test_odd_answers_are_refused_or_scored_and_never_break_the_judge(name: str) -> None:
    instance = make_instance(name, 1)
    assert instance.play is not None
    for odd in ODD:
        play = instance.play(Phase.DEV)
        calls = next(play)
        try:
            play.send([odd] * len(calls))
        except (ArtefactRefused, StopIteration):
            continue
        assert odd in FITTING[name]


@pytest.mark.parametrize("name", DATA)
def test_odd_data_is_refused_or_scored_and_never_breaks_the_judge(name: str) -> None:
    instance = make_instance(name, 1)
    rng = random.Random(name)
    parts = [
        b"\n",
        b",",
        b"[",
        b"]",
        b"9" * 5000,
        b"1e999",
        b"-",
        b"nan",
        b"null",
        b"true",
        b'"',
        b"\xff",
        b"1_0",
        b"",
    ]
    refused = 0
    for _ in range(60):
        artefact = instance.oracle
        for _ in range(rng.randint(1, 3)):
            begin = rng.randrange(len(artefact))
            artefact = artefact[:begin] + rng.choice(parts) + artefact[begin + rng.randint(0, 5) :]
        try:
            assert not instance.marks.is_alarming(score_of(instance, artefact))
        except ArtefactRefused:
            refused += 1
    assert refused > 20
    with pytest.raises(ArtefactRefused):
        score_of(instance, b"id,prediction\n" + b"9" * 5000 + b",1\n" * 4000)
