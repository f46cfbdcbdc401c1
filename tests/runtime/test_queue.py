from __future__ import annotations

import pytest

from strop.runtime.contract import FailureKind, Slot, StartRequest, State
from strop.runtime.queue import PATIENCE_S, Admission
from strop.runtime.session import BEGINNING, WORDS, Session, words_of

GIB = 1 << 30


def slot_of(cpus: float = 1, gib: int = 1) -> Slot:
    return Slot(cpus=cpus, memory_bytes=gib * GIB, disk_bytes=GIB, processes=64)


def node_of(cpus: float, gib: int) -> Slot:
    return Slot(cpus=cpus, memory_bytes=gib * GIB, disk_bytes=100 * GIB, processes=100_000)


def session_of(name: str, *, owner: str = "ada", cpus: float = 1, gib: int = 1) -> Session:
    request = StartRequest(image="img", command=("a",), session_id=name)
    slot = slot_of(cpus, gib)
    return Session(runtime_id=name, session_id=name, owner=owner, key="k", request=request, slot=slot)


def admission_of(cpu_factor: float = 1.0, **nodes: Slot) -> Admission:
    admission = Admission(cpu_factor=cpu_factor)
    for name, capacity in nodes.items():
        admission.set_room(name, capacity, is_open=True)
    return admission


def names_taken(admission: Admission) -> list[tuple[str, str]]:
    return [(session.runtime_id, node) for session, node in admission.take()]


def test_first_come_first_served_and_the_rest_wait_with_their_places() -> None:
    admission = admission_of(n=node_of(2, 8))
    sessions = [session_of(name) for name in "abcd"]
    for one in sessions:
        admission.add(one)
    assert names_taken(admission) == [("a", "n"), ("b", "n")]
    assert [admission.place_of(one) for one in sessions] == [None, None, (1, 2), (2, 2)]
    admission.release(sessions[0])
    admission.release(sessions[0])
    assert names_taken(admission) == [("c", "n")]
    # One that comes back stands before those that came after it.
    admission.release(sessions[2])
    admission.add(sessions[2])
    assert admission.place_of(sessions[2]) == (1, 2)
    admission.remove(sessions[3])
    admission.remove(sessions[3])
    assert len(admission) == 1


def test_owners_share_and_one_with_many_requests_does_not_push_out_another() -> None:
    admission = admission_of(n=node_of(4, 8))
    for index in range(6):
        admission.add(session_of(f"a{index}", owner="ada"))
    for index in range(6):
        admission.add(session_of(f"b{index}", owner="bob"))
    assert [name for name, _ in names_taken(admission)] == ["a0", "b0", "a1", "b1"]


def test_the_node_that_is_left_with_the_least_takes_a_request() -> None:
    admission = admission_of(large=node_of(16, 64), small=node_of(2, 4))
    admission.add(session_of("a", gib=3))
    admission.add(session_of("b", gib=3))
    assert names_taken(admission) == [("a", "small"), ("b", "large")]


def test_processors_may_be_promised_more_than_once_and_memory_not() -> None:
    admission = admission_of(cpu_factor=4.0, n=node_of(1, 7))
    # Each takes a GiB of memory, and another for its files.
    for name in "abcde":
        admission.add(session_of(name))
    assert [name for name, _ in names_taken(admission)] == ["a", "b", "c"]


def test_what_can_never_fit_is_told_in_numbers() -> None:
    admission = admission_of(n=node_of(2, 4))
    assert admission.explain_impossible(slot_of(gib=3)) == ""
    assert "memory_bytes 9.66368e+09 of 4.29497e+09" in admission.explain_impossible(slot_of(gib=8))
    assert "cpus 3 of 2" in admission.explain_impossible(slot_of(cpus=3))
    # Nodes may still come.
    assert admission_of().explain_impossible(slot_of(gib=8)) == ""
    both = admission_of(wide=node_of(8, 1), tall=node_of(1, 8))
    assert "no single node" in both.explain_impossible(slot_of(cpus=4, gib=4))


def test_a_closed_node_takes_nothing_and_a_dropped_one_gives_its_sessions_back() -> None:
    admission = admission_of(n=node_of(2, 4))
    first, second = session_of("a"), session_of("b")
    admission.add(first)
    assert names_taken(admission) == [("a", "n")]
    admission.set_room("n", node_of(2, 4), is_open=False)
    admission.add(second)
    assert names_taken(admission) == []
    assert admission.drop_room("n") == [first]
    assert admission.drop_room("n") == []
    assert len(admission) == 1


def test_a_large_request_lets_others_pass_until_its_patience_ends() -> None:
    admission = admission_of(n=node_of(4, 8))
    holder = session_of("holder", owner="cyd", cpus=2)
    admission.add(holder)
    admission.take()
    large = session_of("large", cpus=4)
    admission.add(large)
    admission.add(session_of("b0", owner="bob"))
    assert names_taken(admission) == [("b0", "n")]
    large.begun_at -= PATIENCE_S + 1
    admission.add(session_of("b1", owner="bob"))
    # Bob has a share already, so the large one is asked first, and the node is kept for it.
    assert names_taken(admission) == []
    admission.set_room("m", node_of(2, 8), is_open=True)
    assert names_taken(admission) == [("b1", "m")]


@pytest.mark.parametrize("factor", [0.1, 0.3])
def test_fractions_of_processors_add_up(factor: float) -> None:
    admission = admission_of(n=node_of(3 * factor, 64))
    for name in "abcd":
        admission.add(session_of(name, cpus=factor))
    taken = admission.take()
    assert len(taken) == 3
    for session, _ in taken:
        admission.release(session)
    assert len(admission.take()) == 1


def test_a_node_that_ends_too_soon_takes_only_what_fits_nowhere_else() -> None:
    admission = Admission(min_left_s=300.0)
    # The fullest would take the next, if all lasted.
    for name, cpus, ends_in_s in (("soon", 1, 200.0), ("later", 1, 1000.0), ("standing", 2, None)):
        admission.set_room(name, node_of(cpus, 8), is_open=True, ends_in_s=ends_in_s)
    short = session_of("short")
    long = session_of("long")
    long.request = long.request.model_copy(update={"lifetime_s": 3600.0})
    more, last, none = session_of("more"), session_of("last"), session_of("none")
    for one in (long, short, more, last, none):
        admission.add(one)
    assert names_taken(admission) == [
        ("long", "standing"),
        ("short", "later"),
        ("more", "standing"),
        ("last", "soon"),
    ]
    assert admission.place_of(none) == (1, 1)
    # What a node says next counts.
    admission.set_room("soon", node_of(2, 8), is_open=True)
    assert names_taken(admission) == [("none", "soon")]


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


@pytest.mark.parametrize("words", TABLE)
def test_each_state_and_failure_has_one_pair_of_words_and_no_null(words: tuple[str, str]) -> None:
    for state, kind in TABLE[words]:
        record = session_in(state, kind).record(place=None, expires_in_s=None)
        assert (record["status"], record["pod_status"]) == words == words_of(state, kind)
        # A client would fail on it.
        assert all(isinstance(record[name], str) for name in ("runtime_id", "url", "session_api_key"))
        assert record["restart_count"] == 0
        if state is State.FAILED and kind is not None:
            assert (record["failure_kind"], record["pod_logs"]) == (kind, f"[{kind}] the cause\nthe log")


def test_no_state_and_no_failure_is_without_words() -> None:
    pairs = {pair for states in TABLE.values() for pair in states}
    assert set(WORDS) == {pair for pair in pairs if pair[0] is not State.STOPPED}
    assert {state for state in State if words_of(state, FailureKind.CAPACITY)[0] == "starting"} == BEGINNING
