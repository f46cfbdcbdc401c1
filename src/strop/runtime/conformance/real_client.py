"""Drives the real `APIRemoteWorkspace` through cases 1 to 18, in OpenHands' own environment.

`run.run_real_client` starts it by path with that environment's Python, so it imports nothing of strop. It
reads one JSON object from standard input and writes a JSON line for each case to standard output. The client
is unmodified; its transport is watched, and can be made to fail a request.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from openhands.workspace import APIRemoteWorkspace
from openhands.workspace.remote_api import workspace as client_module
from pydantic import ValidationError

_ORDER = json.loads(sys.stdin.readline())
_RESULTS = os.fdopen(os.dup(1), "w")
_URL: str = _ORDER["url"]
_QUICK_S = 1.5
_ADDRESS = re.compile(r"^https?://[^/]+:[0-9]+$")
_BEATS = "while :; do date +%s%N; sleep 0.02; done >> {path}"


_FAILURES: tuple[type[Exception], ...] = (
    *(AssertionError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(httpx.HTTPError, subprocess.SubprocessError),
)


class NotRun(Exception):
    """A case needs an image or a command that the options do not name."""


class Watch:
    """The requests of clients since it began, and the requests that are to fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int, float]] = []
        """Method and path without ids, status, seconds."""
        self.records: list[dict[str, Any]] = []
        self.failing: set[str] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[dict[str, Any]]:
        """Note a call when it is answered; status 0 if it is not."""
        answer: dict[str, Any] = {"status": 0, "content": b""}
        began = time.monotonic()
        try:
            yield answer
        finally:
            with self._lock, contextlib.suppress(ValueError):
                method, path = name.split(" ", 1)
                known = ("/sessions", "/api/bash", "/api/file", "/api/git")
                path = next((prefix for prefix in known if path.startswith(prefix)), path)
                self.calls.append((method, path, answer["status"], time.monotonic() - began))
                content = json.loads(answer["content"] or b"null")
                if isinstance(content, dict) and "runtime_id" in content:
                    self.records.append(content)

    def names(self) -> list[str]:
        """Return method and path of the calls, without successive duplicates."""
        return [
            name for name, _ in itertools.groupby(f"{method} {path}" for method, path, _, _ in self.calls)
        ]


_watches = [Watch()]
_send = httpx.Client.send
_urlopen = client_module.urlopen


def _watched_send(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
    name, watch = f"{request.method} {request.url.path}", _watches[-1]
    if name in watch.failing:
        return httpx.Response(500, json={"detail": "a fault that was put here"}, request=request)
    with watch.timing(name) as noted:
        answer = _send(self, request, **options)
        noted["status"] = answer.status_code
        noted["content"] = answer.content if str(request.url).startswith(_URL) else b""
    return answer


def _watched_urlopen(url: str, **options: Any) -> Any:
    with _watches[-1].timing("GET /" + url.split("/", 3)[-1]) as noted:
        answer = _urlopen(url, **options)
        noted["status"] = answer.status
    return answer


httpx.Client.send = _watched_send  # type: ignore[method-assign]
client_module.urlopen = _watched_urlopen


def build(**changes: Any) -> APIRemoteWorkspace:
    """Construct a client, which starts or attaches."""
    settings = {
        "runtime_api_url": _URL,
        "runtime_api_key": _ORDER["key"],
        "server_image": _ORDER["image"],
        "session_id": f"conformance-{uuid.uuid4().hex[:12]}",
        "working_dir": "/tmp",
        "image_pull_policy": "IfNotPresent",
        "init_timeout": 60.0,
        "startup_wait_timeout": _ORDER["start_limit_s"],
        **changes,
    }
    return APIRemoteWorkspace(**settings)


@contextlib.contextmanager
def watching(failing: tuple[str, ...] = ()) -> Iterator[Watch]:
    """Watch the requests of the block."""
    watch = Watch()
    watch.failing = set(failing)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


def check(holds: object, message: str) -> None:
    """Fail the case unless a condition holds."""
    if not holds:
        raise AssertionError(message)


def ask(method: str, path: str, body: Any = None) -> httpx.Response:
    """Send a request to the control plane directly."""
    headers = {"X-API-Key": _ORDER["key"]} if _ORDER["key"] else {}
    return httpx.request(method, f"{_URL}{path}", json=body, headers=headers, timeout=60.0)


def require_gone(url: str) -> None:
    """Wait until nothing listens at a stopped sandbox's address."""
    for _ in range(100):
        try:
            httpx.get(f"{url}/health", timeout=2.0)
        except httpx.ConnectError:
            return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{url} still answers after the stop")


def check_up(client: APIRemoteWorkspace) -> None:
    """Run a command."""
    result = client.execute_command("echo up", timeout=60.0)
    check(result.stdout == "up\n", f"no command works: {result}")


def facts_of(client: APIRemoteWorkspace) -> tuple[str | None, str | None, str | None]:
    """Return what identifies a sandbox to its client."""
    return client._runtime_id, client._runtime_url, client._session_api_key


def require_extra(name: str) -> str:
    """Return an image or a command that a case needs. Raises: NotRun."""
    value = _ORDER["extra"].get(name)
    if not value:
        raise NotRun(f"needs --with {name}=...")
    return str(value)


def _fresh_start() -> None:
    blob = bytes(range(256)) * 4096
    proof = uuid.uuid4().hex
    with watching() as watch, build() as client:
        url = client.host
        result = client.execute_command(f"echo {proof} > /tmp/{proof}; exit 3", timeout=10.0)
        check(result.exit_code == 3, f"exit code {result}")
        # Without a private file system the file appears on the host.
        is_apart = (watch.records[-1].get("isolation") or {}).get("mountns", True)
        check(not is_apart or not Path(f"/tmp/{proof}").exists(), "it ran on the client's host")
        check(client.alive, "it is not alive")
        sent = client.file_upload(blob, f"/tmp/{proof}-blob")
        check(sent.success and sent.file_size == len(blob), f"upload: {sent}")
        with tempfile.TemporaryDirectory() as folder:
            received = client.file_download(f"/tmp/{proof}-blob", f"{folder}/blob")
            check(received.success and Path(folder, "blob").read_bytes() == blob, f"download: {received}")
            lost = client.file_download(f"/tmp/{proof}-none", f"{folder}/none")
        check(not lost.success and lost.error, f"download of what is not there: {lost}")
        check(client.git_changes("/tmp") == [], "changes where there is no repository")
        check(client.get_server_info()["version"], "server info has no version")
    require_gone(url)
    names = [name for name in watch.names() if "/api/" not in name and name != "GET /server_info"]
    distinct = [name for name, _ in itertools.groupby(names)]
    first = ["GET /sessions", "POST /start", "GET /sessions", "GET /health"]
    check(distinct[:4] == first and distinct[-1] == "POST /stop", f"asked for {distinct}")
    check(watch.calls[0][2] == 404, "an unknown session is not 404")
    slowest = max(call[3] for call in watch.calls if call[1] == "/start")
    check(slowest < 1.0, f"/start took {slowest:.2f} s")
    for record in watch.records:
        check(_ADDRESS.match(record["url"]), f"url {record['url']}")


def _command_results() -> None:
    with build() as client:

        def run(text: str, **options: Any) -> Any:
            return client.execute_command(text, timeout=options.pop("timeout", 20.0), **options)

        check(run("exit 3").exit_code == 3, "exit 3")
        check(run("kill -9 $$").exit_code == -9, "kill -9 $$")
        lost = run("true", cwd="/no/such/directory")
        check(lost.exit_code == -1 and lost.stderr, f"a missing directory: {lost}")
        long = run("head -c 2500000 /dev/zero | tr '\\0' x")
        check(len(long.stdout) == 2_500_000, f"{len(long.stdout)} characters of 2500000")
        odd = run("printf '\\377\\376ok'")
        check(odd.exit_code == 0 and odd.stdout.endswith("ok") and "\ufffd" in odd.stdout, f"{odd}")


def _attach_to_running() -> None:
    with build() as first:
        first.execute_command("echo shared > /tmp/shared-file", timeout=10.0)
        with watching() as watch:
            second = build(session_id=first.session_id, keep_alive=True)
        check("POST /start" not in watch.names(), f"asked for {watch.names()}")
        check(facts_of(first) == facts_of(second), "another sandbox, address or key")
        content = second.execute_command("cat /tmp/shared-file", timeout=10.0).stdout
        check(content == "shared\n", f"its files: {content!r}")
        second.cleanup()
        check(first.alive, "a client that keeps it alive has ended it")


def _attach_to_paused() -> None:
    session = f"conformance-{uuid.uuid4().hex[:12]}"
    path = f"/tmp/beats-{session}"
    with build(session_id=session, pause_on_close=True) as first:
        before = facts_of(first)
        first.start_command(_BEATS.format(path=path), timeout=300)
    check(ask("GET", f"/sessions/{session}").json()["status"] == "paused", "it is not paused")
    with watching() as watch:
        second = build(session_id=session)
    expected = ["GET /sessions", "POST /resume", "GET /sessions", "GET /health"]
    check(watch.names() == expected, f"asked for {watch.names()}")
    check(facts_of(second) == before, "another sandbox, address or key")
    ends = [second.execute_command(f"tail -n 1 {path}; sleep 0.2", timeout=10.0).stdout for _ in range(2)]
    check(ends[0] and ends[0] != ends[1], f"its process does not go on: {ends}")
    second.cleanup()


def _resume_fails() -> None:
    session = f"conformance-{uuid.uuid4().hex[:12]}"
    build(session_id=session, pause_on_close=True).cleanup()
    with watching(failing=("POST /resume",)) as watch:
        client = build(session_id=session)
    check("POST /start" in watch.names(), f"asked for {watch.names()}")
    check_up(client)
    listed = [one["session_id"] for one in ask("GET", "/list").json()["runtimes"]]
    check(listed.count(session) == 1, f"{listed.count(session)} sandboxes of one session")
    client.cleanup()


def _double_start() -> None:
    session = f"conformance-{uuid.uuid4().hex[:12]}"
    clients = in_threads([lambda: build(session_id=session)] * 2)
    check(facts_of(clients[0]) == facts_of(clients[1]), "two sandboxes of one session")
    for work in (check_up, APIRemoteWorkspace.cleanup):
        for client in clients:
            work(client)


def _slow_start() -> None:
    with watching() as watch:
        build(server_image=require_extra("slow_image"), image_pull_policy="IfNotPresent").cleanup()
    words = [record["pod_status"] for record in watch.records]
    seen = [word for word, _ in itertools.groupby(words) if word != "not found"]
    is_ordered = seen == [word for word in ("pending", "running", "ready") if word in seen]
    check(is_ordered and "ready" in seen, f"states in the order {seen}")
    check(all(call[2] < 500 for call in watch.calls), "a status of 500 or more")


def _fast_start_is_cheap() -> None:
    began, began_at = time.monotonic(), time.time()
    with watching() as watch, build():
        took_s = time.monotonic() - began
    timeline = watch.records[-2].get("timeline") or {}
    # The sandbox's own start does not count.
    ready_s = max(0.0, timeline.get("ready", began_at) - began_at)
    check(took_s - ready_s < _QUICK_S - 0.7, f"{took_s:.2f} s, of which the sandbox took {ready_s:.2f} s")


def _missing_image() -> None:
    image = "localhost/there-is-no-such-image:1"
    error = _error_of("image_error", server_image=image, image_pull_policy="Never")
    check(image in error, f"the error does not name the image: {error}")


def _no_agent_server() -> None:
    began = time.monotonic()
    error = _error_of("image_error agent_error", server_image=require_extra("no_agent_image"))
    check("Pod logs" in error, f"no log lines: {error}")
    check(time.monotonic() - began < 10.0, f"it took {time.monotonic() - began:.1f} s")


def _out_of_memory() -> None:
    error = _error_of("task_oom", server_image=require_extra("oom_image"))
    check("possibly OOM" in error, f"the error is {error}")


def _error_of(kinds: str, **changes: Any) -> str:
    """Return the error of a client whose sandbox must fail; check the failure kind in its record."""
    session = f"conformance-{uuid.uuid4().hex[:12]}"
    try:
        build(session_id=session, **changes)
    except ValidationError as error:
        record = ask("GET", f"/sessions/{session}").json()
        check(
            record.get("failure_kind", kinds.split(maxsplit=1)[0]) in kinds.split(),
            f"kind {record.get('failure_kind')}",
        )
        return str(error)[:500]
    raise AssertionError("it started")


def _wrong_key() -> None:
    if not _ORDER["key"]:
        raise NotRun("the server asks for no key")
    for key in ("wrong", ""):
        with watching() as watch:
            try:
                build(runtime_api_key=key)
            except httpx.HTTPStatusError as error:
                check(error.response.status_code == 401, f"status {error.response.status_code}")
            else:
                raise AssertionError(f"key {key!r} was taken")
        check(watch.names() == ["GET /sessions"], f"asked for {watch.names()}")


def _wrong_session_key() -> None:
    with build() as client:
        client.api_key = "wrong"
        client.reset_client()
        result = client.execute_command("true", timeout=10.0)
        output = f"{result.exit_code} {result.stderr}"
        check("Remote execution error" in output and "401" in output, output)


def _pause_and_resume() -> None:
    path = f"/tmp/beats-{uuid.uuid4().hex}"
    with build() as client:
        before = facts_of(client)
        client.start_command(_BEATS.format(path=path), timeout=300)
        time.sleep(0.3)
        client.pause()
        paused_at = time.monotonic()
        answer = httpx.get(f"{client.host}/health", timeout=10.0)
        check(answer.status_code == 503, f"a paused sandbox answers {answer.status_code}")
        time.sleep(1.2)
        client.resume()
        paused_s = time.monotonic() - paused_at
        check(client.alive and facts_of(client) == before, "another sandbox, address or key")
        time.sleep(0.2)
        beats = [int(line) for line in client.execute_command(f"cat {path}", timeout=10.0).stdout.split()]
        longest_s = max(b - a for a, b in itertools.pairwise(beats)) / 1e9
        check(
            longest_s > 0.8, f"it ran while it was paused for {paused_s:.1f} s: gaps up to {longest_s:.2f} s"
        )


def _time_outs() -> None:
    word = f"31{uuid.uuid4().int % 10**6}"
    # A pattern that does not match its own command line.
    pattern = f"sleep {word[:2]}[{word[2]}]{word[3:]}"
    survivors = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '{pattern}'"
    with build() as client:
        for text in (f"sleep {word}", f"setsid sleep {word} & sleep {word}"):
            began = time.monotonic()
            result = client.execute_command(text, timeout=1.0)
            took_s = time.monotonic() - began
            check(took_s < 3.0, f"{text!r} took {took_s:.1f} s")
            check(result.timeout_occurred, f"{text!r}: {result}")
        time.sleep(1.0)
        left = client.execute_command(survivors, timeout=10.0).stdout.strip()
        check(left == "0", f"{left} processes survived their time-out")
        began = time.monotonic()
        result = client.execute_command(f"sleep {word} & echo on", timeout=20.0)
        check(time.monotonic() - began < 3.0, "a background child held the call")
        check((result.exit_code, result.stdout) == (0, "on\n"), f"{result}")


def _service_restarts() -> None:
    command = require_extra("restart")
    with build() as client:
        subprocess.run(["/bin/sh", "-c", command], check=True, timeout=60)
        deadline = time.monotonic() + 5.0
        while True:
            try:
                answer = ask("GET", f"/sessions/{client.session_id}")
                break
            except httpx.TransportError:
                check(time.monotonic() < deadline, "no answer 5 s after the restart")
                time.sleep(0.1)
        check(answer.json().get("runtime_id") == facts_of(client)[0], f"it forgot: {answer.text[:200]}")
        check_up(client)
        url = client.host
        with watching() as watch:
            client.cleanup()
        check(watch.calls[-1][2] == 200, f"stop: {watch.calls[-1]}")
        require_gone(url)


def _many_at_once() -> None:
    def use() -> None:
        client = build(startup_wait_timeout=300.0)
        try:
            check_up(client)
        finally:
            client.cleanup()

    with watching() as watch:
        in_threads([use] * int(_ORDER["many"]))
    bad = [call for call in watch.calls if call[2] >= 429]
    check(not bad, f"statuses of 429 or more: {bad[:3]}")


def _stop_twice() -> None:
    client = build()
    runtime_id = facts_of(client)[0]
    client.cleanup()
    client.cleanup()
    check(ask("POST", "/stop", {"runtime_id": runtime_id}).status_code == 200, "the second stop")
    check(ask("POST", "/stop", {"runtime_id": "made-up"}).status_code in (200, 404), "stop of the unknown")
    other = build()
    url = other.host
    del other, client
    gc.collect()
    require_gone(url)


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Run functions concurrently and return their results. Raises: AssertionError if any fails."""
    results: list[Any] = [None] * len(works)
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except _FAILURES as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise AssertionError(f"{len(errors)} of {len(works)} failed; one: {errors[0]!r}"[:600])
    return results


_CASES = (
    *(_fresh_start, _command_results, _attach_to_running, _attach_to_paused, _resume_fails, _double_start),
    *(_slow_start, _fast_start_is_cheap, _missing_image, _no_agent_server, _out_of_memory, _wrong_key),
    *(_wrong_session_key, _pause_and_resume, _time_outs, _service_restarts, _many_at_once, _stop_twice),
)
"""Case 1 first."""


def main() -> None:
    """Run the ordered cases."""
    for number in _ORDER["cases"]:
        began = time.monotonic()
        status, detail = "passed", ""
        try:
            _CASES[number - 1]()
        except NotRun as reason:
            status, detail = "not run", str(reason)
        except _FAILURES as error:
            status, detail = "failed", f"{type(error).__name__}: {error}"
        line = {"number": number, "status": status, "detail": detail, "seconds": time.monotonic() - began}
        print(json.dumps(line), file=_RESULTS, flush=True)


if __name__ == "__main__":
    main()
