"""A sandbox that is lost under its clients: whatever they ask is refused, and no command has a result."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from strop.runtime.http_server import HttpError, Request
from strop.runtime.workspace import Workspace
from strop.sandbox.local import LocalSandbox
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import in_sandbox


def ask(method: str, path: str, body: object = None, /, **query: str) -> Request:
    return Request(
        method=method,
        path=path,
        query={name: [value] for name, value in query.items()},
        headers={},
        body=json.dumps(body).encode(),
    )


def test_no_command_of_a_lost_sandbox_has_a_result() -> None:
    async def work(sandbox: ServedSandbox) -> None:
        assert isinstance(sandbox, LocalSandbox)
        workspace = Workspace(sandbox, key="k", env={}, working_dir="/", note_use=lambda: None)
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

    in_sandbox("process", work)
