"""A node agent under orders: states, addresses, its own workspace, ends."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import shutil
import signal
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from strop.errors import ConfigError
from strop.runtime.contract import FailureKind, NodeReply, State
from strop.runtime.http_server import HttpError, Request
from strop.runtime.making import Maker, MakeSettings
from strop.runtime.node import Node, NodeOptions, NodeSettings, serve_node
from strop.runtime.planes import DataPlane
from strop.runtime.workspace import Workspace as OwnWorkspace
from strop.sandbox.local import LocalSandbox
from tests.fixtures.nodes import CAPACITY, Workspace, node_of, order_of, workspace_at
from tests.fixtures.runtime_service import POLICY, service
from tests.fixtures.sandboxes import needs_bubblewrap, sandbox_of
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


@asynccontextmanager
async def workspace_of() -> AsyncIterator[Workspace]:
    async with node_of("process") as orders:
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
        event = (await client.get(f"/api/bash/bash_events/{one.json()['id']}")).json()
        assert event == one.json()
        page = (await client.get("/api/bash/bash_events/search", params={"limit": 1})).json()
        assert page["next_page_id"] is not None
        assert (await client.delete("/api/bash/bash_events")).json()["cleared_count"] == 6
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
        made = await client.post("/api/file/create_directory", params={"path": f"{top}/new/er"})
        assert made.status_code == 200
        packed = await client.get(
            "/api/file/archive", params={"path": top, "format": "tar.gz", "exclude": "link"}
        )
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
            names = archive.getnames()
        assert "./a/b/b lob" in names
        assert "./a/b/link" not in names
        assert (
            await client.get("/api/file/archive", params={"path": top, "format": "zip"})
        ).status_code == 422


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
        changes = (await client.get("/api/git/changes", params={"path": top, "ref": "HEAD"})).json()
        assert {one["path"]: one["status"] for one in changes} == {
            "gone": "DELETED",
            "kept": "UPDATED",
            "ne w": "ADDED",
        }
        diff = (await client.get("/api/git/diff", params={"path": f"{top}/kept"})).json()
        assert diff == {"modified": "two", "original": "one"}
        diff = (await client.get("/api/git/diff", params={"path": f"{top}/gone"})).json()
        assert diff == {"modified": "", "original": "one"}
        bad = await client.get("/api/git/changes", params={"path": top, "ref": "no such"})
        assert bad.status_code == 400
        patch = await client.get("/api/file/archive", params={"path": top})
        assert b"+two" in patch.content
        assert patch.headers["X-Archive-Base-Commit"] == patch.headers["X-Archive-Head-Commit"]
        # The index that clients see is as it was.
        assert (await workspace.run(f"cd {top}; git diff --cached --name-only"))[1] == ""


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


def ask(method: str, path: str, body: object = None, /, **query: str) -> Request:
    return Request(
        method=method,
        path=path,
        query={name: [value] for name, value in query.items()},
        headers={},
        body=json.dumps(body).encode(),
    )


async def test_no_command_of_a_lost_sandbox_has_a_result() -> None:
    async with sandbox_of("process") as sandbox:
        assert isinstance(sandbox, LocalSandbox)
        workspace = OwnWorkspace(sandbox, key="k", env={}, working_dir="/", note_use=lambda: None)
        body = {"command": "echo on; sleep 60", "timeout": 60}
        begun = json.loads((await workspace.answer(ask("POST", "/api/bash/start_bash_command", body))).body)
        waiting = asyncio.create_task(workspace.answer(ask("POST", "/api/bash/execute_bash_command", body)))
        search = ask("GET", "/api/bash/bash_events/search", command_id__eq=begun["id"])
        while b"on" not in (await workspace.answer(search)).body:
            pass
        os.kill(sandbox.supervisor_pid, signal.SIGKILL)
        after = ask("GET", "/api/bash/bash_events/search", command_id__eq=begun["id"], order__gt="0")
        asked = [
            waiting,
            *(
                asyncio.create_task(workspace.answer(one))
                for one in (
                    after,
                    ask("POST", "/api/bash/execute_bash_command", body),
                    ask("GET", "/api/file/download", path="/etc/passwd"),
                )
            ),
        ]
        for one in asked:
            with pytest.raises(HttpError) as refused:
                await one
            assert refused.value.status == 503
            assert "infra" in refused.value.detail
        await workspace.close("")
