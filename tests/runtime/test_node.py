"""A node agent under orders: states, addresses, its own workspace, ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.runtime.contract import FailureKind, NodeReply, State
from strop.runtime.making import Maker, MakeSettings
from strop.runtime.node import Node, NodeOptions, NodeSettings, serve_node
from strop.runtime.planes import DataPlane
from tests.fixtures.nodes import CAPACITY, node_of, order_of, workspace_at
from tests.fixtures.runtime_service import POLICY, service
from tests.fixtures.sandboxes import needs_bubblewrap
from tests.fixtures.scripted_node import slots

on_quick_backends = pytest.mark.parametrize(
    "backend", ["process", pytest.param("bubblewrap", marks=needs_bubblewrap)]
)


@on_quick_backends
async def test_a_sandbox_is_started_used_and_stopped(backend: str) -> None:
    async with node_of(backend) as orders:
        url = await orders.start("r1")
        assert url == await orders.start("r1")
        ready = await orders.wait_for("r1", State.READY)
        assert ready.isolation["backend"] == backend
        assert ready.url == url
        assert list(ready.timeline) == ["image", "started", "ready"]
        async with workspace_at(url) as workspace:
            assert await workspace.run("echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
            client = workspace.client
            info = (await client.get("/server_info")).json()
            assert info["version"] == "1.58.0"
            assert (await client.head("/health")).status_code == 405
            assert (await client.get("/api/conversations")).status_code == 404
        async with workspace_at(url, key="wrong") as stranger:
            refused = await stranger.client.post("/api/bash/start_bash_command", json={"command": "true"})
            assert (refused.status_code, refused.json()) == (401, {"detail": "Unauthorized"})
            assert (await stranger.client.get("/health")).json() == {"status": "ok"}
        stopped = await orders.ask("DELETE", "/sandboxes/r1")
        assert stopped.json()["state"] == "stopped"
        report = await orders.wait_for("r1", State.STOPPED)
        assert report.timeline["first_command"] >= report.timeline["ready"]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*url.removeprefix("http://").split(":"))


@on_quick_backends
async def test_a_paused_sandbox_stands_still_behind_its_address(backend: str) -> None:
    async with node_of(backend) as orders:
        url = await orders.start("r1")
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            body = {"command": "while :; do date +%s%N; sleep 0.01; done > ~/beats", "timeout": 60}
            await workspace.client.post("/api/bash/start_bash_command", json=body)
            assert (await workspace.run("sleep 0.2"))[0] == 0
            before = (await orders.ask("GET", "/sandboxes/r1")).json()
            for _ in range(2):
                paused = await orders.ask("POST", "/sandboxes/r1/pause")
                assert (paused.status_code, paused.json()["state"]) == (200, "paused")
            # A report that was sent before and comes later is known by that.
            assert paused.json()["version"] > before["version"]
            answer = await workspace.client.get("/health")
            assert (answer.status_code, answer.json()) == (503, {"detail": "the sandbox is paused"})
            await asyncio.sleep(0.5)
            for _ in range(2):
                resumed = await orders.ask("POST", "/sandboxes/r1/resume")
                assert (resumed.status_code, resumed.json()["state"]) == (200, "ready")
            assert resumed.json()["url"] == url
            await asyncio.sleep(0.1)
            beats = [int(word) for word in (await workspace.run("cat ~/beats"))[1].split()]
            assert max(after - before for before, after in itertools.pairwise(beats)) > 0.4e9
        await orders.ask("POST", "/sandboxes/r1/pause")
        assert (await orders.ask("DELETE", "/sandboxes/r1")).json()["state"] == "stopped"
        assert (await orders.ask("POST", "/sandboxes/r1/resume")).status_code in (404, 409)


async def test_what_a_client_gets_wrong_is_answered() -> None:
    async with node_of("process", data_plane=DataPlane.OWN) as orders:
        for method, path, status in (
            ("DELETE", "/sandboxes/none", 404),
            ("POST", "/sandboxes/none/pause", 404),
            ("GET", "/else", 404),
            ("POST", "/sandboxes", 422),
        ):
            assert (await orders.ask(method, path, "{}")).status_code == status
        await orders.start("own", command=["/usr/bin/env", "python3"])
        assert (await orders.wait_for("own", State.FAILED)).failure_kind is FailureKind.IMAGE_ERROR
        for image in ("python:3.12", "/usr/share"):
            await orders.start(image, image=image)
            failed = await orders.wait_for(image, State.FAILED)
            assert failed.failure_kind is FailureKind.IMAGE_ERROR
            assert image in failed.cause
    with pytest.raises(ConfigError, match="bubblewrap"):
        await Maker(MakeSettings(backends=("bubblewrap",))).kind_of(order_of("r", image="/usr/share"))


async def test_a_node_whose_job_ends_soon_takes_nothing_new_and_obeys_its_controller() -> None:
    async with node_of("process") as orders:
        await orders.start("kept")
        await orders.wait_for("kept", State.READY)
        assert orders.node is not None
        orders.node._ends_at = time.monotonic() + 60.0
        orders.node._news.set()
        async with asyncio.timeout(60):
            while True:
                if orders.reports[-1].is_draining:
                    break
                await asyncio.sleep(0.01)
        refused = await orders.ask("POST", "/sandboxes", order_of("more").model_dump_json())
        assert refused.status_code == 503
        orders.reply = orders.reply.model_copy(update={"to_stop": ("kept",)})
        stopped = await orders.wait_for("kept", State.STOPPED)
        assert stopped.cause == "the controller does not want it any more"
        assert orders.reports[-1].is_draining


async def test_a_report_for_a_change_tells_of_what_changed() -> None:
    async with node_of("process") as orders:
        for name in ("a", "b"):
            await orders.start(name)
            await orders.wait_for(name, State.READY)
        changed = {
            one.runtime_id for report in orders.reports if not report.has_all for one in report.sandboxes
        }
        assert changed <= {"a", "b"}
        num_before = len(orders.reports)
        await orders.ask("POST", "/sandboxes/b/pause")
        await orders.wait_for("b", State.PAUSED)
        while not any(report.has_all for report in orders.reports[num_before:]):
            orders.has_news.clear()
            await orders.has_news.wait()
        for report in orders.reports[num_before:]:
            assert {one.runtime_id for one in report.sandboxes} == ({"a", "b"} if report.has_all else {"b"})
        # An unanswered change is reported again, and a new controller gets all sandboxes.
        for is_silent, wants_all in ((True, False), (False, True)):
            orders.is_silent = is_silent
            orders.reply = NodeReply(wants_all=wants_all)
            await orders.ask("POST", f"/sandboxes/b/{'resume' if is_silent else 'pause'}")
            await asyncio.sleep(0.1)
            orders.is_silent, orders.reply, num_before = False, NodeReply(), len(orders.reports)
            while len(orders.reports) == num_before:
                orders.has_news.clear()
                await orders.has_news.wait()
            assert orders.reports[num_before].has_all


async def test_a_silent_controller_ends_the_node() -> None:
    async with node_of("process", silence_limit_s=0.3) as orders:
        host, _, port = (await orders.start("r1")).removeprefix("http://").partition(":")
        await orders.wait_for("r1", State.READY)
        orders.is_silent = True
        async with asyncio.timeout(300.0):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError:
                    break
                writer.close()
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("controller", "network", "named"),
    [
        ("http://127.0.0.1:1", "allow:a", "allow:HOST:PORT"),
        ("https://127.0.0.1:1", "none", "http://HOST:PORT"),
    ],
)
async def test_an_option_that_cannot_be_is_refused(
    tmp_path: Path, controller: str, network: str, named: str
) -> None:
    options = NodeOptions(controller=controller, key_file=tmp_path / "key", network=network)
    with pytest.raises(ConfigError, match=named):
        await serve_node(options, say=print)


def test_a_jump_of_the_clock_does_not_end_a_nodes_job(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{now + 600.0}")
    settings = NodeSettings(
        controller="http://127.0.0.1:9", key="k", make=MakeSettings(backends=("process",)), capacity=CAPACITY
    )
    node = Node(settings)
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    left_s = node._make_report((), has_all=True).ends_in_s
    assert left_s is not None
    assert 590.0 < left_s <= 600.0


async def test_commands_run_behind_a_nodes_address_and_behind_a_held_one(tmp_path: Path) -> None:
    async with service(tmp_path, policy=replace(POLICY, hold_s=5.0)) as it:
        # It waits before there is a node, so that its address is the controller's.
        early = await it.start("early", image="host")
        make = MakeSettings(backends=("process",))
        node = Node(NodeSettings(controller=it.serving.url, key=it.node_key, make=make, capacity=slots(2)))
        running = asyncio.create_task(node.run())
        try:
            await it.until_session("early", pod_status="ready")
            late = await it.start("late", image="host")
            await it.until_session("late", pod_status="ready")
            for record in (early, late):
                current = await it.session(record["session_id"])
                assert current["url"] == record["url"]
                assert current["isolation"]["backend"] == "process"
                async with workspace_at(record["url"], key=record["session_api_key"]) as workspace:
                    assert await workspace.run("echo out; exit 3") == (3, "out\n", "")
            paused = await it.post("/pause", early["runtime_id"])
            assert paused.json()["status"] == "paused"
            waiting = await it.start("waiting", image="host")
            assert waiting["pod_status"] == "pending"
            resumed = await it.post("/resume", early["runtime_id"])
            assert resumed.json()["status"] in ("running", "starting")
            await it.until_session("early", pod_status="ready")
            async with workspace_at(early["url"], key=early["session_api_key"]) as workspace:
                assert (await workspace.run("true"))[0] == 0
            assert (await it.post("/stop", late["runtime_id"])).json()["status"] == "stopped"
            # A report of the node's brings it, soon after.
            for _ in range(500):
                used = (await it.session("late"))["usage"]
                if "cpu_s" in used:
                    break
                await asyncio.sleep(0.02)
            assert used.keys() >= {"commands", "disk_bytes", "oom_kills"}
            assert used["commands"] >= 1.0
            assert used["cpu_s"] > 0.0
            await it.until_session("waiting", pod_status="ready")
            missing = await it.start("missing", image="no-such-image")
            assert missing["pod_status"] == "pending"
            for record in (early, waiting):
                await it.post("/stop", record["runtime_id"])
            await it.until_session("missing", failure_kind="image_error")
        finally:
            node.end()
            await running
