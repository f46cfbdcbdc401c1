"""Clients of a sandbox service whose parts are killed, and the ledger of what each was told.

A client believes nothing that it has not seen: a file that a command wrote must be read back as it was, or
the answer must be a failure. What was told to have ended must stay so. An answer that never came is asked for
again, as a careful client does.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from strop.io.endpoints import Endpoint

SERVER = "/usr/local/bin/openhands-agent-server --port 60000"
LIVES = {"plain": 50, "paused": 15, "abandoned": 15, "unasked": 12, "hasty": 8}
"""What clients do, and how often, relative to the others."""
_ASK_LIMIT_S = 30.0
_RETRY_S = 0.2
_READY_LIMIT_S = 240.0
ENDED = ("stopped", "error")
_TYPED = (200, 404, 409, 503)
"""What a control plane may answer about a sandbox. 500 would be a mistake of its own."""


@dataclass(kw_only=True, slots=True)
class Ledger:
    """What clients were told."""

    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The newest record of each sandbox, by runtime id."""
    wrongs: list[str] = field(default_factory=list)
    """What must not be."""
    lives: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Of data planes, by what came."""

    def take(self, record: dict[str, Any]) -> dict[str, Any]:
        """Hold a record against what was told before."""
        runtime_id = record["runtime_id"]
        before = self.told.get(runtime_id)
        if before is not None:
            if before["status"] in ENDED and record["status"] not in ENDED:
                self.wrongs.append(f"{runtime_id} was {before['status']} and is {record['status']} again")
            for name in ("url", "session_api_key", "session_id"):
                if before[name] != record[name]:
                    self.wrongs.append(f"{name} of {runtime_id} has changed")
        if record["status"] == "error" and not record["failure_kind"]:
            self.wrongs.append(f"{runtime_id} has failed, and nothing says why")
        self.told[runtime_id] = record
        return record


class Clients:
    """Lives the lives of so many sandboxes. The controller may be away at any moment."""

    def __init__(self, find: Callable[[], Endpoint | None], seed: int, ledger: Ledger) -> None:
        self._find = find
        self._seed = seed
        self._ledger = ledger
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(trust_env=False, timeout=_ASK_LIMIT_S, limits=limits)
        self.num_left = 0

    async def live_all(self, number: int, at_once: int) -> None:
        """Live `number` lives, so many at once."""
        turns = iter(range(number))
        self.num_left = number

        async def work() -> None:
            for index in turns:
                await self._live(index)
                self.num_left -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())

    async def settle(self) -> None:
        """Wait until all sandboxes have ended, and ask for each a last time."""
        deadline = time.monotonic() + _READY_LIMIT_S
        # Not for each: one that is asked for is not idle.
        while True:
            living = await self._list_living()
            if not living or time.monotonic() > deadline:
                break
            await asyncio.sleep(_RETRY_S)
        self._ledger.wrongs += [f"{one} does not end" for one in living]
        for runtime_id in list(self._ledger.told):
            await self._ask("GET", f"/runtime/{runtime_id}")

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _live(self, index: int) -> None:
        stream = random.Random(f"{self._seed}-{index}")
        kind = stream.choices(list(LIVES), weights=list(LIVES.values()))[0]
        self._ledger.lives[kind] += 1
        session_id = f"s{index}"
        body = {"image": "host", "command": SERVER, "session_id": session_id}
        record = await self._ask("POST", "/start", body)
        if record is None or kind == "unasked":
            return
        if kind == "hasty":
            await asyncio.sleep(stream.uniform(0.0, 0.1))
            await self._stop(record)
            return
        record = await self._wait_ready(session_id)
        if record is not None and record["status"] == "running":
            await self._use(record, stream, kind)
        if record is not None and kind != "abandoned":
            await self._stop(record)

    async def _use(self, record: dict[str, Any], stream: random.Random, kind: str) -> None:
        """Write a file, and read it later; leave processes, shared memory and files behind."""
        proof = uuid.uuid4().hex
        mess = "(setsid sleep 600 &) ; nohup sleep 600 >/dev/null 2>&1 &"
        if await self._run(record, f'echo {proof} > "$TMPDIR/proof"; {mess}') is None:
            return
        for _ in range(stream.randrange(1, 4)):
            await asyncio.sleep(stream.uniform(0.0, 1.0))
            if kind == "paused":
                for verb in ("pause", "resume"):
                    await self._ask("POST", f"/{verb}", {"runtime_id": record["runtime_id"]})
            said = await self._run(record, 'cat "$TMPDIR/proof"')
            if said is not None and said != f"{proof}\n":
                self._ledger.wrongs.append(f"{record['runtime_id']} read {said!r} for {proof}")
        asked = await self._ask("GET", f"/runtime/{record['runtime_id']}")
        if asked is not None and asked["status"] in ENDED and await self._run(record, "true") is not None:
            self._ledger.wrongs.append(f"{record['runtime_id']} was {asked['status']}, and ran a command")

    async def _run(self, record: dict[str, Any], command: str) -> str | None:
        """Return what a command has said that ended well, None for every other answer."""
        url = f"{record['url']}/api/bash/execute_bash_command"
        headers = {"X-Session-API-Key": record["session_api_key"]}
        body = {"command": command, "timeout": 20}
        try:
            answer = await self._http.post(url, json=body, headers=headers)
        except httpx.HTTPError as error:
            self._ledger.answers[type(error).__name__] += 1
            return None
        if answer.status_code != 200:
            self._ledger.answers[f"{answer.status_code}"] += 1
            if answer.status_code == 500:
                self._ledger.wrongs.append(f"a command was answered with 500: {answer.text[:200]}")
            return None
        told = answer.json()
        self._ledger.answers[f"exit code {told['exit_code']}"] += 1
        return (told["stdout"] or "") if told["exit_code"] == 0 else None

    async def _wait_ready(self, session_id: str) -> dict[str, Any] | None:
        """Ask for a session until it is ready or has ended; None if nobody knows it."""
        deadline = time.monotonic() + _READY_LIMIT_S
        while True:
            record = await self._ask("GET", f"/sessions/{session_id}")
            if record is None or record["status"] in ("running", *ENDED):
                return record
            if time.monotonic() > deadline:
                self._ledger.wrongs.append(f"{record['runtime_id']} is {record['status']} for ever")
                return None

    async def _stop(self, record: dict[str, Any]) -> None:
        await self._ask("POST", "/stop", {"runtime_id": record["runtime_id"]})

    async def _list_living(self) -> list[str]:
        answer = await self._send("GET", "/list")
        if answer is None:
            return ["no controller"]
        return [one["runtime_id"] for one in answer.json()["runtimes"] if one["status"] not in ENDED]

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Ask the controller until it answers; None if it does not do it, or knows nothing of it."""
        deadline = time.monotonic() + _READY_LIMIT_S
        while time.monotonic() < deadline:
            answer = await self._send(method, path, body)
            if answer is not None:
                return self._read(method, path, answer)
            await asyncio.sleep(_RETRY_S)
        self._ledger.wrongs.append(f"{method} {path} was never answered")
        return None

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response | None:
        endpoint = self._find()
        if endpoint is None:
            return None
        headers = {"X-API-Key": endpoint.key}
        try:
            return await self._http.request(method, endpoint.url + path, json=body, headers=headers)
        except httpx.HTTPError:
            return None

    def _read(self, method: str, path: str, answer: httpx.Response) -> dict[str, Any] | None:
        if answer.status_code == 200:
            return self._ledger.take(answer.json())
        if answer.status_code not in _TYPED or "detail" not in answer.text:
            self._ledger.wrongs.append(
                f"{method} {path} was answered {answer.status_code}: {answer.text[:200]}"
            )
        elif answer.status_code == 404 and path.startswith("/runtime/"):
            self._ledger.wrongs.append(f"{path} is known to nobody any more")
        return None
