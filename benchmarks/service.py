"""A sandbox service that runs, and a client of it that adds as little time as it can.

The service is what `strop runtime serve` starts: a controller and a node agent, each a process of its own.
The client speaks HTTP over connections that it keeps, with one request on each at a time.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from strop.runtime.service_dir import ServiceDir

IMAGE = "host"
_COMMAND = "/usr/local/bin/openhands-agent-server --port 60000"
_SLOT = {"cpus": 1.0, "memory_bytes": 32 << 20, "disk_bytes": 16 << 20, "processes": 64}
_MANY_CPUS = 1000.0
"""How often a processor is promised: what bounds the number that live is to be the machine, not the slots."""
_END_LIMIT_S = 240.0


class Connection:
    """One connection to an HTTP server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        self._reader = reader
        self._writer = writer
        self._head = head

    @classmethod
    async def open(cls, url: str, **headers: str) -> Self:
        """Connect; `headers` go with each request, with - for _."""
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        lines = [f"host: {where.netloc}", *(f"{name.replace('_', '-')}: {headers[name]}" for name in headers)]
        return cls(reader, writer, "\r\n".join(lines))

    async def ask(self, method: str, path: str, body: object = None) -> bytes:
        """Send a request and return the answer's body. Raises: RuntimeError unless it is 200."""
        content = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}\r\ncontent-length: {len(content)}\r\n\r\n"
        self._writer.write(head.encode() + content)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in answer.split("\r\n")[1:] if line)
        text = await self._reader.readexactly(int(fields["content-length"]))
        if " 200 " not in answer.split("\r\n", 1)[0]:
            raise RuntimeError(f"{method} {path}: {answer.splitlines()[0]}: {text.decode(errors='replace')}")
        return text

    async def run(self, command: str) -> None:
        """Run a command as OpenHands' client does: start it, and ask for its events until it has ended."""
        started = json.loads(await self.ask("POST", "/api/bash/start_bash_command", {"command": command}))
        path = f"/api/bash/bash_events/search?command_id__eq={started['id']}&kind__eq=BashOutput"
        items: list[dict[str, Any]] = []
        while not items or items[-1]["exit_code"] is None:
            items = json.loads(await self.ask("GET", path))["items"]
        if items[-1]["exit_code"] != 0:
            raise RuntimeError(f"{command}: {items}")

    def close(self) -> None:
        """Close it."""
        self._writer.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """One that is ready, and the connection to its address."""

    record: dict[str, Any]
    connection: Connection


class Client:
    """Starts and stops sandboxes of a service."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key
        self._idle: list[Connection] = []
        self._num_started = 0

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close its connections."""
        for connection in self._idle:
            connection.close()

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Ask on a connection that is free, or a new one; return the answer's JSON."""
        return json.loads(await self._ask(method, path, body))

    async def _ask(self, method: str, path: str, body: object) -> bytes:
        connection = self._idle.pop() if self._idle else await Connection.open(self._url, X_API_Key=self._key)
        text = await connection.ask(method, path, body)
        self._idle.append(connection)
        return text

    async def metric(self, name: str) -> float:
        """Return one of the service's metrics; 0 where there is none of that name."""
        lines = (await self._ask("GET", "/metrics", None)).decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    async def start(self) -> dict[str, Any]:
        """Start a sandbox and return its record once it is ready."""
        self._num_started += 1
        body = {"image": IMAGE, "command": _COMMAND, "session_id": f"s{self._num_started}"}
        record = await self.ask("POST", "/start", {**body, "working_dir": "/"})
        while record["pod_status"] in ("pending", "running"):
            record = await self.ask("GET", f"/sessions/{record['session_id']}")
        if record["pod_status"] != "ready":
            raise RuntimeError(f"a sandbox did not become ready: {record}")
        return dict(record)

    async def start_many(self, number: int) -> list[dict[str, Any]]:
        """Start so many at once; return their records once all are ready."""
        return list(await asyncio.gather(*(self.start() for _ in range(number))))

    async def wait_for(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        """Ask until something is so. Raises: TimeoutError."""
        async with asyncio.timeout(_END_LIMIT_S):
            while not await is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def stop_all(self, records: Sequence[dict[str, Any]]) -> None:
        """Stop sandboxes, and return when their node has nothing of them any more."""
        await asyncio.gather(
            *(self.ask("POST", "/stop", {"runtime_id": one["runtime_id"]}) for one in records)
        )

        async def is_empty() -> bool:
            return not (await self.ask("GET", "/nodes"))["nodes"][0]["num_sandboxes"]

        await self.wait_for(is_empty)

    async def connect(self, record: dict[str, Any]) -> Sandbox:
        """Connect to a sandbox's address."""
        key = record["session_api_key"]
        return Sandbox(record=record, connection=await Connection.open(record["url"], X_Session_API_Key=key))


@contextmanager
def serving(backend: str, *words: str) -> Iterator[tuple[str, str]]:
    """Run a service whose node makes sandboxes by one backend; yield its address and key."""
    with tempfile.TemporaryDirectory() as folder:
        place = ServiceDir(Path(folder))
        command = [sys.executable, "-m", "strop.cli", "runtime", "serve", "--dir", folder, *words]
        command += ["--backend", backend, "--data-plane", "own"]
        command += ["--policy", json.dumps({"slot": _SLOT, "cpu_factor": _MANY_CPUS})]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                while (found := place.find()) is None and process.poll() is None:
                    time.sleep(0.05)
                if found is None:
                    raise RuntimeError(f"no service with {backend}: it ended with {process.returncode}")
                yield found.url, found.key
            finally:
                process.terminate()
                process.wait(_END_LIMIT_S)
