"""What ends a sandbox that nobody stops: leases, age, idleness, orphans; and what no clock may do."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from strop.runtime.contract import FailureKind, NodeReply, NodeReport, SandboxReport, StartRequest, State
from strop.runtime.journal import Journal
from strop.runtime.keys import open_keys
from strop.runtime.nodes import NodeClient
from strop.runtime.placement import Placement
from strop.runtime.queue import Admission
from strop.runtime.registry import Registry
from strop.runtime.session import Session
from strop.runtime.sessions import Policy, Sessions
from tests.fixtures.scripted_node import slots

POLICY = Policy(settle_s=0.0)


@asynccontextmanager
async def sessions_of(tmp_path: Path, policy: Policy = POLICY) -> AsyncIterator[Sessions]:
    """Sessions without HTTP in front, and without nodes behind."""
    registry = Registry(Journal.open(tmp_path / "journal"), lambda _facts: None)
    client = NodeClient(open_keys(tmp_path / "keys", "nodes"))
    placement = Placement(registry, client, host="127.0.0.1", admission=Admission())
    try:
        yield Sessions(policy, registry, placement)
    finally:
        await placement.close()
        await client.close()
        await registry.close()


async def begin(sessions: Sessions, name: str = "S1", *, owner: str = "ada") -> Session:
    return await sessions.start(owner, StartRequest(image="img", command=("a",), session_id=name))


def make_ready(sessions: Sessions, *ready: Session) -> None:
    """Report sandboxes as ready, from a node that is not asked for anything."""
    for session in ready:
        session.is_probed = True
        session.node_url = "http://127.0.0.1:9"
    report = NodeReport(
        node_id="n",
        host="h",
        url="http://127.0.0.1:9",
        boot_id="b",
        pid=1,
        capacity=slots(8),
        backends=(),
        sandboxes=tuple(
            SandboxReport(runtime_id=one.runtime_id, state=State.READY, last_used_s=1e6) for one in ready
        ),
    )
    sessions.placement.report(report)
    assert all(one.state is State.READY for one in ready)


def age(session: Session, seconds: float) -> None:
    """Let everything about a sandbox be longer ago."""
    for name in ("begun_at", "asked_at", "used_at", "renewed_at"):
        if getattr(session, name):
            setattr(session, name, getattr(session, name) - seconds)


async def test_a_lease_that_is_not_renewed_ends_its_sandbox_and_no_other(tmp_path: Path) -> None:
    async with sessions_of(tmp_path) as sessions:
        leased, free, foreign = (
            await begin(sessions),
            await begin(sessions, "S2"),
            await begin(sessions, "S1", owner="bob"),
        )
        make_ready(sessions, leased, free, foreign)
        assert sessions.renew("ada", [leased.runtime_id, foreign.runtime_id, "unknown"], 60.0) == [leased]
        age(leased, 59.0)
        sessions.tick()
        assert leased.is_alive
        sessions.renew("ada", [leased.runtime_id], 60.0)
        age(leased, 59.0)
        sessions.tick()
        assert leased.is_alive
        expires_in_s = sessions.expires_in_s(leased)
        assert expires_in_s is not None
        assert 0 < expires_in_s <= 1.0
        age(leased, 2.0)
        age(free, 61.0)
        sessions.tick()
        assert (leased.state, leased.cause) == (State.STOPPED, "its lease of 60 s was not renewed")
        assert free.is_alive
        assert foreign.is_alive
        assert sessions.expires_in_s(leased) is None
        assert set(sessions.renew("ada", None, 30.0)) == {free}


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (replace(POLICY, age_limit_s=100.0), "it reached the age of 100 s"),
        (replace(POLICY, idle_limit_s=100.0), "it was idle for 100 s"),
    ],
)
async def test_age_and_idleness_end_a_sandbox(tmp_path: Path, policy: Policy, cause: str) -> None:
    async with sessions_of(tmp_path, policy) as sessions:
        session = await begin(sessions)
        sessions.find("ada", "S1")
        make_ready(sessions, session)
        age(session, 99.0)
        sessions.placement._relays[session.runtime_id].last_used_at -= 99.0
        sessions.tick()
        assert session.is_alive
        age(session, 2.0)
        sessions.placement._relays[session.runtime_id].last_used_at -= 2.0
        sessions.tick()
        assert (session.state, session.cause) == (State.STOPPED, cause)


async def test_a_start_that_nobody_asks_about_again_is_an_orphan(tmp_path: Path) -> None:
    async with sessions_of(tmp_path, replace(POLICY, orphan_limit_s=100.0)) as sessions:
        lost, known = await begin(sessions), await begin(sessions, "S2")
        sessions.find("ada", "S2")
        for session in (lost, known):
            age(session, 101.0)
        sessions.tick()
        assert lost.state is State.STOPPED
        assert "nobody asked for it" in lost.cause
        assert known.is_alive


async def test_a_jump_of_the_clock_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sessions_of(tmp_path, replace(POLICY, age_limit_s=600.0)) as sessions:
        session = await begin(sessions)
        sessions.renew("ada", None, 60.0)
        make_ready(sessions, session)
        now = time.time()
        for jump in (3600.0, -7200.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
            sessions.tick()
            assert session.is_alive
            assert sessions.placement.nodes


async def test_a_jump_of_the_clock_makes_nothing_older_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sessions_of(tmp_path) as before:
        session = await begin(before)
        age(session, 60.0)
        await before.registry.write(session)
    now = time.time()
    for jump in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        line = json.loads(json.dumps(session.to_json()))
        assert Session.from_json(line).begun_at == session.begun_at
        # On a machine that was started anew only its clock tells, and an age is never below nothing.
        again = Session.from_json(line | {"boot_id": "another"})
        assert time.monotonic() - again.begun_at == pytest.approx(max(0.0, jump), abs=5.0)


async def test_a_controller_that_stood_still_does_not_take_its_nodes_for_silent(tmp_path: Path) -> None:
    async with sessions_of(tmp_path) as sessions:
        session = await begin(sessions)
        make_ready(sessions, session)
        placement = sessions.placement
        placement.nodes["n"].seen_at -= 60.0
        placement._checked_at -= 60.0
        sessions.tick()
        assert session.is_alive
        placement.nodes["n"].seen_at -= 60.0
        sessions.tick()
        assert placement.nodes == {}
        assert session.cause == "node n on h was silent for 10 s"


async def test_a_report_of_what_changed_says_nothing_of_the_others(tmp_path: Path) -> None:
    async with sessions_of(tmp_path) as sessions:
        session, placement = await begin(sessions), sessions.placement
        make_ready(sessions, session)
        part = placement.nodes["n"].report.model_copy(update={"sandboxes": (), "has_all": False})
        for _ in range(3):
            assert placement.report(part) == NodeReply()
        assert session.state is State.READY
        # From a node that a controller does not know, it would be taken for all that the node has.
        stranger = part.model_copy(update={"node_id": "m"})
        assert placement.report(stranger) == NodeReply(wants_all=True)
        assert set(placement.nodes) == {"n"}
        for _ in range(2):
            placement.report(part.model_copy(update={"has_all": True}))
        assert (session.state, session.cause) == (State.FAILED, "node n does not have it any more")


async def test_a_report_that_was_overtaken_changes_nothing(tmp_path: Path) -> None:
    async with sessions_of(tmp_path) as sessions:
        session = await begin(sessions)
        make_ready(sessions, session)
        report = sessions.placement.nodes["n"].report
        new, old = (
            report.sandboxes[0].model_copy(update={"version": version, "state": state})
            for version, state in ((3, State.PAUSED), (2, State.READY))
        )
        sessions.placement.report(report.model_copy(update={"sandboxes": (new,)}))
        sessions.placement.report(report.model_copy(update={"sandboxes": (old,)}))
        assert session.state is State.PAUSED


async def test_ended_sandboxes_are_kept_for_a_bounded_time_and_number(tmp_path: Path) -> None:
    async with sessions_of(tmp_path, replace(POLICY, max_ended=5, keep_ended_s=100.0)) as sessions:
        for index in range(12):
            session = await begin(sessions, f"S{index}")
            await sessions.stop("ada", session.runtime_id)
        sessions.tick()
        registry = sessions.registry
        assert {name for _, name in registry.by_name} == {f"S{index}" for index in range(7, 12)}
        assert len(registry.by_runtime) == len(registry.journal.read()) == 5
        assert len(sessions.placement._relays) == 0
        for session in registry.by_runtime.values():
            session.ended_at -= 101.0
        sessions.tick()
        assert not registry.by_name
        assert not registry.by_runtime
        assert registry.journal.read() == []


async def test_a_stop_that_only_the_node_wanted_is_a_loss(tmp_path: Path) -> None:
    async with sessions_of(tmp_path) as sessions:
        session = await begin(sessions)
        make_ready(sessions, session)
        report = sessions.placement.nodes["n"].report
        over = report.sandboxes[0].model_copy(update={"state": State.STOPPED, "cause": "the node ends"})
        sessions.placement.report(report.model_copy(update={"sandboxes": (over,)}))
        assert (session.state, session.failure_kind) == (State.FAILED, FailureKind.INFRA_LOST)
        assert session.cause == "the node ends"


async def test_what_its_node_has_forgotten_when_a_controller_comes_back_is_lost(tmp_path: Path) -> None:
    async with sessions_of(tmp_path) as before:
        session = await begin(before)
        make_ready(before, session)
        await before.registry.write(session)
        report = before.placement.nodes["n"].report
    async with sessions_of(tmp_path) as after:
        await after.restore()
        (session,) = after.registry.alive.values()
        assert (session.node_id, session.state) == ("n", State.READY)
        for _ in range(2):
            after.placement.report(report.model_copy(update={"sandboxes": ()}))
        assert session.failure_kind is FailureKind.INFRA_LOST
        assert not after.placement.admission.rooms["n"].taken
