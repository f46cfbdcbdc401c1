from __future__ import annotations

import itertools

import pytest

from strop.runtime.contract import FailureKind, Slot, StartRequest, State
from strop.runtime.session import BEGINNING, Session
from strop.runtime.wire import WORDS, make_record, words_of

# What the protocol says of each state of a server, and which states and failures here mean it.
TABLE: dict[tuple[str, str], list[tuple[State, FailureKind | None]]] = {
    ("starting", "pending"): [(State.QUEUED, None), (State.IMAGE, None)],
    ("starting", "running"): [(State.STARTING, None), (State.RESUMING, None)],
    ("running", "ready"): [(State.READY, None)],
    ("paused", "not found"): [(State.PAUSED, None)],
    ("error", "crashloopbackoff"): [(State.FAILED, FailureKind.TASK_OOM)],
    ("error", "failed"): [
        (State.FAILED, FailureKind.IMAGE_ERROR),
        (State.FAILED, FailureKind.AGENT_ERROR),
        (State.FAILED, FailureKind.CAPACITY),
    ],
    ("error", "unknown"): [(State.FAILED, FailureKind.INFRA_LOST)],
    ("stopped", "not found"): [(State.STOPPED, kind) for kind in (None, *FailureKind)],
}


def session_in(state: State, kind: FailureKind | None = None) -> Session:
    session = Session(
        runtime_id="r",
        session_id="s",
        owner="ada",
        key="k",
        request=StartRequest(image="img", command=("a",), session_id="s"),
        slot=Slot(cpus=1, memory_bytes=1, disk_bytes=1, processes=1),
        failure_kind=kind,
        cause="the cause" if kind else "",
        log_tail="the log",
        url="http://127.0.0.1:7",
    )
    session.enter(state)
    return session


def test_each_state_and_failure_has_exactly_one_pair_of_words() -> None:
    pairs = {state: words for words, states in TABLE.items() for state in states}
    assert {state: words_of(*state) for state in pairs} == pairs
    assert set(WORDS) == {pair for pair in pairs if pair[0] is not State.STOPPED}
    assert {state for state in State if words_of(state, FailureKind.CAPACITY)[0] == "starting"} == BEGINNING


@pytest.mark.parametrize("state", State)
def test_a_record_has_no_null_where_a_client_would_fail_on_it(state: State) -> None:
    kinds: list[FailureKind | None] = [*FailureKind] if state is State.FAILED else [None]
    for kind in kinds:
        record = make_record(session_in(state, kind), place=None, expires_in_s=None)
        never_null = ("runtime_id", "session_id", "url", "session_api_key", *("status", "pod_status"))
        assert all(isinstance(record[name], str) for name in never_null)
        assert record["restart_count"] == 0
        assert all(record[name] == record[name].lower() for name in ("status", "pod_status"))
        assert record["failure_kind"] == (kind.value if kind else None)
        if kind is not None:
            assert record["pod_logs"] == f"[{kind.value}] the cause\nthe log"


def test_no_two_failures_read_alike() -> None:
    logs = [
        make_record(session_in(State.FAILED, kind), place=None, expires_in_s=None)["pod_logs"]
        for kind in FailureKind
    ]
    assert all(one != other for one, other in itertools.combinations(logs, 2))
