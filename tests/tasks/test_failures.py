"""What is kept of an exception, and what many failures are told as."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest

from strop.errors import EngineError
from strop.rollout import PROMPT_TOO_LONG, Failure, FailureOwner, Outcome
from strop.tasks.failures import catch_failure, describe_failure, find_causes, sum_up
from tests.fixtures.places import line_of


def catch(work: Callable[[], object], owner: FailureOwner = FailureOwner.TASK) -> Failure:
    with catch_failure(owner) as caught:
        work()
    assert caught.failure is not None
    return caught.failure


def break_down(said: str = "out of order") -> None:
    raise RuntimeError(said)


def read_json() -> None:
    json.loads("{")


def fail_to_generate() -> None:
    try:
        break_down()
    except RuntimeError as error:
        raise EngineError("generation failed") from error


BROKEN = f"(test_failures.py:{line_of(break_down, 'raise')})"


def test_the_detail_is_the_traceback_and_ends_with_one_line_and_its_place() -> None:
    failure = catch(break_down)
    lines = failure.detail.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == f"RuntimeError: out of order {BROKEN}"
    assert failure.detail.count("out of order") == 1
    assert describe_failure(failure) == f"task, RuntimeError: out of order {BROKEN}"


def test_the_place_is_in_code_of_the_user_and_not_in_a_library() -> None:
    detail = catch(read_json).detail
    assert detail.endswith(f"(test_failures.py:{line_of(read_json, 'loads')})")
    # Also of an error whose traceback names its module.
    assert detail.count("JSONDecodeError: Expecting property name") == 1


def test_the_place_is_where_the_first_of_several_errors_was_raised() -> None:
    assert describe_failure(catch(fail_to_generate)) == f"task, EngineError: generation failed {BROKEN}"


def test_an_error_that_was_told_by_another_process_keeps_its_own_place() -> None:
    error = EngineError("generation failed: RuntimeError: no such operator (prepacked.py:64)")
    assert describe_failure(catch(lambda: (_ for _ in ()).throw(error))) == (
        "task, EngineError: generation failed: RuntimeError: no such operator (prepacked.py:64)"
    )


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", f"RuntimeError {BROKEN}"),
        ("first\nsecond", f"RuntimeError: first second {BROKEN}"),
        ("a" * 2000 + "z" * 2000, f"RuntimeError: {'a' * 400} ... {'z' * 400} {BROKEN}"),
    ],
)
def test_an_odd_message_is_one_bounded_line_and_leaves_the_frames(said: str, line: str) -> None:
    failure = catch(lambda: break_down(said))
    assert failure.detail.splitlines()[-1] == line
    assert "in break_down" in failure.detail
    assert len(failure.detail) <= 4000
    assert describe_failure(failure) == f"task, {line}"


def test_failures_are_told_apart_by_place_and_summed_up_the_commonest_first() -> None:
    late = Failure(owner=FailureOwner.TASK, kind="verifier_timeout", detail="no verdict after 5 s")
    broken = [catch(partial(break_down, f"tensor {n}"), FailureOwner.ENGINE) for n in range(3)]
    causes = find_causes(Outcome(parts={}, failure=one) for one in (late, *broken))
    assert [(cause.failure, cause.num) for cause in causes] == [(broken[0], 3), (late, 1)]
    first = f"engine, RuntimeError: tensor 0 {BROKEN}"
    assert sum_up(causes, 8) == (
        f"4 of 8 rollouts failed: {first} (3 times; 1 otherwise: 1 of task, verifier_timeout)"
    )
    assert sum_up(causes[:1], 3) == f"all 3 rollouts failed: {first}"


def test_a_prompt_that_is_too_long_did_not_fail() -> None:
    lost = Outcome.lost(FailureOwner.ENGINE, "abort")
    too_long = Outcome.lost(FailureOwner.TASK, PROMPT_TOO_LONG)
    causes = find_causes([too_long, lost, Outcome(parts={"x": 1.0})])
    assert [cause.failure for cause in causes] == [lost.failure]
