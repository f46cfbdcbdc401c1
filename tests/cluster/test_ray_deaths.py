"""Of several engines all but the last may end; any other role that ends, ends the run."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.cluster.ray import deaths
from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.roles import RoleFacts, RoleStart, RunningRole
from strop.cluster.ray.workers import RolloutWorkers
from strop.errors import EngineLost, LearnerError
from strop.spec.layout import RoleKind, RoleSlot
from tests.fixtures.ray_traces import needs_ray

pytestmark = needs_ray


class Desk:
    """A watch over roles that end when a test says so."""

    def __init__(self, tmp_path: Path, *names: str) -> None:
        self.lost: list[str] = []
        self.watch = DeathWatch()
        self.watch.on_lost = lambda name, message: self.lost.append(name)
        self.endings: dict[str, asyncio.Future[str]] = {}
        for name in names:
            self.endings[name] = asyncio.get_running_loop().create_future()
            kind, index = name.split("-")
            slot = RoleSlot(kind=RoleKind(kind), index=int(index), node=int(index))
            start = RoleStart(slot=slot, log_path=tmp_path / "log")
            role = RunningRole(start=start, facts=RoleFacts(pid=1, host="here"))
            self.watch.follow(name, role.ended(self.endings[name]), is_replica=slot.kind is RoleKind.ENGINE)

    async def end(self, name: str) -> None:
        self.endings[name].set_result("signal 9")
        assert f"role {name} " in await self.told(name)

    async def told(self, name: str = "") -> str:
        """Return what ends a call to a role, or to any."""
        with pytest.raises(EngineLost) as caught:
            await asyncio.wait_for(self.watch.guard(asyncio.sleep(600), name), 60.0)
        return str(caught.value)

    async def goes_on(self, name: str = "") -> bool:
        return await self.watch.guard(asyncio.sleep(0.1, True), name)


async def test_the_run_outlives_all_engines_but_the_last(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "learner-0", "engine-0", "engine-1")
    await desk.end("engine-0")
    assert desk.lost == ["engine-0"]
    assert await desk.goes_on()
    assert "engine-0 on node 0 (here), process 1, ended: signal 9" in await desk.told("engine-0")
    assert await desk.goes_on("engine-1")
    await desk.end("engine-1")
    assert desk.lost == ["engine-0"]
    assert "role engine-1" in await desk.told()
    desk.watch.stop()


class Worker:
    """An actor that answers with its own name."""

    def __init__(self, name: str, out: set[str] | None = None) -> None:
        self.name, self._out = name, out
        self.run_group = self

    def remote(self, plans: Sequence[Any]) -> Awaitable[bytes]:
        async def answer() -> bytes:
            await asyncio.sleep(0)
            if self._out is not None:
                self._out.add(self.name)
            return pickle.dumps((self.name, [], []))

        return answer()


async def test_a_group_whose_engine_leaves_meanwhile_is_attempted_by_another_worker(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "learner-0")
    out: set[str] = set()
    actors = [Worker("a", out), Worker("b")]
    workers = RolloutWorkers(actors, ["a", "b"], lambda name: name not in out, desk.watch)
    found: list[object] = [await workers.run_group([]) for _ in range(2)]
    assert found == ["b", "b"]
    out.add("b")
    with pytest.raises(EngineLost, match="none of 2 rollout workers has an engine that serves"):
        await workers.run_group([])
    desk.watch.stop()


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (KeyError("no such tensor"), EngineLost, "a role failed: KeyError: 'no such tensor'. Allowed: "),
        (LearnerError("the loss is NaN"), LearnerError, "the loss is NaN"),
        (EngineLost("vLLM's own process died"), EngineLost, "vLLM's own process died"),
    ],
)
def test_a_role_that_raised_is_told_by_its_error_with_the_traceback_from_there(
    cause: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayTaskError

    # What the role says itself is told at once.
    monkeypatch.setattr(deaths, "VERDICT_LIMIT_S", 0.01 if isinstance(cause, KeyError) else 600.0)

    async def call() -> None:
        raise RayTaskError("step", "in step: raise", cause, proctitle="role", pid=1, ip="10.0.0.1")

    async def act() -> None:
        await asyncio.wait_for(DeathWatch().guard(call()), 60.0)

    with pytest.raises(kind) as caught:
        asyncio.run(act())
    assert str(caught.value).startswith(said)
    assert "in step: raise" in "".join(traceback.format_exception(caught.value))
