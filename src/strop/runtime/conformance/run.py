"""Runs the conformance cases and yields their results.

`real_client.py` runs cases 1 to 18 in its environment. Cases 19 to 24 are here: a plain client sends the
requests of the clients that cannot be installed beside the real one. The bodies and the order of the calls
are those of openhands-ai before 1.11 (`RemoteRuntime`) and of 1.11.0 (`RemoteSandboxService`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strop.errors import ConfigError, StropError
from strop.runtime.openhands import OPENHANDS
from strop.store.python_environment import ensure_environment

if TYPE_CHECKING:
    import httpx

CASES: Mapping[int, str] = {
    1: "a fresh start, used and stopped",
    2: "results of commands",
    3: "attach to one that runs",
    4: "attach to one that is paused",
    5: "attach, and its resume fails",
    6: "two start one session at once",
    7: "a slow start",
    8: "a fast start is cheap",
    9: "an image that there is not",
    10: "an image without an agent server",
    11: "the server dies of memory",
    12: "wrong key, empty key",
    13: "wrong session key",
    14: "pause and resume",
    15: "time-outs and what survives them",
    16: "the service restarts",
    17: "many at once",
    18: "stop twice, stop of the unknown, garbage collection",
    19: "the shape of every address",
    20: "bodies of all dialects",
    21: "RemoteRuntime: from start to stop",
    22: "RemoteRuntime: a paused data plane",
    23: "RemoteSandboxService: from list to list",
    24: "the words of every state",
}
EXTRAS = ("slow_image", "no_agent_image", "oom_image", "restart")
"""An image that is slow to start, one without an agent server, one that needs too much memory; a shell
command that restarts the service."""
_LAST_REAL = 18
_DRIVER = Path(__file__).with_name("real_client.py")
# OpenHands' modules never become garbage; collections that walk them took 3 of 7 s.
_BEGIN = (
    "import atexit, gc, runpy; gc.disable(); import openhands.workspace; gc.freeze(); gc.enable();"
    f" atexit.register(gc.freeze); runpy.run_path({str(_DRIVER)!r}, run_name='__main__')"
)
_SHOWN_CHARACTERS = 2000
# No look-up of prices in the network.
_CLIENT_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": ""}
_AGENT = ["/usr/local/bin/openhands-agent-server", "--port", "60000"]
_ADDRESS = re.compile(r"^https?://[^/]+:[0-9]+$")
_POLL_S = 0.2
_WORDS = frozenset(
    {
        ("starting", "pending"),
        ("starting", "running"),
        ("running", "ready"),
        ("paused", "not found"),
        ("stopped", "not found"),
        ("error", "failed"),
        ("error", "unknown"),
        ("error", "crashloopbackoff"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceOptions:
    """The image, the sizes and the limits of the cases."""

    image: str = "host"
    extra: Mapping[str, str] = field(default_factory=dict)
    """Images and commands that single cases need, by `EXTRAS`."""
    many: int = 64
    start_limit_s: float = 120.0
    cases: tuple[int, ...] = tuple(CASES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """The result of one case."""

    number: int
    status: Literal["passed", "failed", "not run"]
    detail: str = ""
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """The name of the case."""
        return CASES[self.number]


def read_options(words: Sequence[str]) -> ConformanceOptions:
    """Return the options of words such as cases=1,17, image=NAME, many=64, or one of `EXTRAS`.

    Raises: ConfigError for an unknown name or an invalid number.
    """
    values = dict(word.partition("=")[::2] for word in words)
    names = ("cases", "image", "many", *EXTRAS)
    for name, value in values.items():
        if name not in names:
            raise ConfigError(
                f"{name}={value} is not known", allowed=", ".join(names), next_step="name one of them"
            )
    cases = values.get("cases", ",".join(map(str, CASES))).split(",")
    for name, numbers in (("cases", cases), ("many", [values.get("many", "64")])):
        if not all(number.isdecimal() and int(number) for number in numbers):
            raise ConfigError(
                f"{name}={','.join(numbers)} is not allowed",
                allowed="cases=1,17 names some of the matrix; many=64 is a number of clients, from 1 on",
                next_step=f"correct {name}",
            )
    return ConformanceOptions(
        image=values.get("image", "host"),
        many=int(values.get("many", 64)),
        cases=tuple(map(int, cases)),
        extra={name: values[name] for name in EXTRAS if name in values},
    )


def run_conformance(
    url: str, key: str, options: ConformanceOptions, *, say: Callable[[str], None]
) -> Iterator[CaseResult]:
    """Yield the results of the cases in their order, as they end.

    Raises: StoreError if OpenHands' environment cannot be made; ConfigError for an unknown case, or if the
        real client does not start.
    """
    unknown = [number for number in options.cases if number not in CASES]
    if unknown:
        raise ConfigError(f"case {unknown[0]}", allowed=f"1 to {max(CASES)}", next_step="name one of them")
    real = [number for number in options.cases if number <= _LAST_REAL]
    if real:
        yield from run_real_client(url, key, options, real, say=say)
    client = PlainClient(url=url, key=key, options=options)
    for number in options.cases:
        if number > _LAST_REAL:
            yield _replay(number, client)


def run_real_client(
    url: str, key: str, options: ConformanceOptions, cases: list[int], *, say: Callable[[str], None]
) -> Iterator[CaseResult]:
    """Yield the results of the real client's cases. Raises: as `run_conformance`."""
    python = ensure_environment(OPENHANDS, say=say)
    order = {
        "url": url.rstrip("/"),
        "key": key,
        "image": options.image,
        "extra": dict(options.extra),
        "many": options.many,
        "start_limit_s": options.start_limit_s,
        "cases": cases,
    }
    left = list(cases)
    with tempfile.TemporaryFile() as errors:
        # The key goes through standard input: any user can read a command line.
        with subprocess.Popen(
            [str(python), "-c", _BEGIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **_CLIENT_ENV},
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{json.dumps(order)}\n".encode())
            child.stdin.close()
            for line in child.stdout:
                result = _read(line)
                if result is not None:
                    left.remove(result.number)
                    yield result
        if left:
            errors.seek(0)
            output = errors.read().decode(errors="replace")[-_SHOWN_CHARACTERS:]
            raise ConfigError(
                f"the real client ended with code {child.returncode} before case {left[0]}: {output}",
                allowed="a client that runs all cases",
                next_step="mend what its last line names",
            )


def _read(line: bytes) -> CaseResult | None:
    """Return the result of a line, None for other lines, which the client's libraries may print."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return CaseResult(**content) if isinstance(content, dict) and "number" in content else None


def _replay(number: int, client: PlainClient) -> CaseResult:
    import httpx

    began = time.monotonic()
    status: Literal["passed", "failed", "not run"] = "passed"
    detail = ""
    try:
        REPLAYS[number](client)
    except NotRunHere as reason:
        status, detail = "not run", str(reason)
    except (AssertionError, StropError, httpx.HTTPError, LookupError, ValueError) as error:
        status, detail = "failed", f"{type(error).__name__}: {error}"
    return CaseResult(number=number, status=status, detail=detail, seconds=time.monotonic() - began)


class NotRunHere(Exception):
    """A case needs an image or a command that the options do not name."""


@dataclass(kw_only=True)
class PlainClient:
    """A plain client, and all records that it received."""

    url: str
    key: str = field(repr=False)
    options: ConformanceOptions
    records: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request to the control plane."""
        import httpx

        headers = {"X-API-Key": self.key} if self.key else {}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60.0) as client:
            answer = client.request(method, path, **options)
        if answer.headers.get("content-type", "").startswith("application/json"):
            content = answer.json()
            if isinstance(content, dict) and "runtime_id" in content:
                self.records.append(content)
        return answer

    def record(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of its answer."""
        answer = self.ask(method, path, **options)
        require(answer.status_code == 200, f"{method} {path}: {answer.status_code} {answer.text[:200]}")
        content: dict[str, Any] = answer.json()
        return content

    def start(self, **changes: Any) -> dict[str, Any]:
        """Start a sandbox as RemoteSandboxService does."""
        body = {
            "image": self.options.image,
            "command": _AGENT,
            "working_dir": "/workspace",
            "environment": {"WORKER_1": "12000", "WORKER_2": "12001"},
            "session_id": f"conformance-{uuid.uuid4().hex[:12]}",
            "resource_factor": 1,
            "run_as_user": 10001,
            "run_as_group": 10001,
            "fs_group": 10001,
            **changes,
        }
        fields = {name: value for name, value in body.items() if value is not None}
        return self.record("POST", "/start", json=fields)

    def wait(self, path: str, name: str, word: str) -> dict[str, Any]:
        """Poll a record until a field has a value."""
        deadline = time.monotonic() + self.options.start_limit_s
        while True:
            record = self.record("GET", path)
            if record[name] == word:
                return record
            has_failed = record["pod_status"] in ("failed", "unknown", "crashloopbackoff")
            require(not has_failed and time.monotonic() < deadline, f"{name} is {record[name]}, not {word}")
            time.sleep(_POLL_S)

    @contextmanager
    def sandbox(self, **changes: Any) -> Iterator[dict[str, Any]]:
        """Start a sandbox, wait until it is ready, and stop it at the end."""
        started = self.start(**changes)
        try:
            yield self.wait(f"/sessions/{started['session_id']}", "pod_status", "ready")
        finally:
            self.ask("POST", "/stop", json={"runtime_id": started["runtime_id"]})

    def run(self, record: Mapping[str, Any], command: str) -> httpx.Response:
        """Run a command in a sandbox."""
        import httpx

        body = {"command": command, "timeout": 30}
        headers = {"X-Session-API-Key": record["session_api_key"]}
        url = f"{record['url']}/api/bash/execute_bash_command"
        return httpx.post(url, json=body, headers=headers, timeout=60.0)


def require(holds: object, message: str) -> None:
    """Fail the case unless a condition holds."""
    if not holds:
        raise AssertionError(message)


def see_addresses(client: PlainClient) -> None:
    """Case 19."""
    with client.sandbox():
        pass
    for record in client.records:
        require(_ADDRESS.match(record["url"]), f"url {record['url']}")


def take_all_bodies(client: PlainClient) -> None:
    """Case 20."""
    for changes in (
        {"command": " ".join(_AGENT), "resource_factor": None},
        {"command": _AGENT, "resource_factor": 2, "runtime_class": "sysbox-runc"},
        {"command": _AGENT, "a_field_of_tomorrow": {"a": [1]}, "image_pull_policy": "IfNotPresent"},
    ):
        with client.sandbox(**changes) as record:
            result = client.run(record, "echo up").json()
            require(result["stdout"] == "up\n" and result["exit_code"] == 0, f"{changes}: {result}")


def follow_remote_runtime(client: PlainClient) -> None:
    """Case 21."""
    import httpx

    session = f"conformance-{uuid.uuid4().hex[:12]}"
    unknown = client.ask("GET", f"/sessions/{session}")
    require(unknown.status_code == 404, f"an unknown session: {unknown.status_code}")
    prefix = client.record("GET", "/registry_prefix")
    require(isinstance(prefix["registry_prefix"], str), f"{prefix}")
    body = {
        "image": client.options.image,
        "command": _AGENT,
        "working_dir": "/openhands/code/",
        "environment": {"DEBUG": "false"},
        "session_id": session,
        "resource_factor": 1,
    }
    started = client.record("POST", "/start", json=body)
    runtime_id = started["runtime_id"]
    try:
        ready = client.wait(f"/runtime/{runtime_id}", "pod_status", "ready")
        require(ready["runtime_id"] == runtime_id, f"{ready['runtime_id']} and not {runtime_id}")
        alive = httpx.get(f"{ready['url']}/alive", timeout=5.0)
        require(alive.status_code == 200, f"ready, and /alive answers {alive.status_code}")
    finally:
        stopped = client.record("POST", "/stop", json={"runtime_id": runtime_id})
    require(stopped["status"] == "stopped", f"after the stop it is {stopped['status']}")
    lost = client.ask("GET", "/runtime/made-up")
    require(lost.status_code == 404, f"an unknown runtime: {lost.status_code}")


def pause_the_data_plane(client: PlainClient) -> None:
    """Case 22."""
    with client.sandbox() as record:
        client.record("POST", "/pause", json={"runtime_id": record["runtime_id"]})
        paused = client.run(record, "echo up")
        require(paused.status_code == 503, f"a paused sandbox answers {paused.status_code}")
        client.record("POST", "/resume", json={"runtime_id": record["runtime_id"]})
        client.wait(f"/runtime/{record['runtime_id']}", "pod_status", "ready")
        resumed = client.run(record, "echo up")
        require(resumed.status_code == 200, f"after the resume it answers {resumed.status_code}")


def follow_sandbox_service(client: PlainClient) -> None:
    """Case 23."""
    before = client.record("GET", "/list")["runtimes"]
    began = time.monotonic()
    started = [client.start() for _ in range(2)]
    require(time.monotonic() - began < 15.0, "two starts took 15 s")
    names = [record["session_id"] for record in started]
    runtime_id = started[0]["runtime_id"]
    try:
        for name in names:
            client.wait(f"/sessions/{name}", "status", "running")
        batch = client.ask("GET", "/sessions/batch", params={"ids": [*names, "unknown"]}).json()
        require(isinstance(batch, list) and len(batch) == 2, f"batch: {str(batch)[:200]}")
        listed = client.record("GET", "/list")["runtimes"]
        require(set(names) <= {record["session_id"] for record in listed}, "a running one is not listed")
        paused = client.record("POST", "/pause", json={"runtime_id": runtime_id})
        resumed = client.record("POST", "/resume", json={"runtime_id": runtime_id})
        for record in (*batch, *listed, *started, paused, resumed):
            require("session_api_key" in record, "a record has no session_api_key")
        client.wait(f"/sessions/{names[0]}", "status", "running")
        require(isinstance(client.record("GET", "/api/warm-runtime-configs")["configs"], list), "configs")
    finally:
        for record in started:
            client.record("POST", "/stop", json={"runtime_id": record["runtime_id"]})
    after = client.record("GET", "/list")["runtimes"]
    left = {record["session_id"] for record in after} - {record["session_id"] for record in before}
    require(not left & set(names), "a stopped one is listed")


def see_words(client: PlainClient) -> None:
    """Case 24, over the records of the cases before it."""
    if not client.records:
        raise NotRunHere("needs another case before it")
    for record in client.records:
        pair = (record["status"], record["pod_status"])
        require(pair in _WORDS, f"status and pod_status are {pair}")
        require(isinstance(record["restart_count"], int), "restart_count is no number")


REPLAYS: Mapping[int, Callable[[PlainClient], None]] = {
    19: see_addresses,
    20: take_all_bodies,
    21: follow_remote_runtime,
    22: pause_the_data_plane,
    23: follow_sandbox_service,
    24: see_words,
}
