"""A controller and a real node agent: what a client starts runs its commands."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from strop.runtime.making import MakeSettings
from strop.runtime.node import Node, NodeSettings
from tests.fixtures.nodes import workspace_at
from tests.fixtures.runtime_service import POLICY, service
from tests.fixtures.scripted_node import slots


def test_commands_run_behind_a_nodes_address_and_behind_a_held_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, policy=replace(POLICY, hold_s=5.0)) as it:
            # It waits before there is a node, so that its address is the controller's.
            early = await it.start("early", image="host")
            make = MakeSettings(backends=("process",))
            node = Node(
                NodeSettings(controller=it.serving.url, key=it.node_key, make=make, capacity=slots(2))
            )
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

    asyncio.run(main())
