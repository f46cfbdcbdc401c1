"""Rows read as columns tell what the whole rollouts tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import CorruptRecord, StoreError
from strop.record import rollouts as rollouts_module
from strop.record.rollouts import StoredRollout, read_rollouts, write_trained
from strop.record.rows import RolloutRow, find_rows, list_rows, read_row
from strop.rollout import FailureOwner, Outcome, Rollout, Turn, make_example
from tests.record.test_rollouts import comparable, make_rollout, rollouts

NAME = "rollouts/step-000001.parquet"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\x00\r\n" + "long " * 200_000
READS: Sequence[Callable[[bytes], object]] = (
    lambda data: list_rows(data, NAME),
    lambda data: find_rows(data, NAME, "a"),
    lambda data: read_row(data, NAME, 0),
)


def to_bytes(written: Sequence[Rollout] | Sequence[StoredRollout]) -> bytes:
    stored = [one if isinstance(one, StoredRollout) else StoredRollout(rollout=one) for one in written]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.parquet"
        write_trained(path, stored)
        return path.read_bytes()


def read_back(data: bytes) -> list[Rollout]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.parquet"
        path.write_bytes(data)
        return read_rollouts(path)


def expected_row(index: int, rollout: Rollout) -> RolloutRow:
    outcome, reply = rollout.outcome, rollout.reply
    failure = outcome.failure
    return RolloutRow(
        index=index,
        task=rollout.example.task,
        example_id=rollout.example.example_id,
        sample_index=rollout.sample_index,
        reward=outcome.reward,
        is_correct=outcome.is_correct,
        format_ok=outcome.format_ok,
        truncated=outcome.truncated,
        timed_out=outcome.timed_out,
        failure=None if failure is None else f"{failure.owner.value}: {failure.kind}",
        num_sampled_tokens=rollout.num_sampled_tokens,
        num_turns=len(rollout.turns),
        status=None,
        staleness=None,
        prompt=rollout.turns[0].text[:200] if rollout.turns else "",
        prompt_end=rollout.turns[0].text[-200:] if rollout.turns else "",
        reply="" if reply is None else reply.text[:200],
    )


def with_turns(*texts: str) -> Rollout:
    turns = [
        Turn(
            role="assistant" if place % 2 else "prompt",
            text=text,
            token_ids=np.arange(3, dtype=np.int32),
            logprobs=np.zeros(3, dtype=np.float32) if place % 2 else None,
        )
        for place, text in enumerate(texts)
    ]
    return replace(make_rollout(), turns=tuple(turns))


@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts, max_size=4))
def test_rows_tell_what_the_rollouts_tell(given_rollouts: list[Rollout]) -> None:
    data = to_bytes(given_rollouts)
    assert list_rows(data, NAME) == [expected_row(*one) for one in enumerate(given_rollouts)]
    for index, rollout in enumerate(given_rollouts):
        found = read_row(data, NAME, index)
        assert comparable(found.rollout) == comparable(rollout)
        assert found.advantages == (None,) * len(rollout.turns)
        assert (found.status, found.staleness) == (None, None)


def test_a_failed_rollout_and_one_of_many_turns_are_listed() -> None:
    lost = Outcome.lost(FailureOwner.INFRA, "timeout", "no answer")
    written = [
        replace(make_rollout(), outcome=lost, turns=()),
        with_turns("question", "first reply", "and then?", "last reply", "told and not answered"),
    ]
    first, second = list_rows(to_bytes(written), NAME)
    assert (first.failure, first.reward, first.num_turns, first.prompt) == ("infra: timeout", None, 0, "")
    assert (second.num_turns, second.prompt, second.reply) == (5, "question", "last reply")
    assert second.num_sampled_tokens == 6


def test_a_text_is_found_in_prompts_turns_and_answers_ignoring_case() -> None:
    answer = replace(make_rollout(), outcome=Outcome(parts={"correct": 1.0}, extracted="Groß 42"))
    written = [make_rollout(), with_turns("", "", "hidden a.b", "x"), answer, with_turns("acb", "ÄRGER")]
    data = to_bytes(written)
    assert find_rows(data, NAME, "what IS") == [0, 2]
    assert find_rows(data, NAME, "HIDDEN") == [1]
    assert find_rows(data, NAME, "a.b") == [1]
    assert find_rows(data, NAME, "groß") == [2]
    assert find_rows(data, NAME, "ärger") == [3]
    assert find_rows(data, NAME, "nowhere") == []
    assert find_rows(data, NAME, "") == [0, 1, 2, 3]
    assert find_rows(to_bytes([]), NAME, "a") == []


def test_hostile_text_is_cut_and_found_as_text() -> None:
    written = [replace(with_turns(HOSTILE, HOSTILE), example=make_example(HOSTILE, {}, HOSTILE))]
    data = to_bytes(written)
    (row,) = list_rows(data, NAME)
    assert row.prompt == row.reply == HOSTILE[:200]
    assert find_rows(data, NAME, HOSTILE.upper()) == [0]
    assert find_rows(data, NAME, "</SCRIPT>") == find_rows(data, NAME, "\u202e\x00") == [0]
    assert comparable(read_row(data, NAME, 0).rollout) == comparable(written[0])


def test_a_text_that_no_rollout_can_hold_is_not_found() -> None:
    assert find_rows(to_bytes([make_rollout()]), NAME, "\ud800") == []


@pytest.mark.parametrize("index", [-1, 1])
def test_a_row_that_is_not_there_is_refused(index: int) -> None:
    data = to_bytes([make_rollout()])
    with pytest.raises(StoreError, match=rf"{NAME} has no row {index}"):
        read_row(data, NAME, index)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1]])
def test_damaged_bytes_are_refused_by_name(
    read: Callable[[bytes], object], damage: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(CorruptRecord, match=f"{NAME} does not hold rollouts"):
        read(damage(to_bytes([make_rollout(), make_rollout()])))


def test_what_training_made_of_rollouts_is_read_back() -> None:
    worth = np.array([0.5, -0.25, 0.0], dtype=np.float32)
    written = [
        StoredRollout(
            rollout=with_turns("question", "reply", "more", "last"),
            advantages=(None, worth, None, -worth),
            status="trained",
            staleness=2,
        ),
        StoredRollout(rollout=with_turns("question", "reply"), status="skipped", staleness=0),
        StoredRollout(rollout=make_rollout()),
    ]
    data = to_bytes(written)
    assert [(row.status, row.staleness) for row in list_rows(data, NAME)] == [
        ("trained", 2),
        ("skipped", 0),
        (None, None),
    ]
    found = read_row(data, NAME, 0)
    assert [None if one is None else one.tolist() for one in found.advantages] == [
        None,
        worth.tolist(),
        None,
        (-worth).tolist(),
    ]
    assert (found.status, found.staleness) == ("trained", 2)
    assert comparable(found.rollout) == comparable(written[0].rollout)
    assert read_row(data, NAME, 1).advantages == (None, None)
    assert [comparable(one) for one in read_back(data)] == [comparable(one.rollout) for one in written]


def test_the_page_for_users_names_every_column() -> None:
    text = (Path(__file__).parents[2] / "docs" / "view.md").read_text()
    table = text.split("Columns of a file of rollouts:")[1].split("\nAdvantages are")[0]
    named = set(re.findall(r"`(\w+)`", table))
    turn = rollouts_module.SCHEMA.field("turns").type.value_type
    failure = rollouts_module.SCHEMA.field("failure").type
    columns = {*rollouts_module.SCHEMA.names, *(field.name for field in (*turn, *failure))}
    assert columns <= named
