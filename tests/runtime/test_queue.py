from __future__ import annotations

import asyncio
import socket
import time

import pytest

from strop.runtime.contract import FailureKind, SandboxReport, Slot, StartRequest, State
from strop.runtime.gate import Gate
from strop.runtime.queue import DRAIN_BEFORE_END_S, Admission
from strop.runtime.session import BEGINNING, WORDS, Session

GIB = 1 << 30


async def _nowhere() -> socket.socket:
    raise ConnectionError


GATE = Gate(_nowhere, "127.0.0.1")
asyncio.run(GATE.close())


def slot_of(cpus: float = 1, gib: int = 1) -> Slot:
    return Slot(cpus=cpus, memory_bytes=gib * GIB, disk_bytes=GIB, processes=64)


def node_of(cpus: float, gib: int) -> Slot:
    return Slot(cpus=cpus, memory_bytes=gib * GIB, disk_bytes=100 * GIB, processes=100_000)


def session_of(name: str, *, owner: str = "ada", cpus: float = 1, gib: int = 1) -> Session:
    request = StartRequest(image="img", command=("a",), session_id=name)
    slot = slot_of(cpus, gib)
    return Session(
        runtime_id=name, session_id=name, owner=owner, key="k", request=request, slot=slot, gate=GATE
    )


def admission_of(cpu_factor: float = 1.0, **nodes: Slot) -> Admission:
    admission = Admission(cpu_factor=cpu_factor)
    for name, capacity in nodes.items():
        admission.add_room(name, capacity)
    return admission


def names_taken(admission: Admission) -> list[tuple[str, str]]:
    return [(session.runtime_id, node) for session, node in admission.take()]


def test_first_come_first_served_and_the_rest_wait_with_their_places() -> None:
    admission = admission_of(n=node_of(2, 8))
    sessions = [session_of(name) for name in "abcd"]
    for one in sessions:
        admission.add(one)
    assert names_taken(admission) == [("a", "n"), ("b", "n")]
    assert [admission.place_of(one) for one in sessions] == [0, 0, 1, 2]
    admission.release(sessions[0])
    admission.release(sessions[0])
    assert names_taken(admission) == [("c", "n")]
    admission.remove(sessions[3])
    admission.remove(sessions[3])
    assert len(admission) == 0


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
    assert "memory_bytes 4.29497e+09 of 9.66368e+09" in admission.explain_impossible(slot_of(gib=8))
    assert "cpus 2 of 3" in admission.explain_impossible(slot_of(cpus=3))
    # Nodes may still come.
    assert admission_of().explain_impossible(slot_of(gib=8)) == ""
    both = admission_of(wide=node_of(8, 1), tall=node_of(1, 8))
    assert {"wide", "tall"} <= set(both.explain_impossible(slot_of(cpus=4, gib=4)).split())


def test_a_node_that_ends_soon_takes_nothing_and_a_dropped_one_gives_its_sessions_back() -> None:
    admission = admission_of(n=node_of(2, 4))
    first, second = session_of("a"), session_of("b")
    admission.add(first)
    assert names_taken(admission) == [("a", "n")]
    admission.rooms["n"].ends_at = time.monotonic() + DRAIN_BEFORE_END_S - 1.0
    admission.add(second)
    assert names_taken(admission) == []
    assert admission.drop_room("n") == [first]
    assert len(admission) == 1


def test_a_large_request_lets_other_owners_pass_and_not_its_own() -> None:
    admission = admission_of(n=node_of(4, 8))
    admission.add(session_of("holder", owner="cyd", cpus=2))
    admission.take()
    for session in (session_of("large", cpus=4), session_of("small"), session_of("b0", owner="bob")):
        admission.add(session)
    assert names_taken(admission) == [("b0", "n")]


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


# What the protocol says of each state of a server, and which states and failures here mean it.
TABLE: dict[tuple[str, str], list[tuple[State, FailureKind | None]]] = {
    ("starting", "pending"): [(State.QUEUED, None), (State.IMAGE, None)],
    ("starting", "running"): [(State.STARTING, None)],
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
        newest=SandboxReport(runtime_id="r", state=state, log_tail="the log"),
        gate=GATE,
    )
    session.enter(state)
    return session


@pytest.mark.parametrize("words", TABLE)
def test_each_state_and_failure_has_one_pair_of_words_and_no_null(words: tuple[str, str]) -> None:
    for state, kind in TABLE[words]:
        record = session_in(state, kind).record(place="", expires_in_s=None)
        assert (record["status"], record["pod_status"]) == words
        # A client would fail on it.
        assert all(isinstance(record[name], str) for name in ("runtime_id", "url", "session_api_key"))
        assert record["restart_count"] == 0
        if state is State.FAILED and kind is not None:
            assert (record["failure_kind"], record["pod_logs"]) == (kind, f"[{kind}] the cause\nthe log")


def test_no_state_and_no_failure_is_without_words() -> None:
    assert {state for state, _ in WORDS} == set(State)
    assert {kind for state, kind in WORDS if state is State.FAILED} == set(FailureKind)
    assert {state for (state, _), words in WORDS.items() if words[0] == "starting"} == BEGINNING
