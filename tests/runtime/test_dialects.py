"""The order of requests of each client, replayed. Bodies: `tests/fixtures/openhands`, with their versions."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import re
import tarfile
from pathlib import Path

import httpx
import pytest

from strop.runtime.sessions import Policy
from strop.testing.scripted_node import Script
from tests.fixtures.runtime_service import POLICY, service, start_body

URL = re.compile(r"^https?://[^/]+:[0-9]+$")


def archive_of(*members: tarfile.TarInfo) -> bytes:
    """Return a gzip tar with a Dockerfile and more members."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        recipe = tarfile.TarInfo("Dockerfile")
        recipe.size = 12
        archive.addfile(recipe, io.BytesIO(b"FROM scratch"))
        for member in members:
            archive.addfile(member)
    return data.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


async def post_build(client: httpx.AsyncClient, context: bytes, **fields: object) -> httpx.Response:
    form = {"target_image": "reg/runtime:1", "tags": ["reg/runtime:1", "reg/runtime:latest"], **fields}
    return await client.post("/build", files={"context": ("context.tar.gz", context)}, data=form)


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


def test_b_builds_an_image_and_finds_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as it:
            node = await it.add_node()
            assert (await it.client.get("/registry_prefix")).json() == {"registry_prefix": ""}
            there = {"image": "reg/runtime:latest"}
            assert (await it.client.get("/image_exists", params=there)).json() == {"exists": False}
            archive = archive_of(member("code/link", tarfile.SYMTYPE, "../Dockerfile"))
            built = await post_build(it.client, base64.b64encode(archive))
            assert built.status_code == 200, built.text
            ((target, tags, sent),) = node.builds.values()
            assert (target, tags) == ("reg/runtime:1", ("reg/runtime:1", "reg/runtime:latest"))
            assert sent == archive
            status = await it.client.get("/build_status", params=built.json())
            assert status.json() == {"status": "SUCCESS", "image": "reg/runtime:1", "error": ""}
            found = (await it.client.get("/image_exists", params=there)).json()
            assert found["exists"] is True
            assert set(found["image"]) == {"upload_time", "image_size_bytes"}
            assert list((tmp_path / "uploads").iterdir()) == []
            unknown = await it.client.get("/build_status", params={"build_id": f"{node.node_id}~x"})
            assert unknown.status_code == 404
            lost = await it.client.get("/build_status", params={"build_id": "gone~x"})
            assert lost.json()["status"] == "INTERNAL_ERROR"

    asyncio.run(main())


OUTSIDE = {
    "climbs": member("../x"),
    "climbs later": member("a/../../x"),
    "absolute": member("/etc/x"),
    "link outside": member("a", tarfile.SYMTYPE, "../../x"),
    "absolute link": member("a", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link outside": member("a", tarfile.LNKTYPE, "../x"),
    "device": member("a", tarfile.CHRTYPE),
    "pipe": member("a", tarfile.FIFOTYPE),
}


def test_a_build_context_that_would_do_harm_reaches_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with service(tmp_path, policy=POLICY) as it:
            node = await it.add_node()
            for name, one in OUTSIDE.items():
                answer = await post_build(it.client, base64.b64encode(archive_of(one)))
                assert (name, answer.status_code) == (name, 422)
                assert repr(one.name) in answer.json()["detail"]
            for context in (b"", b"not base64!", base64.b64encode(b"no archive")):
                assert (await post_build(it.client, context)).status_code == 422
            cut = base64.b64encode(archive_of()[:40])
            assert (await post_build(it.client, cut)).status_code == 422
            good = base64.b64encode(archive_of())
            assert (await post_build(it.client, good, target_image="")).status_code == 422
            assert (await it.client.post("/build", data={"target_image": "a"})).status_code == 422
            assert (await it.client.post("/build", content=good)).status_code == 422
            monkeypatch.setattr("strop.runtime.routes.MAX_UNPACKED_BYTES", 3)
            assert (await post_build(it.client, good)).status_code == 413
            monkeypatch.setattr("strop.runtime.routes.MAX_CONTEXT_BYTES", 10)
            assert (await post_build(it.client, good)).status_code == 413
            monkeypatch.setattr("strop.runtime.routes.MAX_UPLOADS", 0)
            assert (await post_build(it.client, good)).status_code == 429
            assert node.builds == {}
            assert not any((tmp_path / "uploads").iterdir())

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
