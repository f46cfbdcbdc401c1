"""Names of training jobs: legal, neutral, unique."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.launch.sagemaker.limits import check_value
from strop.launch.sagemaker.places import (
    base_name,
    find_revealing,
    require_name,
    run_key,
    suffixed_name,
    trial_name,
)

NOON = 1_795_262_400.0  # 2026-11-21 12:00:00 UTC.


@pytest.mark.parametrize("prefix", ["", "-a", "a-", "a.b", "a_b", "a/b", "a b", "ä", "a" * 48, "a\n"])
def test_a_prefix_that_begins_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a training job"):
        base_name(prefix, NOON)


@pytest.mark.parametrize("name", ["qwen3-1.7B-gsm8k", "a" * 64, "a" + "-" * 100 + "b", "a_b", ""])
def test_a_name_that_the_service_refuses_is_refused_here(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\({len(name)} characters\)"):
        require_name(name)


@given(
    prefix=st.from_regex(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,46}", fullmatch=True).filter(lambda p: len(p) <= 47),
    index=st.integers(0, 999),
    home=st.text(),
)
def test_every_name_that_is_made_is_legal(prefix: str, index: int, home: str) -> None:
    base = base_name(prefix, NOON)
    trial = trial_name(base, index, 1000)
    names = [base, trial, suffixed_name(base, home), suffixed_name(trial, home)]
    assert [check_value(name, "TrainingJobName", "name") for name in names] == [[], [], [], []]
    assert len(set(names)) == 4


def test_trials_of_the_longest_prefix_differ() -> None:
    base = base_name("p" * 47, NOON)
    # 63 characters: the prefix is cut to make room for '-007', not the time.
    assert len(base) == 63
    assert trial_name(base, 7, 8) == "p" * 43 + "-20261121-120000-007"
    assert trial_name(base, 0, 1) == base


def test_a_suffix_belongs_to_the_home() -> None:
    assert suffixed_name("a-20261121-120000", "/runs/x") == suffixed_name("a-20261121-120000", "/runs/x")
    assert suffixed_name("a-20261121-120000", "/runs/x") != suffixed_name("a-20261121-120000", "/runs/y")


def test_the_key_of_a_run_says_nothing_and_stays() -> None:
    key = run_key("qwen3-1.7B", "/runs/qwen3-1.7B-20261121-120000")
    assert key == run_key("qwen3-1.7B", "/elsewhere/qwen3-1.7B-20261121-120000/")
    assert len(key) == 13
    assert "qwen" not in key


def test_texts_that_say_what_is_run_are_named() -> None:
    found = find_revealing({"name_prefix": "my-Qwen3-job", "tags.team": "a"}, ["qwen3", "job", "gsm8k"])
    assert found == ["name_prefix='my-Qwen3-job' contains 'qwen3': everybody who may list jobs reads it"]
