"""Record what the older clients of OpenHands exchange with a sandbox service: `tests/fixtures/openhands`.

    echo '{"url": URL, "key": KEY, "image": IMAGE}' | ENV/bin/python tools/record_openhands.py b OUT.json

ENV is the client's own, of Python 3.12 and 2 GB, and is not kept: `pip install openhands-ai==0.62.0` has
`RemoteRuntime` (b), 1.11.0 has `RemoteSandboxService` (c). Nothing of strop is imported. IMAGE brings `sh`,
and for b a server of the first generation behind `/openhands/micromamba/bin/micromamba`; the node's data
plane is `auto`. The clients are as they were installed. What differs from run to run is noted as a word.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import httpx

_GIVEN = json.loads(sys.stdin.readline())
_URL: str = _GIVEN["url"]
_KEY: str = _GIVEN["key"]
_IMAGE: str = _GIVEN["image"]
_WORDS: dict[str, str] = {_KEY: "KEY", _IMAGE: "IMAGE"}
_RECORDS = {"session_id": "SESSION", "runtime_id": "RUNTIME", "session_api_key": "SESSION_KEY", "url": "URL"}
_READ = {"restart_count", "restart_reasons", "work_hosts", "status", "pod_status", *_RECORDS}
"""What clients read of a record."""
_HEADERS = ("x-api-key", "x-session-api-key")
_exchanges: list[dict[str, Any]] = []


def note(request: httpx.Request, answer: httpx.Response) -> None:
    """Keep one exchange: all of the control plane's, and of a sandbox's that there was one."""
    is_control = str(request.url).startswith(_URL)
    content = request.read()
    body: Any = json.loads(content) if content and is_control else None
    found = json.loads(answer.content) if is_control else None
    for record in found.get("runtimes", [found]) if isinstance(found, dict) else found or []:
        for field, word in _RECORDS.items():
            if value := record.get(field):
                number = sum(one.startswith(f"{word}-") for one in _WORDS.values())
                _WORDS.setdefault(value, f"{word}-{number}")
        for field in record.keys() - _READ if "runtime_id" in record else ():
            del record[field]
    target = request.url.raw_path.decode()
    _exchanges.append(
        {
            "method": request.method,
            "url": target if is_control else f"{request.url.scheme}://{request.url.netloc.decode()}{target}",
            "headers": {name: request.headers[name] for name in _HEADERS if name in request.headers},
            "body": body,
            "status": answer.status_code,
            "answer": found,
        }
    )


_send, _send_async = httpx.Client.send, httpx.AsyncClient.send


def _noted_send(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
    answer = _send(self, request, **options)
    answer.read()
    note(request, answer)
    return answer


async def _noted_send_async(
    self: httpx.AsyncClient, request: httpx.Request, **options: Any
) -> httpx.Response:
    answer = await _send_async(self, request, **options)
    await answer.aread()
    note(request, answer)
    return answer


def use_remote_runtime() -> None:
    """Start, use and pause; attach to it, use it, pause it, use it again, and stop."""
    from openhands.core.config import OpenHandsConfig
    from openhands.events import EventStream
    from openhands.events.action import CmdRunAction
    from openhands.llm.llm_registry import LLMRegistry
    from openhands.runtime.impl.remote.remote_runtime import RemoteRuntime
    from openhands.storage.memory import InMemoryFileStore

    def connect(*, is_kept: bool) -> Any:
        config = OpenHandsConfig()
        sandbox = config.sandbox
        sandbox.remote_runtime_api_url, sandbox.api_key = _URL, _KEY
        sandbox.runtime_container_image = _IMAGE
        sandbox.keep_runtime_alive = sandbox.pause_closed_runtimes = is_kept
        stream = EventStream("of-remote-runtime", InMemoryFileStore())
        runtime = RemoteRuntime(config, stream, LLMRegistry(config), sid="of-remote-runtime", plugins=[])
        asyncio.run(runtime.connect())
        return runtime

    first = connect(is_kept=True)
    assert first.run(CmdRunAction("true")).exit_code == 0
    first.close()
    second = connect(is_kept=True)
    second._send_runtime_api_request("POST", f"{_URL}/pause", json={"runtime_id": second.runtime_id})
    # It meets the 503 of the paused sandbox and resumes it; within a command it would wait for itself there.
    second.list_files("/")
    second.config.sandbox.keep_runtime_alive = False
    second.close()


async def use_sandbox_service() -> None:
    """Start two, wait, list, pause, resume, stop."""
    from openhands.app_server.sandbox.preset_sandbox_spec_service import PresetSandboxSpecService
    from openhands.app_server.sandbox.remote_sandbox_service import RemoteSandboxService
    from openhands.app_server.sandbox.remote_sandbox_spec_service import get_default_sandbox_specs
    from openhands.app_server.user.specifiy_user_context import ADMIN
    from openhands.app_server.utils.sql_utils import Base
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    spec = get_default_sandbox_specs()[0].model_copy(update={"id": _IMAGE})
    async with AsyncSession(engine) as session, httpx.AsyncClient(timeout=15.0) as client:
        service = RemoteSandboxService(
            sandbox_spec_service=PresetSandboxSpecService([spec]),
            api_url=_URL,
            api_key=_KEY,
            web_url=None,
            resource_factor=1,
            runtime_class="sysbox",
            start_sandbox_timeout=120,
            max_num_sandboxes=9,
            user_context=ADMIN,
            httpx_client=client,
            db_session=session,
        )
        started = [await service.start_sandbox() for _ in range(2)]
        for one in started:
            await service.wait_for_sandbox_running(one.id, httpx_client=client)
        found = await service.search_sandboxes()
        assert {one.status.value for one in found.items} == {"RUNNING"}, found
        assert await service.pause_sandbox(started[0].id)
        assert await service.resume_sandbox(started[0].id)
        await service.wait_for_sandbox_running(started[0].id, httpx_client=client)
        for one in started:
            assert await service.delete_sandbox(one.id)
    await engine.dispose()


def main() -> None:
    """Use one client, and write what it exchanged."""
    name, out = sys.argv[1:]
    httpx.Client.send = _noted_send  # type: ignore[method-assign]
    httpx.AsyncClient.send = _noted_send_async  # type: ignore[method-assign]
    if name == "b":
        use_remote_runtime()
    else:
        asyncio.run(use_sandbox_service())
    version = importlib.metadata.version("openhands-ai")
    text = json.dumps({"client": f"openhands-ai {version}", "exchanges": _exchanges})
    # The longest first: no word stands in another.
    for value in sorted(_WORDS, key=len, reverse=True):
        text = text.replace(value, _WORDS[value])
    Path(out).write_text(json.dumps(json.loads(text), indent=1) + "\n")


if __name__ == "__main__":
    main()
