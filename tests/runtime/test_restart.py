"""A controller that is killed and started again, and what its clients notice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.errors import CheckRefused, StoreError
from strop.runtime.keys import KeyRing
from tests.fixtures.runtime_service import service, start_body, until
from tests.fixtures.scripted_node import ScriptedNode, slots


@contextmanager
def controller(state_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A controller in a process of its own."""
    words = [sys.executable, "-m", "strop.runtime.controller", "--state-dir", str(state_dir)]
    policy = ["--policy", json.dumps({"cpu_factor": 1.0, "hold_s": 0.2})]
    with subprocess.Popen(words + policy, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


async def test_killed_and_started_again_it_has_its_port_and_sandboxes_their_addresses(tmp_path: Path) -> None:
    with controller(tmp_path) as (process, serving):
        key = KeyRing(Path(serving["keys_file"])).newest
        node_key = KeyRing(Path(serving["node_keys_file"])).newest
        node = ScriptedNode(controller=serving["url"], key=node_key, capacity=slots(3))
        client = httpx.AsyncClient(
            base_url=serving["url"], headers={"X-API-Key": key}, trust_env=False, verify=False
        )
        plain = httpx.AsyncClient(trust_env=False, verify=False)

        async def start(name: str) -> dict[str, Any]:
            return dict((await client.post("/start", json=start_body("a", session_id=name))).json())

        async def look(name: str) -> dict[str, Any]:
            return dict((await client.get(f"/sessions/{name}")).json())

        async def is_ready(name: str = "direct") -> bool:
            return bool((await look(name))["pod_status"] == "ready")

        async with client, plain:
            # One waits at first, and is relayed for ever; one has its node's own address; one waits on.
            relayed = await start("relayed")
            async with node.open():
                await until(lambda: is_ready("relayed"))
                direct = await start("direct")
                await until(is_ready)
                paused = await start("paused")
                await until(lambda: is_ready("paused"))
                await client.post("/pause", json={"runtime_id": paused["runtime_id"]})
                waiting = await start("waiting")
                stopped = waiting["runtime_id"]
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                with controller(tmp_path) as (_, again):
                    begun = time.monotonic()
                    assert again["url"] == serving["url"]
                    for before in (relayed, direct, paused, waiting):
                        record = await look(before["session_id"])
                        for name in ("url", "session_api_key", "runtime_id"):
                            assert record[name] == before[name]
                    assert (await plain.get(relayed["url"] + "/health")).status_code == 200
                    assert (await plain.get(direct["url"] + "/health")).status_code == 200
                    assert (await plain.get(paused["url"] + "/health")).status_code == 503
                    await until(is_ready)
                    assert time.monotonic() - begun < 5.0
                    assert (await look("paused"))["status"] == "paused"
                    assert (await start("direct"))["runtime_id"] == direct["runtime_id"]
                    resumed = await client.post("/resume", json={"runtime_id": paused["runtime_id"]})
                    assert resumed.json().get("status") == "running", resumed.text
                    # Later, one that is stopped may be in a report before its node hears of it.
                    assert node.stop_orders == []
                    assert (await client.post("/stop", json={"runtime_id": stopped})).status_code == 200
                    done = await client.post("/stop", json={"runtime_id": direct["runtime_id"]})
                    assert done.json()["status"] == "stopped"
                    assert f"DELETE /sandboxes/{direct['runtime_id']}" in node.calls


async def test_stopped_ones_are_known_after_a_restart_and_a_taken_port_fails_one(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        first, second, third = [await it.start(name) for name in ("S1", "S2", "S3")]
        await it.post("/stop", first["runtime_id"])
    port = int(second["url"].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        async with service(tmp_path) as it:
            known = await it.post("/stop", first["runtime_id"])
            assert (known.status_code, known.json()["status"]) == (200, "stopped")
            failed = await it.session("S2")
            assert (failed["status"], failed["failure_kind"]) == ("error", "infra_lost")
            assert f"{port} cannot be listened on" in failed["cause"]
            assert (await it.start("S3"))["url"] == third["url"]


async def test_a_taken_port_and_a_held_directory_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CheckRefused, match="cannot be listened on"):
            async with service(tmp_path, port=port):
                pass
    async with service(tmp_path):
        with pytest.raises(StoreError, match="is held by"):
            async with service(tmp_path):
                pass


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    from strop.runtime.controller import main

    for policy in ("{", '{"unknown": 1}', '{"hold_s": "long"}'):
        assert main(["--state-dir", str(tmp_path / "s"), "--policy", policy]) == 2
    assert main(["--state-dir", str(tmp_path / "s"), "--disable-auth", "--host", "192.0.2.1"]) == 2
    assert not (tmp_path / "s").exists()
