from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.launch.exit_codes import combine, describe_exit, from_wait

MILD = (0, 75, 76)
codes = st.one_of(st.sampled_from(MILD), st.integers(0, 255), st.none())


@pytest.mark.parametrize(
    ("given_codes", "one"),
    [
        ([0], 0),
        ([0, 0], 0),
        ([0, 75], 75),
        ([75, 76, 0], 76),
        # srun would return 75 and hide the failure.
        ([75, 1], 1),
        ([76, 2], 2),
        # A node that was killed because another one had failed is no cause.
        ([137, 3, 143], 3),
        ([143, 0], 143),
        # No code is a failure, and no nodes are none that succeeded.
        ([None, 0], 1),
        ([None, 75], 1),
        ([], 1),
    ],
)
def test_many_codes_as_one_by_hand(given_codes: list[int | None], one: int) -> None:
    assert combine(given_codes) == one


@given(st.lists(codes, min_size=1))
def test_any_failure_beats_the_mild_codes(some: list[int | None]) -> None:
    failures = {1 if code is None else code for code in some} - set(MILD)
    one = combine(some)
    if failures:
        assert one in failures
    else:
        assert one == max((code for code in some if code is not None), key=MILD.index)


@given(st.lists(codes, min_size=1), st.randoms())
def test_the_order_of_nodes_makes_no_difference_between_success_and_failure(
    some: list[int | None], random: object
) -> None:
    mixed = list(some)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert (combine(mixed) in MILD) == (combine(some) in MILD)


def test_a_death_by_a_signal_is_said_as_a_shell_says_it() -> None:
    assert [from_wait(-15), from_wait(-9), from_wait(0), from_wait(75)] == [143, 137, 0, 75]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0: done"),
        (2, "exit code 2: wrong usage or settings"),
        (75, "exit code 75: interrupted, its state saved"),
        (76, "exit code 76: refused by a check before it began"),
        (143, "killed by SIGTERM"),
        (255, "exit code 255"),
        (9, "exit code 9"),
    ],
)
def test_what_a_code_means(code: int, words: str) -> None:
    assert describe_exit(code) == words
