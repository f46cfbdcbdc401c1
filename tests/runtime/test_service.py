"""The control plane, asked over HTTP, with scripted hosts behind it."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.errors import CheckRefused, ConfigError
from strop.io.endpoints import RUNTIME, read_endpoint
from strop.runtime.serve import read_policy
from strop.sandbox import ExecKind
from tests.fixtures.runtime_service import POLICY, service, start_body, until
from tests.fixtures.scripted_host import Script

GIB = 1 << 30


async def test_a_start_with_a_free_slot_is_ready_when_asked_and_served_at_its_address(
    tmp_path: Path,
) -> None:
    async with service(tmp_path) as it:
        node = await it.add_host(script=Script(start_s=0.3))
        assert (await it.client.get("/sessions/S1")).status_code == 404
        record = await it.start("S1")
        assert record["status"] == "starting"
        begun = time.monotonic()
        ready = await it.session("S1")
        # The question was held: the client would have waited for 2 s before its next.
        assert 0.1 < time.monotonic() - begun < 1.5
        assert (ready["status"], ready["pod_status"]) == ("running", "ready")
        for name in ("url", "session_api_key", "runtime_id"):
            assert ready[name] == record[name]
        assert ready["isolation"] == {"level": "none", "backend": "scripted"}
        assert list(ready["timeline"]) == ["queued", "image", "starting", "ready"]
        async with httpx.AsyncClient(base_url=record["url"], trust_env=False) as sandbox:
            key = {"X-Session-API-Key": record["session_api_key"]}
            assert (await sandbox.post("/echo", content=b"x", headers=key)).content == b"x"
            assert (await sandbox.post("/echo", content=b"x")).status_code == 401
        stopped = await it.post("/stop", record["runtime_id"])
        assert (stopped.status_code, stopped.json()["status"]) == (200, "stopped")
        assert "stop S1" in node.calls
        again = await it.post("/stop", record["runtime_id"])
        assert (again.status_code, again.json()["status"]) == (200, "stopped")


async def test_who_waits_has_its_final_address_at_once_and_is_served_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.runtime.service.HOLD_S", 0.1)
    async with service(tmp_path) as it:
        record = await it.start("S1")
        waiting = await it.session("S1")
        assert (waiting["status"], waiting["pod_status"]) == ("starting", "pending")
        assert waiting["events"] == ["waits for a slot: 1 of 1"]
        async with httpx.AsyncClient(base_url=record["url"], trust_env=False) as sandbox:
            early = await sandbox.get("/health")
            assert (early.status_code, early.json()) == (503, {"detail": "the sandbox is queued"})
            await it.add_host(num_slots=1)
            await it.until_session("S1", pod_status="ready")
            assert (await sandbox.get("/health")).status_code == 200
            body = bytes(range(256)) * 4096
            key = {"X-Session-API-Key": record["session_api_key"]}
            assert (await sandbox.post("/echo", content=body, headers=key)).content == body
            assert (await it.post("/pause", record["runtime_id"])).json()["status"] == "paused"
            assert (await sandbox.get("/health")).status_code == 503
            assert (await it.post("/resume", record["runtime_id"])).json()["status"] == "running"
            assert (await sandbox.get("/health")).status_code == 200
        assert (await it.session("S1"))["url"] == record["url"]
        await it.post("/stop", record["runtime_id"])
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.ConnectError):
                await plain.get(record["url"])


async def test_a_start_may_leave_fields_out_and_have_later_ones(tmp_path: Path) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"resource_factor": 2},
        {"command": ["server", "--port", "60000"], "of_later": {"a": 1}},
    )

    async with service(tmp_path) as it:
        node = await it.add_host()
        for index, more in enumerate(changes):
            await it.start(f"S{index}", **{"command": "server --port 60000", **more})
            assert (await it.session(f"S{index}"))["status"] == "running"
            made = node.sandbox_of(f"S{index}")
            assert made.request.command == ("server", "--port", "60000")
            factor = more.get("resource_factor") or 1
            assert made.slot.memory_bytes == 2 * GIB * factor
            assert made.slot.processes == 512 * factor


BAD_STARTS: dict[str, tuple[Any, int]] = {
    "not JSON": (b"{", 422),
    "no object": (b"[]", 422),
    "null id": ({"session_id": None}, 422),
    "empty id": ({"session_id": ""}, 422),
    "id with slash": ({"session_id": "a/b"}, 422),
    "id with NUL": ({"session_id": "a\0b"}, 422),
    "id that climbs": ({"session_id": ".."}, 422),
    "long id": ({"session_id": "a" * 257}, 422),
    "no image": ({"image": ""}, 422),
    "no command": ({"command": ""}, 422),
    "open quote": ({"command": "sh -c 'a"}, 422),
    "list of no words": ({"command": []}, 422),
    "command with NUL": ({"command": "a\0"}, 422),
    "user below 0": ({"run_as_user": -1}, 422),
    "user that is none": ({"run_as_user": (1 << 32) - 1}, 422),
    "factor zero": ({"resource_factor": 0}, 422),
    "factor NaN": (b'{"session_id":"a","image":"i","command":"c","resource_factor":NaN}', 422),
    "factor huge": ({"resource_factor": 1e9}, 422),
    "policy unknown": ({"image_pull_policy": "Sometimes"}, 422),
    "relative directory": ({"working_dir": "work"}, 422),
    "environment list": ({"environment": ["A=b"]}, 422),
    "environment null value": ({"environment": {"A": None}}, 422),
    "environment name": ({"environment": {"A=B": "c"}}, 422),
}


async def test_a_bad_start_is_refused_and_starts_nothing(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        found = {}
        for name, (change, _) in BAD_STARTS.items():
            given = {"content": change} if isinstance(change, bytes) else {"json": start_body(**change)}
            answer = await it.client.post("/start", **given)
            found[name] = answer.status_code
            assert isinstance(answer.json()["detail"], str)
        assert found == {name: status for name, (_, status) in BAD_STARTS.items()}
        assert (await it.client.get("/list")).json() == {"runtimes": []}


async def test_a_replayed_start_is_one_sandbox_and_another_image_is_a_conflict(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        node = await it.add_host(script=Script(make_s=0.1))
        first, second = await asyncio.gather(it.start("S1"), it.start("S1"))
        third = await it.start("S1")
        assert first["runtime_id"] == second["runtime_id"] == third["runtime_id"]
        assert first["url"] == second["url"] == third["url"]
        await it.until_session("S1", pod_status="ready")
        assert len(node.sandboxes) == 1
        other = await it.client.post("/start", json=start_body(session_id="S1", image="img:2"))
        assert other.status_code == 409
        await it.post("/stop", first["runtime_id"])
        # What ended is no conflict, and a new one has a new id and a new key.
        after = await it.start("S1", image="img:2")
        assert after["runtime_id"] != first["runtime_id"]
        assert after["session_api_key"] != first["session_api_key"]
        assert (await it.post("/stop", first["runtime_id"])).json()["status"] == "stopped"


async def test_a_failure_is_a_state_with_kind_cause_and_log(tmp_path: Path) -> None:
    failures = (
        ("missing:1", "image_error", "failed"),
        ("oom:1", "task_oom", "crashloopbackoff"),
        ("crash:1", "agent_error", "failed"),
    )

    async with service(tmp_path) as it:
        await it.add_host()
        for image, kind, pod_status in failures:
            record = await it.start(kind, image=image)
            failed = await it.session(kind)
            assert (failed["status"], failed["pod_status"]) == ("error", pod_status)
            assert failed["failure_kind"] == kind
            assert failed["cause"] in failed["pod_logs"]
            assert ("the last line" in failed["pod_logs"]) is (kind != "image_error")
            # A client that asks again starts it again.
            again = await it.start(kind, image="img:1")
            assert again["runtime_id"] != record["runtime_id"]


async def test_what_can_never_fit_fails_at_once_with_the_numbers(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        await it.add_host(2, memory_bytes=5 * GIB)
        record = await it.start("S1", resource_factor=2)
        assert (record["status"], record["failure_kind"]) == ("error", "capacity")
        assert re.match(r"http://[^/]+:[0-9]+$", record["url"])
        assert "it takes 2 cpus and 6.44245e+09 memory_bytes" in record["pod_logs"]


async def test_unknown_routes_methods_and_ids_are_errors_with_a_detail(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        expected = {
            ("GET", "/nothing"): 404,
            ("GET", "/start"): 405,
            ("GET", "/list/"): 404,
            ("GET", "/sessions/"): 404,
            ("GET", "/sessions/unknown"): 404,
            ("GET", "/sessions/a%2Fb"): 404,
            ("GET", "/sessions/%00"): 404,
            ("GET", "/sessions/%2e%2e"): 404,
            **{("GET", path): 404 for path in ("/runtime/unknown", "/image_exists", "/registry_prefix")},
            ("POST", "/build"): 404,
            ("GET", "/health"): 200,
        }
        found = {}
        for method, path in expected:
            answer = await it.client.request(method, path)
            found[method, path] = answer.status_code
            assert answer.is_success or isinstance(answer.json()["detail"], str), path
        assert found == expected
        for path in ("/stop", "/pause", "/resume"):
            assert (await it.post(path, "unknown")).status_code == 404
            assert (await it.client.post(path, json={})).status_code == 422
            assert (await it.client.post(path, content=b"x")).status_code == 422
        for content in (
            b"",
            b"{}",
            b'{"lease_s": 0}',
            b'{"lease_s": 1e99}',
            b'{"lease_s": 5, "runtime_ids": "a"}',
        ):
            assert (await it.client.post("/leases", content=content)).status_code == 422, content


async def test_a_failed_resume_is_told_and_the_next_start_replaces_the_sandbox(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        node = await it.add_host()
        record = await it.start("S1")
        early = await it.post("/pause", record["runtime_id"])
        assert early.status_code in (200, 409)
        assert (await it.session("S1"))["status"] in ("running", "paused")
        assert (await it.post("/pause", record["runtime_id"])).status_code == 200
        assert (await it.post("/pause", record["runtime_id"])).status_code == 200
        assert (await it.session("S1"))["pod_status"] == "not found"
        # A start of a paused one resumes it beside.
        assert (await it.start("S1"))["runtime_id"] == record["runtime_id"]
        await it.until_session("S1", pod_status="ready")
        assert (await it.post("/resume", record["runtime_id"])).json()["status"] == "running"
        await it.post("/pause", record["runtime_id"])
        node.script.fails_to_resume = True
        failed = await it.post("/resume", record["runtime_id"])
        assert failed.status_code == 503
        assert "the script says so" in failed.json()["detail"]
        # It is not kept, since nothing could be done with it.
        assert (await it.session("S1"))["failure_kind"] == "infra_lost"
        after = await it.start("S1")
        assert after["runtime_id"] != record["runtime_id"]
        await it.until_session("S1", pod_status="ready")
        await until(lambda: len(node.sandboxes) == 1)


async def test_a_lost_host_fails_what_was_on_it(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        host = await it.add_host()
        record = await it.start("S1")
        await it.session("S1")
        it.inner.drop_host(host.node_id, "the script lost it")
        lost = await it.session("S1")
        assert (lost["status"], lost["pod_status"]) == ("error", "unknown")
        assert host.node_id in lost["pod_logs"]
        assert (await it.client.get("/nodes")).json() == {"nodes": []}
        assert (await it.start("S1"))["runtime_id"] != record["runtime_id"]


@pytest.mark.parametrize("how", ["refuses_orders", "has_bug"])
async def test_an_order_that_a_host_does_not_take_is_lost_and_a_slow_one_delays_no_answer(
    how: str, tmp_path: Path
) -> None:
    async with service(tmp_path) as it:
        host = await it.add_host(script=Script(**{how: True}))
        await it.start("S1")
        await it.until_session("S1", failure_kind="infra_lost")
        host.script = Script(make_s=1.0)
        begun = time.monotonic()
        record = await it.start("S1")
        assert time.monotonic() - begun < 0.9
        ready = await it.session("S1")
        assert (ready["pod_status"], ready["url"]) == ("ready", record["url"])


async def test_a_sandbox_that_fails_later_says_so_and_frees_its_slot(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        node = await it.add_host(num_slots=1)
        record = await it.start("S1")
        await it.session("S1")
        second = await it.start("S2")
        assert second["pod_status"] == "pending"
        node.sandbox_of("S1").end(ExecKind.OOM)
        assert (await it.session("S2"))["pod_status"] == "ready"
        failed = await it.session("S1")
        assert (failed["pod_status"], failed["failure_kind"]) == ("crashloopbackoff", "task_oom")
        listed = (await it.client.get("/list")).json()["runtimes"]
        assert {one["session_id"]: one["status"] for one in listed} == {"S2": "running"}
        assert (await it.post("/stop", record["runtime_id"])).json()["status"] == "error"


async def test_a_node_that_ends_soon_takes_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.runtime.service.HOLD_S", 0.2)
    async with service(tmp_path) as it:
        await it.add_host(script=Script(ends_in_s=100.0))
        await it.start("S1")
        assert (await it.session("S1"))["pod_status"] == "pending"
        (listed,) = (await it.client.get("/nodes")).json()["nodes"]
        assert (listed["is_open"], listed["num_sandboxes"]) == (False, 0)


async def test_a_full_cluster_is_pending_and_a_start_without_a_port_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(tmp_path) as it:
        await it.start("S1")
        assert (await it.start("S1"))["pod_status"] == "pending"

        def refuse(_: str) -> None:
            raise CheckRefused("no port is free")

        monkeypatch.setattr("strop.runtime.service.Gate", refuse)
        assert (await it.client.post("/start", json=start_body(session_id="S2"))).status_code == 503
        assert (await it.client.get("/sessions/S2")).status_code == 404


async def test_metrics_are_prometheus_text(tmp_path: Path) -> None:
    async with service(tmp_path, policy=POLICY) as it:
        node = await it.add_host(num_slots=1)
        await it.start("S1")
        await it.session("S1")
        await it.start("S2")
        answer = await it.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        assert f'strop_runtime_sandboxes{{state="ready",node="{node.node_id}"}} 1' in lines
        assert "strop_runtime_queue_length 1" in lines
        assert "strop_runtime_starts_total 2" in lines
        assert f'strop_runtime_node_used{{node="{node.node_id}",resource="cpus"}} 1' in lines
        sample = re.compile(r'^[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.e+-]+$')
        assert [one for one in lines if not one.startswith("# ") and not sample.match(one)] == []


async def test_what_an_earlier_service_had_is_lost_and_its_folder_is_one_services(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        await it.add_host()
        before = await it.start("S1")
        key = it.key
        with pytest.raises(CheckRefused):
            async with service(tmp_path):
                pass
    async with httpx.AsyncClient(trust_env=False) as plain:
        with pytest.raises(httpx.ConnectError):
            await plain.get(before["url"])
    async with service(tmp_path) as it:
        assert it.key == key
        assert (await it.client.get("/sessions/S1")).status_code == 404
        for path in ("/stop", "/pause", "/resume"):
            answer = await it.post(path, before["runtime_id"])
            assert answer.status_code == 404
            assert "infra_lost" in answer.json()["detail"]
        await it.add_host()
        assert (await it.start("S1"))["runtime_id"] != before["runtime_id"]


async def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(CheckRefused):
        async with service(tmp_path, port=other.getsockname()[1]):
            pass
    assert read_endpoint(tmp_path, RUNTIME) is None


def test_a_policy_that_cannot_be_is_refused() -> None:
    for policy in ("{", '{"unknown": 1}', '{"idle_limit_s": "long"}'):
        with pytest.raises(ConfigError):
            read_policy(policy)
