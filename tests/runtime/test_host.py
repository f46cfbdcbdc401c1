"""A host of this machine: states, addresses, servers inside, ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import HTTPException

from strop.errors import ConfigError, SandboxRefused
from strop.runtime.contract import Options, State
from strop.runtime.host import LocalHost
from tests.fixtures import stand_in
from tests.fixtures.hosts import SESSION_KEY, host_of, workspace_at
from tests.fixtures.runtime_service import service
from tests.fixtures.sandboxes import needs_bubblewrap

HOST = {"image": "host", "command": shlex.join(stand_in.SERVER)}
on_quick_backends = pytest.mark.parametrize(
    "backend", ["process", pytest.param("bubblewrap", marks=needs_bubblewrap)]
)


@on_quick_backends
async def test_a_sandbox_is_started_used_and_stopped(backend: str) -> None:
    async with host_of(backend) as orders:
        url = await orders.start("r1")
        assert await orders.start("r1") == url
        ready = await orders.wait_for("r1", State.READY)
        assert ready["isolation"]["backend"] == backend
        assert list(ready["timeline"]) == ["queued", "image", "starting", "ready"]
        async with workspace_at(url) as workspace:
            assert await workspace.run("echo out; exit 3") == (3, "out\n")
        await orders.stop("r1")
        await orders.wait_for("r1", State.STOPPED)
        with pytest.raises(ConnectionError):
            await orders.sessions["r1"].connect()


@on_quick_backends
async def test_a_paused_sandbox_stands_still_behind_its_address(backend: str) -> None:
    async with host_of(backend) as orders:
        url = await orders.start("r1")
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            beating = "(while :; do date +%s%N; sleep 0.01; done > ~/beats) > /dev/null 2>&1 & sleep 0.2"
            assert (await workspace.run(beating))[0] == 0
            for _ in range(2):
                await orders.pause("r1")
                await orders.wait_for("r1", State.PAUSED)
            with pytest.raises(ConnectionError):
                await orders.sessions["r1"].connect()
            await asyncio.sleep(0.5)
            for _ in range(2):
                await orders.resume("r1")
                await orders.wait_for("r1", State.READY)
            await asyncio.sleep(0.1)
            beats = [int(word) for word in (await workspace.run("cat ~/beats"))[1].split()]
            assert max(after - before for before, after in itertools.pairwise(beats)) > 0.4e9
        await orders.pause("r1")
        await orders.stop("r1")
        with pytest.raises(HTTPException) as caught:
            await orders.resume("r1")
        assert caught.value.status_code == 404


async def test_what_a_client_gets_wrong_is_an_image_error() -> None:
    async with host_of("process") as orders:
        await orders.start("none", command=("/no/such/program",))
        assert (await orders.wait_for("none", State.FAILED))["failure_kind"] == "image_error"
        await orders.start("dies", command=("/bin/sh", "-c", "echo it is broken >&2; exit 7"))
        failed = await orders.wait_for("dies", State.FAILED)
        assert failed["failure_kind"] == "agent_error"
        assert "exit code 7" in failed["cause"]
        assert "it is broken" in failed["pod_logs"]
        for name, image in (("r1", "python:3.12"), ("r2", "/usr/share")):
            await orders.start(name, image=image)
            failed = await orders.wait_for(name, State.FAILED)
            assert failed["failure_kind"] == "image_error"
            assert image in failed["cause"]


async def test_a_host_whose_job_ends_soon_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{now + 600.0}")
    facts = await LocalHost(Options(folder=tmp_path, backends=("process",))).open()
    assert facts.cpus > 0
    assert facts.memory_bytes > 0
    assert facts.ends_in_s is not None
    assert 500.0 < facts.ends_in_s <= 600.0


async def test_a_network_or_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = Path("/usr/strop-runtime")
    with pytest.raises(ConfigError):
        async with service(folder):
            pass
    assert folder.name not in os.listdir(folder.parent)
    with pytest.raises(SandboxRefused) as caught:
        async with service(tmp_path, has_host=True, network="allow:a"):
            pass
    assert caught.value.kind == "network"


async def test_commands_run_behind_addresses_and_a_slot_is_used_again(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        # It waits before there is a host.
        early = await it.start("early", **HOST)
        host = LocalHost(Options(folder=tmp_path, backends=("process",)))
        it.inner.add_host("here", host, replace(await host.open(), cpus=2.0, memory_bytes=1 << 40))
        await it.until_session("early", pod_status="ready")
        late = await it.start("late", **HOST)
        await it.until_session("late", pod_status="ready")
        for record in (early, late):
            current = await it.session(record["session_id"])
            assert current["url"] == record["url"]
            assert current["isolation"]["backend"] == "process"
            async with workspace_at(record["url"], key=record["session_api_key"]) as workspace:
                assert await workspace.run("echo out; exit 3") == (3, "out\n")
        paused = await it.post("/pause", early["runtime_id"])
        assert paused.json()["status"] == "paused"
        waiting = await it.start("waiting", **HOST)
        assert waiting["pod_status"] == "pending"
        resumed = await it.post("/resume", early["runtime_id"])
        assert resumed.json()["status"] in ("running", "starting")
        await it.until_session("early", pod_status="ready")
        async with workspace_at(early["url"], key=early["session_api_key"]) as workspace:
            assert (await workspace.run("true"))[0] == 0
        assert (await it.post("/stop", late["runtime_id"])).json()["status"] == "stopped"
        await it.until_session("waiting", pod_status="ready")
        missing = await it.start("missing", image="no-such-image")
        assert missing["pod_status"] == "pending"
        for record in (early, waiting):
            await it.post("/stop", record["runtime_id"])
        await it.until_session("missing", failure_kind="image_error")


async def test_a_server_has_its_environment_and_key_and_strangers_have_nothing() -> None:
    async with host_of("process") as orders:
        given = {"GIVEN": "by the caller", "SESSION_API_KEY": "theirs", "OH_SESSION_API_KEYS_0": "theirs"}
        url = await orders.start("r1", environment=given, working_dir="/tmp")
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            words = "echo $GIVEN $SESSION_API_KEY $OH_SESSION_API_KEYS_0; pwd"
            assert await workspace.run(words) == (0, f"by the caller {SESSION_KEY} {SESSION_KEY}\n/tmp\n")
        async with workspace_at(url, key="wrong") as stranger:
            assert (await stranger.client.post("/run", content=b"true")).status_code == 401
            assert (await stranger.client.get("/health")).status_code == 200
