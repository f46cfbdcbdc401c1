"""A scripted node agent without real sandboxes, for the controller's tests and benchmarks.

It implements `runtime.contract` in full, over real connections: it takes orders, serves an address for each
sandbox that answers /health, /alive and every other request with its body, reports, pauses, stops.
Sandboxes of images named `missing...`, `oom...` and `crash...` fail; all others become ready.

    python -m strop.testing.scripted_node --controller URL --key-file F --slots 8
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from strop.runtime.contract import (
    HEARTBEAT_S,
    NODE_KEY_HEADER,
    FailureKind,
    NodeAnswer,
    NodeOrder,
    NodeReply,
    NodeReport,
    SandboxReport,
    Slot,
    State,
)
from strop.runtime.http_server import Answer, HttpError, Request, has_key, json_answer, serve_connection
from strop.runtime.keys import KeyRing
from strop.runtime.ports import PortRelay, Serve

_FAILURES = {
    "missing": (FailureKind.IMAGE_ERROR, "no such image"),
    "oom": (FailureKind.TASK_OOM, "its memory limit was reached"),
    "crash": (FailureKind.AGENT_ERROR, "its server exited with 7"),
}
_MAX_BODY_BYTES = 64 << 20
_LARGE = 1 << 40


@dataclass(kw_only=True, slots=True)
class Script:
    """A node's behaviour. May be changed while it runs."""

    start_s: float = 0.0
    """Time between an order and readiness."""
    answer_s: float = 0.0
    """Time before an order is answered."""
    refuses_orders: bool = False
    fails_to_resume: bool = False
    is_silent: bool = False
    """Whether it sends no reports."""
    is_draining: bool = False
    heartbeat_s: float = HEARTBEAT_S


@dataclass(kw_only=True, slots=True)
class Scripted:
    """A fake sandbox."""

    order: NodeOrder
    relay: PortRelay
    state: State = State.IMAGE
    version: int = 1
    failure_kind: FailureKind | None = None
    cause: str = ""
    living: asyncio.Task[None] | None = None


@dataclass(kw_only=True, slots=True)
class ScriptedNode:
    """The agent; `open` runs it."""

    controller: str
    key: str = field(repr=False)
    capacity: Slot
    script: Script = field(default_factory=Script)
    node_id: str = field(default_factory=lambda: f"scripted-{uuid.uuid4().hex[:8]}")
    sandboxes: dict[str, Scripted] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Its requests, in order."""
    stop_orders: list[str] = field(default_factory=list)
    """Runtime ids that the controller's replies ordered it to stop."""
    url: str = ""
    _is_over: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ScriptedNode]:
        """Run it until the end of the block; then it and its addresses vanish without a report."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve_connection(reader, writer, self._answer, max_body_bytes=_MAX_BODY_BYTES)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
        host, port = server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        reporting = asyncio.create_task(self._report_for_ever())
        try:
            yield self
        finally:
            self._is_over = True
            reporting.cancel()
            server.close()
            await asyncio.gather(reporting, return_exceptions=True)
            for one in list(self.sandboxes.values()):
                await self._end(one, State.STOPPED)
            await asyncio.sleep(0)

    def fail(self, runtime_id: str, kind: FailureKind, cause: str) -> None:
        """Let a sandbox fail."""
        one = self.sandboxes[runtime_id]
        one.failure_kind, one.cause = kind, cause
        self._set(one, State.FAILED)

    def forget(self, runtime_id: str) -> None:
        """Forget a sandbox."""
        del self.sandboxes[runtime_id]

    def report_soon(self) -> None:
        """Report now instead of at the next heartbeat."""
        self._news.set()

    async def _report_for_ever(self) -> None:
        headers = {NODE_KEY_HEADER: self.key}
        async with httpx.AsyncClient(headers=headers, trust_env=False, verify=False) as client:
            while True:
                self._news.clear()
                if not self.script.is_silent:
                    with suppress(httpx.HTTPError):
                        await self._report(client)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.script.heartbeat_s):
                        await self._news.wait()
                # One report for changes that come together.
                await asyncio.sleep(0.01)

    async def _report(self, client: httpx.AsyncClient) -> None:
        report = self.describe()
        url = f"{self.controller}/nodes/{self.node_id}"
        answer = await client.post(url, content=report.model_dump_json())
        answer.raise_for_status()
        for sent in report.sandboxes:
            one = self.sandboxes.get(sent.runtime_id)
            if one is not None and one.state is sent.state and sent.state in (State.STOPPED, State.FAILED):
                await one.relay.close()
                self.sandboxes.pop(sent.runtime_id, None)
        for runtime_id in NodeReply.model_validate_json(answer.content).to_stop:
            self.stop_orders.append(runtime_id)
            if runtime_id in self.sandboxes:
                await self._end(self.sandboxes[runtime_id], State.STOPPED)

    def describe(self) -> NodeReport:
        """Return its report."""
        return NodeReport(
            node_id=self.node_id,
            host="scripted",
            url=self.url,
            boot_id="scripted",
            pid=os.getpid(),
            capacity=self.capacity,
            backends=("scripted",),
            is_draining=self.script.is_draining,
            sandboxes=tuple(map(_report_of, self.sandboxes.values())),
            metrics={f'scripted_up{{node="{self.node_id}"}}': 1.0},
        )

    async def _answer(self, request: Request) -> Answer:
        if not has_key(request.headers, NODE_KEY_HEADER, self.key):
            raise HttpError(401, "Unauthorized")
        self.calls.append(f"{request.method} {request.path}")
        return json_answer(await self._do(request))

    async def _do(self, request: Request) -> BaseModel | dict[str, Any]:
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["sandboxes"]:
                return await self._take(NodeOrder.model_validate_json(request.body))
            case verb, ["sandboxes", runtime_id, *what] if runtime_id in self.sandboxes:
                return await self._change(self.sandboxes[runtime_id], what[0] if what else verb)
            case "GET", ["images"] if request.query_field("image").startswith("img:"):
                return {"exists": True, "image": {"upload_time": "2026-01-01", "image_size_bytes": 1}}
            case "GET", ["images"]:
                return {"exists": False}
        raise HttpError(404, "Not Found")

    async def _take(self, order: NodeOrder) -> NodeAnswer:
        await asyncio.sleep(self.script.answer_s)
        if self.script.refuses_orders:
            raise HttpError(503, "the script says so")
        if order.runtime_id not in self.sandboxes:

            async def dial() -> Serve:
                return await self._dial(order.runtime_id)

            relay = await PortRelay.listen(dial)
            if self._is_over:
                await relay.close()
                raise HttpError(503, "it ends")
            one = self.sandboxes[order.runtime_id] = Scripted(order=order, relay=relay)
            one.living = asyncio.create_task(self._live(one))
        return NodeAnswer(url=self.sandboxes[order.runtime_id].relay.url)

    async def _live(self, one: Scripted) -> None:
        await asyncio.sleep(self.script.start_s)
        image = one.order.request.image
        for word, (kind, cause) in _FAILURES.items():
            if image.startswith(word):
                self.fail(one.order.runtime_id, kind, f"{cause}: {image}")
                return
        self._set(one, State.READY)

    async def _dial(self, runtime_id: str) -> Serve:
        one = self.sandboxes.get(runtime_id)
        if one is None or one.state is not State.READY:
            raise ConnectionError(f"it is {one.state.value if one else 'gone'}")
        key = one.order.session_api_key

        async def answer(request: Request) -> Answer:
            if request.path in ("/health", "/alive"):
                return json_answer({"status": "ok"})
            if not has_key(request.headers, "X-Session-API-Key", key):
                raise HttpError(401, "Unauthorized")
            return Answer(body=request.body, content_type="application/octet-stream")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve_connection(reader, writer, answer, max_body_bytes=_MAX_BODY_BYTES)

        return serve

    async def _change(self, one: Scripted, what: str) -> SandboxReport:
        if what == "DELETE":
            await self._end(one, State.STOPPED)
        elif what == "pause":
            self._set(one, State.PAUSED)
            one.relay.disconnect()
        elif self.script.fails_to_resume:
            raise HttpError(500, "the script says so")
        else:
            self._set(one, State.READY)
        return _report_of(one)

    async def _end(self, one: Scripted, state: State) -> None:
        if one.living is not None:
            one.living.cancel()
        await one.relay.close()
        if one.state is not State.FAILED:
            self._set(one, state)

    def _set(self, one: Scripted, state: State) -> None:
        one.state = state
        one.version += 1
        self.report_soon()


def slots(number: int) -> Slot:
    """Return the capacity of a node for so many sandboxes with one processor each."""
    return Slot(cpus=number, memory_bytes=_LARGE, disk_bytes=_LARGE, processes=_LARGE)


def _report_of(one: Scripted) -> SandboxReport:
    return SandboxReport(
        runtime_id=one.order.runtime_id,
        state=one.state,
        version=one.version,
        failure_kind=one.failure_kind,
        cause=one.cause,
        exit_code=7 if one.failure_kind is FailureKind.AGENT_ERROR else None,
        log_tail="the last line\n",
        events=("scripted",),
        isolation={"level": "none", "backend": "scripted"},
        timeline={"started": time.time()},
        last_used_s=time.monotonic() - one.relay.last_used_at,
        url=one.relay.url,
    )


def main() -> None:
    """Run a node until it is killed."""
    parser = argparse.ArgumentParser(prog="python -m strop.testing.scripted_node", description=__doc__)
    parser.add_argument("--controller", required=True, help="its URL")
    parser.add_argument("--key-file", type=Path, required=True, help="node keys")
    parser.add_argument("--slots", type=int, default=8, help="sandboxes at once")
    parser.add_argument("--start-s", type=float, default=0.0, help="between order and readiness")
    args = parser.parse_args()
    script = Script(start_s=args.start_s)
    key = KeyRing(args.key_file).newest
    node = ScriptedNode(controller=args.controller, key=key, capacity=slots(args.slots), script=script)

    async def run() -> None:
        async with node.open():
            await asyncio.Event().wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
