"""What ends a sandbox that nobody stops: leases, age, idleness, orphans; and what no clock may do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from strop.runtime.contract import FailureKind, Policy, StartRequest, State
from strop.runtime.service import LeaseCall, RuntimeCall, Service
from strop.runtime.session import Session
from tests.fixtures.scripted_host import ScriptedHost

POLICY = Policy()


@asynccontextmanager
async def service_of(policy: Policy = POLICY) -> AsyncIterator[Service]:
    """A service without HTTP in front."""
    service = Service(policy=policy, address="127.0.0.1")
    try:
        yield service
    finally:
        await service.close()


async def add_host(service: Service) -> ScriptedHost:
    host = ScriptedHost()
    service.add_host("n", host, host.facts())
    return host


async def begin(service: Service, name: str = "S1", *, owner: str = "ada") -> Session:
    await service.start(StartRequest(image="img", command=("a",), session_id=name), owner)
    return service.by_name[owner, name]


async def lease(service: Service, lease_s: float, *sessions: Session) -> list[str]:
    """Lease sandboxes of ada's, all for none; return their runtime ids."""
    names = [*(session.runtime_id for session in sessions), "unknown"] if sessions else None
    record = await service.lease(LeaseCall(lease_s=lease_s, runtime_ids=names), "ada")
    return list(record["renewed"])


def make_ready(*ready: Session) -> None:
    """Let sandboxes be ready, wherever they are."""
    for session in ready:
        session.enter(State.READY)


def age(session: Session, seconds: float) -> None:
    """Let everything about a sandbox be longer ago."""
    for name in ("begun_at", "asked_at", "lease_ends_at"):
        setattr(session, name, getattr(session, name) - seconds)
    session.gate.connections.last_used_at -= seconds


async def test_a_lease_that_is_not_renewed_ends_its_sandbox_and_no_other() -> None:
    async with service_of() as service:
        leased, free, foreign = (
            await begin(service),
            await begin(service, "S2"),
            await begin(service, "S1", owner="bob"),
        )
        make_ready(leased, free, foreign)
        assert await lease(service, 60.0, leased, foreign) == [leased.runtime_id]
        age(leased, 59.0)
        service.tick()
        assert leased.is_alive
        await lease(service, 60.0, leased)
        age(leased, 59.0)
        service.tick()
        assert leased.is_alive
        assert 0 < service.record(leased)["lease_expires_in_s"] <= 1.0
        age(leased, 2.0)
        age(free, 61.0)
        service.tick()
        assert (leased.state, leased.cause) == (State.STOPPED, "its lease was not renewed")
        assert free.is_alive
        assert foreign.is_alive
        assert service.record(leased)["lease_expires_in_s"] is None
        assert await lease(service, 30.0) == [free.runtime_id]


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (replace(POLICY, age_limit_s=100.0), "it reached the age of 100 s"),
        (replace(POLICY, idle_limit_s=100.0), "it was idle for 100 s"),
    ],
)
async def test_age_and_idleness_end_a_sandbox(policy: Policy, cause: str) -> None:
    async with service_of(policy) as service:
        session = await begin(service)
        make_ready(session)
        age(session, 99.0)
        service.tick()
        assert session.is_alive
        age(session, 2.0)
        service.tick()
        assert (session.state, session.cause) == (State.STOPPED, cause)


async def test_processors_may_be_promised_more_than_once_and_memory_not() -> None:
    async with service_of(replace(POLICY, cpu_factor=4.0)) as service:
        await add_host(service)
        assert service.nodes["n"].has == (32.0, float(1 << 50))


async def test_a_paused_sandbox_is_not_idle() -> None:
    async with service_of(replace(POLICY, idle_limit_s=100.0)) as service:
        session = await begin(service)
        make_ready(session)
        session.enter(State.PAUSED)
        age(session, 200.0)
        service.tick()
        assert session.is_alive
        session.enter(State.READY)
        service.tick()
        assert not session.is_alive


async def test_a_jump_of_the_clock_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service_of(replace(POLICY, age_limit_s=600.0)) as service:
        await add_host(service)
        session = await begin(service)
        await lease(service, 60.0)
        make_ready(session)
        now = time.time()
        for jump in (3600.0, -7200.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
            service.tick()
            assert session.is_alive
            assert service.nodes


async def test_a_bounded_number_of_ended_sandboxes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.runtime.service._MAX_ENDED", 5)
    async with service_of() as service:
        for index in range(12):
            session = await begin(service, f"S{index}")
            await service.stop(RuntimeCall(runtime_id=session.runtime_id), "ada")
        assert {name for _, name in service.by_name} == {f"S{index}" for index in range(7, 12)}
        assert len(service.by_runtime) == 5


async def test_a_sandbox_that_is_lost_frees_its_slot() -> None:
    async with service_of() as service:
        host = await add_host(service)
        session = await begin(service)
        await session.settled.wait()
        host.sandbox_of("S1").lose()
        assert session.living is not None
        await session.living
        assert session.clearing is not None
        await session.clearing
        assert (session.state, session.failure_kind) == (State.FAILED, FailureKind.INFRA_LOST)
        assert not service.nodes["n"].taken
        assert not host.sandboxes
