"""What judging costs, by hand: rules, programs, and judges that are models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strop.plan.estimate import estimate_time
from strop.plan.roles import RoleCounts
from strop.plan.rollouts import (
    Work,
    describe_judging,
    judge_s,
    list_judge_assumptions,
    list_shares,
)
from tests.plan.test_estimate import SIZE, make_spec, make_speeds, make_work

ROWS = {"name": "rows", "source": "x", "prompt": "{a}", "answer": "b"}
SERVED = {
    "name": "llm-judge",
    "source": "x",
    "judge_url": "https://judge.example/v1",
    "judge_model": "big",
    "judge_revision": "r1",
}
ONE = RoleCounts(num_learners=1, num_engines=1, num_workers=0, is_shared=True)


def work_of(task: dict[str, Any], **changes: Any) -> Work:
    return make_work(make_spec(task={"max_reply_tokens": 8, **task}), **changes)


@pytest.mark.parametrize(
    ("task", "name", "seconds"),
    [
        ({"name": "mbpp"}, "program_s", 0.036),
        ({**ROWS, "reward": ("exact", "python-tests")}, "program_s", 0.036),
        ({**ROWS, "reward": ("exact",)}, "verify_s", 0.0001),
        ({"name": "arithmetic"}, "verify_s", 0.0001),
        (SERVED, "judge_call_s", 5.0),
    ],
)
def test_programs_and_judges_take_longer_than_rules(task: dict[str, Any], name: str, seconds: float) -> None:
    spec = make_spec(task=task)
    assert {one.name: one.value for one in list_judge_assumptions(spec.task)}[name] == seconds


def test_programs_share_the_cores() -> None:
    two, eight = (work_of({"name": "mbpp"}, num_cores=count) for count in (2, 8))
    assert judge_s(two, make_speeds(), ONE, 100) == pytest.approx(100 * 0.036 / 2)
    assert judge_s(eight, make_speeds(), ONE, 100) == pytest.approx(100 * 0.036 / 8)
    (verify,) = (one for one in estimate_time(two, make_speeds()).step_parts if one.name == "verify")
    # 16 replies a step.
    assert verify.amount == pytest.approx(16 * 0.036 / 2)


def test_programs_that_run_into_their_limit_take_as_long() -> None:
    # 16 replies in 10 steps, 2 examples in 3 evaluations; a program may take 5 of its reply's 25 s.
    found = describe_judging(work_of({"name": "mbpp"}, num_cores=4), 25.0)
    assert found is not None
    num_samples = make_spec().eval.num_samples or 0
    assert (found.programs_per_step, found.programs_in_run) == (16, 160 + 6 * (1 + num_samples))
    assert found.limit_step_s == pytest.approx(16 * 5.0 / 4)
    assert (found.calls_in_run, found.served, found.exceeded) == (0, (), ())
    assert describe_judging(work_of({"name": "arithmetic"}), None) is None


def test_a_served_judge_answers_so_many_at_once() -> None:
    work = work_of({**SERVED, "judge_concurrency": 4})
    assert judge_s(work, make_speeds(), ONE, 16) == pytest.approx(16 * 5.0 / 4)


def test_a_judges_tokens_and_calls_are_counted() -> None:
    work = replace(work_of({**SERVED, "max_judge_calls": 100}), num_evals=0)
    found = describe_judging(work, 65.0)
    assert found is not None
    assert (found.calls_per_step, found.calls_in_run) == (16, 160)
    # Rubric 200, prompt 5, reply three quarters of 8; an answer of 150.
    assert found.read_tokens_in_run == pytest.approx(160 * 211)
    assert found.written_tokens_in_run == 160 * 150
    assert found.served == ("big",)
    assert found.limit_step_s is None
    (said,) = found.exceeded
    assert "about 160 replies of the run are judged by big" in said
    assert "task.max_judge_calls=100" in said
    # One on this machine costs what this machine costs.
    here = describe_judging(work_of({**SERVED, "judge_url": "http://127.0.0.1:8000/v1"}), 65.0)
    assert here is not None
    assert here.served == ()
    enough = describe_judging(replace(work_of(SERVED), num_evals=0), 65.0)
    assert enough is not None
    assert enough.exceeded == ()


def test_a_judge_of_the_run_takes_what_its_size_takes() -> None:
    role = {**SERVED, "judge_url": "role", "judge_model": "org/judge", "judge_concurrency": 2}
    large = replace(SIZE, hidden_width=20, mlp_width=40, head_width=20)
    small, big = (work_of(role, frozen={"org/judge": size}) for size in (SIZE, large))
    seconds = judge_s(small, make_speeds(), ONE, 4)
    # 5e5 operations a second: 4 questions of 211 tokens, answers of 150 over contexts of 211 + 75.
    assert seconds == pytest.approx((2000 * 4 * 211 + 4000 * 600 + 40 * 600 * 286) / 5e5)
    assert judge_s(big, make_speeds(), ONE, 4) > 2 * seconds
    found = describe_judging(small, 65.0)
    assert found is not None
    assert found.served == ()


def test_parts_of_a_mixture_judge_their_share_and_those_of_a_blend_all() -> None:
    parts = {"a": {"name": "mbpp", "weight": 3.0}, "b": {"name": "arithmetic", "weight": 1.0}}
    mixed = make_spec(task={"name": "mixture", "parts": parts})
    assert [(one.name, share) for one, share in list_shares(mixed.task)] == [
        ("mbpp", 0.75),
        ("arithmetic", 0.25),
    ]
    seconds = judge_s(make_work(mixed), make_speeds(), ONE, 100)
    assert seconds == pytest.approx(75 * 0.036 / 2 + 25 * 0.0001)
    judge = {key: value for key, value in SERVED.items() if key != "source"} | {"weight": 0.3}
    blend = make_spec(task={"name": "blend", "data": "a", "parts": {"a": {"name": "arithmetic"}, "j": judge}})
    assert [share for _, share in list_shares(blend.task)] == [1.0, 1.0]
    assert judge_s(make_work(blend), make_speeds(), ONE, 16) == pytest.approx(16 * 5.0 / 8 + 16 * 0.0001)
