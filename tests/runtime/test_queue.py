from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strop.runtime.contract import FailureKind, Slot, StartRequest, State
from strop.runtime.gate import Gate
from strop.runtime.queue import DRAIN_BEFORE_END_S, Node, explain_impossible, place
from strop.runtime.session import BEGINNING, WORDS, Session
from tests.fixtures.scripted_host import Script, ScriptedHost

GIB = 1 << 30


GATE = Gate("127.0.0.1")
asyncio.run(GATE.close())


def slot_of(cpus: float = 1, gib: int = 1) -> Slot:
    return Slot(cpus=cpus, memory_bytes=gib * GIB, disk_bytes=GIB, processes=64)


def session_of(name: str, *, owner: str = "ada", cpus: float = 1, gib: int = 1) -> Session:
    request = StartRequest(image="img", command=("a",), session_id=name)
    slot = slot_of(cpus, gib)
    return Session(
        runtime_id=name, session_id=name, owner=owner, key="k", request=request, slot=slot, gate=GATE
    )


def node_of(name: str, cpus: float, gib: int, **more: Any) -> Node:
    host = ScriptedHost(cpus=cpus, memory_bytes=gib * GIB, script=Script(**more))
    return Node(node_id=name, host=host, facts=host.facts())


class Queue:
    """Sessions that wait for a slot on some nodes."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes
        self.waiting: list[Session] = []

    def add(self, *names: str, **more: Any) -> None:
        self.waiting += [session_of(name, **more) for name in names]

    def take(self) -> list[tuple[str, str]]:
        """Give slots; return the names of the sessions and of their nodes."""
        placed = list(place(self.waiting, self.nodes))
        self.waiting = [one for one in self.waiting if one not in [session for session, _ in placed]]
        return [(session.runtime_id, node.node_id) for session, node in placed]

    def release(self, name: str) -> None:
        for node in self.nodes:
            node.taken = {one for one in node.taken if one.runtime_id != name}


def test_first_come_first_served() -> None:
    queue = Queue(node_of("n", 2, 8))
    queue.add(*"abcd")
    assert queue.take() == [("a", "n"), ("b", "n")]
    assert queue.take() == []
    queue.release("a")
    assert queue.take() == [("c", "n")]
    assert Queue().take() == []


def test_owners_share_and_one_with_many_requests_does_not_push_out_another() -> None:
    queue = Queue(node_of("n", 4, 8))
    queue.add(*(f"a{index}" for index in range(6)), owner="ada")
    queue.add(*(f"b{index}" for index in range(6)), owner="bob")
    assert [name for name, _ in queue.take()] == ["a0", "b0", "a1", "b1"]


def test_who_has_most_of_a_scarce_resource_comes_later() -> None:
    queue = Queue(node_of("n", 8, 16))
    queue.add("a0", owner="ada", gib=9)
    queue.add("b0", "b1", owner="bob")
    queue.add("a1", owner="ada")
    assert [name for name, _ in queue.take()] == ["a0", "b0", "b1", "a1"]


def test_the_node_that_is_left_with_the_least_takes_a_request() -> None:
    queue = Queue(node_of("large", 16, 64), node_of("small", 2, 4))
    queue.add("a", "b", gib=3)
    assert queue.take() == [("a", "small"), ("b", "large")]


def test_files_take_memory_too() -> None:
    queue = Queue(node_of("n", 8, 7))
    queue.add(*"abcde")
    assert [name for name, _ in queue.take()] == ["a", "b", "c"]


def test_what_can_never_fit_is_told_in_numbers() -> None:
    small = [node_of("n", 2, 4)]
    assert explain_impossible(slot_of(gib=3), small) == ""
    told = explain_impossible(slot_of(gib=8), small)
    assert "takes 1 cpus and 9.66368e+09 memory_bytes" in told
    assert "n has 2 cpus and 4.29497e+09 memory_bytes" in told
    assert "takes 3 cpus" in explain_impossible(slot_of(cpus=3), small)
    # Nodes may still come.
    assert explain_impossible(slot_of(gib=8), []) == ""
    both = [node_of("wide", 8, 1), node_of("tall", 1, 8)]
    assert {"wide", "tall"} <= set(explain_impossible(slot_of(cpus=4, gib=4), both).split())


def test_a_node_that_ends_soon_takes_nothing() -> None:
    for ends_in_s, taken in ((DRAIN_BEFORE_END_S - 1.0, []), (DRAIN_BEFORE_END_S + 60.0, [("a", "n")])):
        queue = Queue(node_of("n", 2, 4, ends_in_s=ends_in_s))
        queue.add("a")
        assert queue.take() == taken


def test_a_large_request_lets_other_owners_pass_and_not_its_own() -> None:
    queue = Queue(node_of("n", 4, 8))
    queue.add("holder", owner="cyd", cpus=2)
    queue.take()
    queue.add("large", cpus=4)
    queue.add("small")
    queue.add("b0", owner="bob")
    assert queue.take() == [("b0", "n")]


@pytest.mark.parametrize("factor", [0.1, 0.3])
def test_fractions_of_processors_add_up(factor: float) -> None:
    queue = Queue(node_of("n", 3 * factor, 64))
    queue.add(*"abcd", cpus=factor)
    taken = queue.take()
    assert len(taken) == 3
    for name, _ in taken:
        queue.release(name)
    assert len(queue.take()) == 1


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
    ("stopped", "not found"): [(State.STOPPED, None)],
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
        gate=GATE,
        _output=b"the log",
    )
    session.enter(state)
    return session


@pytest.mark.parametrize("words", TABLE)
def test_each_state_and_failure_has_one_pair_of_words_and_no_null(words: tuple[str, str]) -> None:
    for state, kind in TABLE[words]:
        record = session_in(state, kind).record(place="", expires_in_s=1.0)
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
