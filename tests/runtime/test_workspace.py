"""strop's own data plane: what the agent server's client relies on, and where it is better."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from strop.runtime.contract import State
from strop.runtime.http_server import HttpError, Request
from strop.runtime.workspace import Workspace as OwnWorkspace
from strop.sandbox.local import LocalSandbox
from tests.fixtures.nodes import Workspace, node_of, workspace_at
from tests.fixtures.sandboxes import sandbox_of


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


async def test_many_commands_at_once_and_a_large_body() -> None:
    async with workspace_of() as workspace:
        ends = await asyncio.gather(*(workspace.run(f"sleep 0.1; exit {code}") for code in range(8)))
        assert [one[0] for one in ends] == list(range(8))
        answer = await workspace.client.post(
            "/api/bash/start_bash_command", content=b"{}", headers={"content-length": "2"}
        )
        assert answer.status_code == 422


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
