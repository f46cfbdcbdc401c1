"""The order of requests of each client, replayed. Bodies: `tests/fixtures/openhands`, with their versions."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path

import httpx

from strop.runtime.sessions import Policy
from tests.fixtures.runtime_service import service, start_body
from tests.fixtures.scripted_node import Script

URL = re.compile(r"^https?://[^/]+:[0-9]+$")


def test_every_address_is_an_origin_and_fields_are_as_clients_read_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, policy=Policy(cpu_factor=1.0, hold_s=0.1)) as it:
            for num_slots, dialect in itertools.product((0, 6), "abc"):
                if num_slots and dialect == "a":
                    await it.add_node(num_slots)
                body = start_body(dialect, session_id=f"{dialect}-of-{num_slots}")
                record = (await it.client.post("/start", json=body)).json()
                assert URL.match(record["url"])
                assert len(record["session_api_key"]) >= 43
                assert isinstance(record["restart_count"], int)
                assert record["pod_status"] is not None

    asyncio.run(main())


def test_b_lives_and_is_ready_only_once_alive_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, policy=Policy(cpu_factor=1.0, hold_s=0.05)) as it:
            await it.add_node(script=Script(start_s=0.4))
            assert (await it.client.get("/sessions/S1")).status_code == 404
            record = (await it.client.post("/start", json=start_body("b"))).json()
            runtime_id = record["runtime_id"]
            seen = []
            async with httpx.AsyncClient(trust_env=False, verify=False) as plain:
                while True:
                    current = (await it.client.get(f"/runtime/{runtime_id}")).json()
                    assert current["runtime_id"] == runtime_id
                    seen.append(current["pod_status"])
                    if current["pod_status"] == "ready":
                        break
                assert (await plain.get(record["url"] + "/alive")).status_code == 200
                assert seen[0] in ("pending", "running")
                # Paused, its address answers 503; the client resumes it and asks again.
                await it.post("/pause", runtime_id)
                assert (await plain.get(record["url"] + "/alive")).status_code == 503
                await it.post("/resume", runtime_id)
                assert (await plain.get(record["url"] + "/alive")).status_code == 200
            assert (await it.post("/stop", runtime_id)).json()["status"] == "stopped"

    asyncio.run(main())


def test_b_asks_for_images_and_builds_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as it:
            node = await it.add_node()
            assert (await it.client.get("/registry_prefix")).json() == {"registry_prefix": ""}
            for image, is_there in (("img:1", True), ("other:1", False)):
                found = (await it.client.get("/image_exists", params={"image": image})).json()
                assert found["exists"] is is_there
                assert not is_there or set(found["image"]) == {"upload_time", "image_size_bytes"}
            context = {"context": ("context.tar.gz", b"x")}
            built = await it.client.post("/build", files=context, data={"target_image": "img:1"})
            assert built.status_code == 403
            assert [call for call in node.calls if "image" not in call] == []

    asyncio.run(main())


def test_c_lives_and_reads_lists_and_batches(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as it:
            await it.add_node()
            assert (await it.client.get("/api/warm-runtime-configs")).json() == {"configs": []}
            assert (await it.client.get("/list")).json() == {"runtimes": []}
            names = [start_body("c")["session_id"], "3mJr7AoUXx2Wqd0Zb1K9Tz"]
            for name in names:
                answer = await it.client.post("/start", json=start_body("c", session_id=name))
                assert answer.status_code == 200
                record = (await it.client.get(f"/sessions/{name}")).json()
                assert record["status"] == "running"
                async with httpx.AsyncClient(trust_env=False, verify=False) as plain:
                    assert (await plain.get(record["url"] + "/alive")).status_code == 200
            ids = [("ids", names[0]), ("ids", "unknown"), ("ids", names[1])]
            batch = (await it.client.get("/sessions/batch", params=ids)).json()
            assert [one["session_id"] for one in batch] == names
            listed = (await it.client.get("/list")).json()["runtimes"]
            for one in (*batch, *listed):
                assert one["session_api_key"]
                assert {"runtime_id", "status", "url"} <= set(one)
            runtime_id = batch[0]["runtime_id"]
            assert (await it.post("/pause", runtime_id)).json()["status"] == "paused"
            resumed = (await it.post("/resume", runtime_id)).json()
            assert resumed["session_api_key"] == batch[0]["session_api_key"]
            for one in batch:
                assert (await it.post("/stop", one["runtime_id"])).status_code == 200
            assert (await it.client.get("/list")).json() == {"runtimes": []}
            # Pausing what was stopped is tolerated as not found.
            assert (await it.post("/pause", runtime_id)).status_code == 404
            assert (await it.client.get("/sessions/batch")).json() == []

    asyncio.run(main())
