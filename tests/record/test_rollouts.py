"""Rollouts survive Parquet bit by bit, plain tools can read them, and rows tell what whole rollouts tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import CorruptRecord, DataError, StoreError
from strop.record import rollouts as rollouts_module
from strop.record.rollouts import (
    RolloutRow,
    StoredRollout,
    find_rows,
    list_rows,
    read_examples,
    read_rollouts,
    read_row,
    write_rollouts,
)
from strop.rollout import (
    Failure,
    FailureOwner,
    FinishReason,
    Outcome,
    Rollout,
    Sampling,
    Turn,
    make_example,
)

texts = st.text(max_size=12)
numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
named_numbers = st.dictionaries(texts, numbers, max_size=3)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    logprobs = st.lists(st.floats(-100, 0, width=32), min_size=len(ids), max_size=len(ids))
    kept = draw(st.none() | logprobs)
    return Turn(
        role=draw(texts),
        text=draw(texts),
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=None if kept is None else np.array(kept, dtype=np.float32),
        policy_version=draw(st.none() | st.integers(0, 2**40)),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
    )


outcomes = st.builds(
    Outcome,
    parts=st.dictionaries(texts, st.none() | numbers, max_size=3),
    is_correct=st.none() | st.booleans(),
    format_ok=st.none() | st.booleans(),
    truncated=st.booleans(),
    timed_out=st.booleans(),
    extracted=st.none() | texts,
    isolation=st.none() | texts,
    metrics=named_numbers,
    turn_rewards=st.lists(numbers, max_size=3).map(tuple),
    failure=st.none()
    | st.builds(Failure, owner=st.sampled_from(FailureOwner), kind=texts, detail=st.text(max_size=30)),
)
rollouts = st.builds(
    Rollout,
    example=st.builds(
        make_example, texts, st.dictionaries(texts, json_values, max_size=3), st.none() | texts
    ),
    step=st.integers(0, 2**40),
    sample_index=st.integers(0, 1000),
    turns=st.lists(turns(), max_size=4).map(tuple),
    outcome=outcomes,
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 2),
        top_p=st.floats(0.1, 1),
        top_k=st.none() | st.integers(1, 10**6),
    ),
    seconds=named_numbers,
)


def comparable(rollout: Rollout) -> tuple[object, ...]:
    """Everything a rollout holds, as values that compare; arrays with type and bytes."""
    shown_turns = [
        (
            turn.role,
            turn.text,
            turn.token_ids.dtype,
            turn.token_ids.tobytes(),
            None if turn.logprobs is None else (turn.logprobs.dtype, turn.logprobs.tobytes()),
            turn.policy_version,
            turn.finish_reason,
        )
        for turn in rollout.turns
    ]
    return (
        rollout.example,
        rollout.step,
        rollout.sample_index,
        shown_turns,
        rollout.outcome,
        list(rollout.outcome.parts),
        rollout.sampling,
        rollout.seconds,
    )


def make_rollout(parts: dict[str, float | None] | None = None) -> Rollout:
    return Rollout(
        example=make_example("arithmetic", {"a": 1, "b": 2}, "3"),
        step=4,
        sample_index=1,
        turns=(
            Turn(role="user", text="What is 1 + 2?", token_ids=np.arange(5, dtype=np.int32)),
            Turn(
                role="assistant",
                text="3",
                token_ids=np.array([7, 2], dtype=np.int32),
                logprobs=np.array([-0.5, -0.25], dtype=np.float32),
                policy_version=4,
                finish_reason=FinishReason.EOS,
            ),
        ),
        outcome=Outcome(parts={"correct": 1.0, "format": 0.5} if parts is None else parts),
        sampling=Sampling(),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts, max_size=4))
def test_reading_gives_back_what_was_written(given_rollouts: list[Rollout]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "step-000001.parquet"
        write_rollouts(path, given_rollouts)
        found = read_rollouts(path)
    assert [comparable(rollout) for rollout in found] == [comparable(rollout) for rollout in given_rollouts]


def test_the_examples_of_rollouts_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    other = make_example("arithmetic", {"a": 3, "b": 4}, None)
    write_rollouts(path, [make_rollout(), make_rollout(), replace(make_rollout(), example=other)])
    assert read_examples(path) == [make_rollout().example, other]
    write_rollouts(path, [])
    assert read_examples(path) == []


def test_a_query_needs_no_strop(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    write_rollouts(path, [make_rollout(), make_rollout(parts={"correct": None})])
    table = pq.read_table(path)
    # 1.0 for the right answer and 0.5 for its form; an unscored part leaves no reward, not 0.
    assert table["reward"].to_pylist() == [1.5, None]
    assert table["reply_text"].to_pylist() == ["3", "3"]
    assert table["num_sampled_tokens"].to_pylist() == [2, 2]
    assert table["turns"].to_pylist()[0][1]["token_ids"] == [7, 2]
    assert dict(table["reward_parts"].to_pylist()[1]) == {"correct": None}


def test_the_size_of_a_step_is_bounded_by_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    write_rollouts(path, [make_rollout() for _ in range(64)])
    assert path.stat().st_size < 20_000
    assert len(read_rollouts(path)) == 64


def test_a_text_that_is_not_unicode_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be stored"):
        write_rollouts(tmp_path / "r.parquet", [make_rollout(parts={"\ud800": 1.0})])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="list the run's rollouts/"):
        read_rollouts(tmp_path / "step-000009.parquet")


def test_a_flipped_byte_of_a_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    write_rollouts(path, [make_rollout()])
    written = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    # The last byte of the column's pages, which is none of their headers.
    place = column.dictionary_page_offset + column.total_compressed_size - 1
    path.write_bytes(written[:place] + bytes([written[place] ^ 0xFF]) + written[place + 1 :])
    with pytest.raises(CorruptRecord):
        read_rollouts(path)


def _to_parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


NAME = "rollouts/step-000001.parquet"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\x00\r\n" + "long " * 200_000


def to_bytes(written: Sequence[Rollout] | Sequence[StoredRollout]) -> bytes:
    stored = [one if isinstance(one, StoredRollout) else StoredRollout(rollout=one) for one in written]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.parquet"
        write_rollouts(path, stored)
        return path.read_bytes()


def read_back(data: bytes) -> list[Rollout]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.parquet"
        path.write_bytes(data)
        return read_rollouts(path)


READS: Sequence[Callable[[bytes], object]] = (
    lambda data: list_rows(data, NAME),
    lambda data: find_rows(data, NAME, "a"),
    lambda data: read_row(data, NAME, 0),
    read_back,
)


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
    # Which no rollout can hold.
    assert find_rows(data, NAME, "\ud800") == []


def test_hostile_text_is_cut_and_found_as_text() -> None:
    written = [replace(with_turns(HOSTILE, HOSTILE), example=make_example(HOSTILE, {}, HOSTILE))]
    data = to_bytes(written)
    (row,) = list_rows(data, NAME)
    assert row.prompt == row.reply == HOSTILE[:200]
    assert find_rows(data, NAME, HOSTILE.upper()) == [0]
    assert find_rows(data, NAME, "</SCRIPT>") == find_rows(data, NAME, "\u202e\x00") == [0]
    assert comparable(read_row(data, NAME, 0).rollout) == comparable(written[0])


@pytest.mark.parametrize("index", [-1, 1])
def test_a_row_that_is_not_there_is_refused(index: int) -> None:
    data = to_bytes([make_rollout()])
    with pytest.raises(StoreError, match=rf"{NAME} has no row {index}"):
        read_row(data, NAME, index)


@pytest.mark.parametrize("read", READS)
def test_damaged_bytes_are_refused_by_name(read: Callable[[bytes], object]) -> None:
    data = to_bytes([make_rollout(), make_rollout()])
    for damaged in (b"", data[:-1], data[: len(data) // 2], _to_parquet(pa.table({"a": [1]}))):
        with pytest.raises(CorruptRecord, match=r"\.parquet does not hold rollouts"):
            read(damaged)


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
