"""A host of this machine: states, addresses, its own workspace, ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from strop.errors import ConfigError, SandboxError
from strop.runtime.contract import FailureKind, State
from strop.runtime.host import HostSettings, SandboxHost
from strop.runtime.making import Maker, MakeSettings
from strop.runtime.planes import DataPlane
from strop.runtime.serve import read_host_settings
from strop.runtime.service_dir import ServiceDir
from tests.fixtures.hosts import Workspace, host_of, order_of, workspace_at
from tests.fixtures.runtime_service import POLICY, service
from tests.fixtures.sandboxes import needs_bubblewrap
from tests.fixtures.scripted_host import slots

on_quick_backends = pytest.mark.parametrize(
    "backend", ["process", pytest.param("bubblewrap", marks=needs_bubblewrap)]
)


@on_quick_backends
async def test_a_sandbox_is_started_used_and_stopped(backend: str) -> None:
    async with host_of(backend) as orders:
        url = await orders.start("r1")
        assert url == await orders.start("r1")
        ready = await orders.wait_for("r1", State.READY)
        assert ready.isolation["backend"] == backend
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
        await orders.host.stop("r1", "it is asked for")
        report = await orders.wait_for("r1", State.STOPPED)
        assert report.timeline["first_command"] >= report.timeline["ready"]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*url.removeprefix("http://").split(":"))


@on_quick_backends
async def test_a_paused_sandbox_stands_still_behind_its_address(backend: str) -> None:
    async with host_of(backend) as orders:
        url = await orders.start("r1")
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            body = {"command": "while :; do date +%s%N; sleep 0.01; done > ~/beats", "timeout": 60}
            await workspace.client.post("/api/bash/start_bash_command", json=body)
            assert (await workspace.run("sleep 0.2"))[0] == 0
            for _ in range(2):
                paused = await orders.host.pause("r1")
                assert paused.state is State.PAUSED
            answer = await workspace.client.get("/health")
            assert (answer.status_code, answer.json()) == (503, {"detail": "the sandbox is paused"})
            await asyncio.sleep(0.5)
            for _ in range(2):
                resumed = await orders.host.resume("r1")
                assert resumed.state is State.READY
            # A report that was sent before and comes later is known by that.
            assert resumed.version > paused.version
            await asyncio.sleep(0.1)
            beats = [int(word) for word in (await workspace.run("cat ~/beats"))[1].split()]
            assert max(after - before for before, after in itertools.pairwise(beats)) > 0.4e9
        await orders.host.pause("r1")
        await orders.host.stop("r1", "it is asked for")
        with pytest.raises(SandboxError) as caught:
            await orders.host.resume("r1")
        assert caught.value.kind == "state"


async def test_what_a_client_gets_wrong_is_an_image_error() -> None:
    async with host_of("process", data_plane=DataPlane.OWN) as orders:
        await orders.start("own", command=("/usr/bin/env", "python3"))
        assert (await orders.wait_for("own", State.FAILED)).failure_kind is FailureKind.IMAGE_ERROR
        for name, image in (("r1", "python:3.12"), ("r2", "/usr/share")):
            await orders.start(name, image=image)
            failed = await orders.wait_for(name, State.FAILED)
            assert failed.failure_kind is FailureKind.IMAGE_ERROR
            assert image in failed.cause
        await orders.host.stop("none", "it is asked for")
    with pytest.raises(ConfigError):
        await Maker(MakeSettings(), ("bubblewrap",)).kind_of(order_of("r", image="/usr/share"))


async def test_a_host_whose_job_ends_soon_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{now + 600.0}")
    async with host_of("process") as orders:
        # A jump of the clock changes nothing.
        monkeypatch.setattr(time, "time", lambda: now + 3600.0)
        facts = await orders.host.facts()
        assert facts.ends_in_s is not None
        assert 500.0 < facts.ends_in_s <= 600.0
        assert not facts.is_draining
        orders.host._ends_at = time.monotonic() + 60.0
        assert (await orders.host.facts()).is_draining


async def test_states_are_told_once_and_of_what_changed() -> None:
    async with host_of("process") as orders:
        for name in ("a", "b"):
            await orders.start(name)
            await orders.wait_for(name, State.READY)
        await orders.host.states(0.05)
        await orders.host.pause("b")
        assert [(one.runtime_id, one.state) for one in await orders.host.states(60.0)] == [
            ("b", State.PAUSED)
        ]
        assert await orders.host.states(0.05) == []
        assert set((await orders.host.facts()).last_used_s) == {"a", "b"}


@pytest.mark.parametrize(
    ("option", "named"),
    [({"network": "allow:a"}, "allow:HOST:PORT"), ({"data_plane": "x"}, "own"), ({"warm": ["x"]}, "IMAGE=N")],
)
def test_an_option_that_cannot_be_is_refused(tmp_path: Path, option: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_host_settings(ServiceDir(tmp_path), **option)  # type: ignore[arg-type]


async def test_commands_run_behind_addresses_and_a_slot_is_used_again(tmp_path: Path) -> None:
    make = MakeSettings(backends=("process",))
    settings = HostSettings(make=make, address="127.0.0.1", capacity=slots(2))
    async with service(tmp_path, policy=replace(POLICY, hold_s=5.0)) as it:
        # It waits before there is a host.
        early = await it.start("early", image="host")
        host = SandboxHost(settings)
        it.inner.add_host("here", host, await host.open(), is_here=True)
        await it.until_session("early", pod_status="ready")
        late = await it.start("late", image="host")
        await it.until_session("late", pod_status="ready")
        for record in (early, late):
            current = await it.session(record["session_id"])
            # No relay: the host has taken the port over.
            assert current["url"] == record["url"] == current["node_url"]
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


@asynccontextmanager
async def workspace_of() -> AsyncIterator[Workspace]:
    async with host_of("process") as orders:
        url = await orders.start("r1", environment={"GIVEN": "by the caller"})
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            yield workspace


async def test_commands_end_as_they_should() -> None:
    async with workspace_of() as workspace:
        run = workspace.run
        assert await run("echo $GIVEN; cd /; X=1") == (0, "by the caller\n", "")
        assert (await run("echo $X"))[1] == "\n"
        assert (await run("kill -9 $$"))[0] == -9
        assert (await run("printf '\\377'"))[1] == "\ufffd"
        code, _, err = await run("true", cwd="/no/such/place")
        assert code == -1
        assert "/no/such/place" in err
        code, out, _ = await run("head -c 2500000 /dev/zero | tr '\\0' x")
        assert (code, len(out)) == (0, 2_500_000)
        # The shell's end is the command's; what keeps its output open goes with it.
        began = time.monotonic()
        assert (await run("echo on; sleep 60 & "))[:2] == (0, "on\n")
        assert time.monotonic() - began < 5.0
        code, out, err = await run("echo first; setsid sleep 60 & sleep 60", limit_s=0)
        assert (code, out, err) == (-1, "first\n", "Command timed out after 1 seconds")


async def test_a_poll_is_held_and_a_command_can_be_stopped() -> None:
    async with workspace_of() as workspace:
        client = workspace.client
        began = time.monotonic()
        body = {"command": "sleep 0.4; echo done", "timeout": 20}
        started = (await client.post("/api/bash/start_bash_command", json=body)).json()
        assert (started["kind"], started["command"], len(started["id"])) == (
            "BashCommand",
            body["command"],
            32,
        )
        query = {"kind__eq": "BashOutput", "command_id__eq": started["id"], "sort_order": "TIMESTAMP"}
        page = (await client.get("/api/bash/bash_events/search", params=query)).json()
        assert [one["stdout"] for one in page["items"]] == ["done\n"]
        assert time.monotonic() - began >= 0.4
        assert page["next_page_id"] is None
        assert page["items"][0]["exit_code"] == 0
        more = {**query, "order__gt": page["items"][-1]["order"]}
        long = (await client.post("/api/bash/start_bash_command", json={"command": "sleep 60"})).json()
        for _ in range(2):
            stopped = await client.post(f"/api/bash/bash_commands/{long['id']}/stop")
            assert (stopped.status_code, stopped.json()) == (200, {"success": True})
        latest = {"sort_order": "TIMESTAMP_DESC", "limit": 1, "command_id__eq": long["id"]}
        items = (await client.get("/api/bash/bash_events/search", params=latest)).json()["items"]
        assert items[0]["exit_code"] == -15
        assert (await client.get("/api/bash/bash_events/search", params=more)).json()["items"] == []
        assert (await client.post(f"/api/bash/bash_commands/{'0' * 32}/stop")).status_code == 404
        assert (await client.post("/api/bash/bash_commands/none/stop")).status_code == 422
        one = await client.post("/api/bash/execute_bash_command", json={"command": "echo 1; exit 4"})
        assert (one.json()["stdout"], one.json()["exit_code"]) == ("1\n", 4)
        newest: dict[str, str | int] = {"sort_order": "TIMESTAMP_DESC", "limit": 1}
        items = (await client.get("/api/bash/bash_events/search", params=newest)).json()["items"]
        assert [item["id"] for item in items] == [one.json()["id"]]
        assert (await client.get("/api/bash/bash_events/search", params={"limit": 101})).status_code == 422


async def test_files_go_up_and_come_down() -> None:
    async with workspace_of() as workspace:
        client, blob = workspace.client, bytes(range(256)) * 4096
        top = (await workspace.run("echo $HOME"))[1].strip()

        async def up(path: str, data: bytes = b"x") -> httpx.Response:
            return await client.post(
                "/api/file/upload", params={"path": path}, files={"file": ("name", data)}
            )

        async def down(path: str) -> httpx.Response:
            return await client.get("/api/file/download", params={"path": path})

        sent = await up(f"{top}/a/b/b lob", blob)
        assert sent.json() == {"success": True, "file_size": len(blob)}
        came = await down(f"{top}/a/b/b lob")
        assert (came.content, came.headers["content-type"]) == (blob, "application/octet-stream")
        assert (await workspace.run(f"ln -s 'b lob' {top}/a/b/link"))[0] == 0
        assert (await down(f"{top}/a/b/link")).content == blob
        for answer, status in (
            (await up("relative"), 400),
            (await up(f"{top}/a"), 400),
            (await up(f"{top}/a/b/b lob/below"), 400),
            (await down(f"{top}/none"), 404),
            (await down("relative"), 400),
            (await down(f"{top}/a"), 400),
            (await client.post("/api/file/upload", params={"path": f"{top}/x"}, content=b"bare"), 422),
        ):
            assert answer.status_code == status, answer.text
            assert answer.json()["detail"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
async def test_a_repository_tells_its_changes() -> None:
    async with workspace_of() as workspace:
        client = workspace.client
        top = (await workspace.run("echo $HOME"))[1].strip() + "/repo"
        assert (await client.get("/api/git/changes", params={"path": "/"})).json() == []
        script = (
            f"git init -q {top} && cd {top} && git config user.email a@b && git config user.name c"
            " && printf 'one\\n' > kept && cp kept gone && git add . && git commit -qm 1"
            " && printf 'two\\n' > kept && rm gone && touch 'ne w'"
        )
        assert (await workspace.run(script))[0] == 0
        changes = (await client.get("/api/git/changes", params={"path": top})).json()
        assert {one["path"]: one["status"] for one in changes} == {
            "gone": "DELETED",
            "kept": "UPDATED",
            "ne w": "ADDED",
        }
        diff = (await client.get("/api/git/diff", params={"path": f"{top}/kept"})).json()
        assert diff == {"modified": "two", "original": "one"}
        diff = (await client.get("/api/git/diff", params={"path": f"{top}/gone"})).json()
        assert diff == {"modified": "", "original": "one"}


async def test_output_is_there_while_a_command_runs() -> None:
    async with workspace_of() as workspace:
        client = workspace.client
        text = "printf 'first \\303'; sleep 0.3; printf '\\244\\n'; exec sleep 60"
        started = (await client.post("/api/bash/start_bash_command", json={"command": text})).json()
        query: dict[str, str | int] = {"command_id__eq": started["id"], "sort_order": "TIMESTAMP"}
        texts: list[str] = []
        while len(texts) < 2:
            page = (await client.get("/api/bash/bash_events/search", params=query)).json()
            texts += [one["stdout"] for one in page["items"]]
            query["order__gt"] = len(texts) - 1
        # A letter that came in two pieces is one.
        assert texts == ["first ", "\u00e4\n"]
        await client.post(f"/api/bash/bash_commands/{started['id']}/stop")
        page = (await client.get("/api/bash/bash_events/search", params=query)).json()
        assert [one["exit_code"] for one in page["items"]] == [-15]


async def test_no_command_of_a_lost_sandbox_has_a_result() -> None:
    async with host_of("process") as orders:
        url = await orders.start("r1")
        await orders.wait_for("r1", State.READY)
        async with workspace_at(url) as workspace:
            client = workspace.client
            body = {"command": "echo on; sleep 60", "timeout": 60}
            begun = (await client.post("/api/bash/start_bash_command", json=body)).json()
            waiting = asyncio.create_task(client.post("/api/bash/execute_bash_command", json=body))
            query: dict[str, str | int] = {"command_id__eq": begun["id"]}
            while not (await client.get("/api/bash/bash_events/search", params=query)).json()["items"]:
                pass
            made = orders.host._held["r1"]._made
            assert made is not None
            os.kill(made.sandbox.supervisor_pid, signal.SIGKILL)
            # Cut off, or told that there is no result.
            with contextlib.suppress(httpx.TransportError):
                assert (await waiting).status_code == 503
            lost = await orders.wait_for("r1", State.FAILED)
            assert lost.failure_kind is FailureKind.INFRA_LOST
            with pytest.raises(httpx.TransportError):
                await client.get("/api/file/download", params={"path": "/etc/passwd"})
