"""strop's client of a guest process; equal settings share one process until this process ends."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any

from strop.errors import ConfigError
from strop.rollout import FailureOwner
from strop.tasks.failures import AttemptFailed

_log = logging.getLogger("strop.environments.guests")
_HOST = Path(__file__).with_name("host.py")
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE")
"""Environment variables that a guest inherits: none of the run's keys."""
_LAST_WORDS_BYTES = 2000
_START_S = 300.0
"""Limit of a package's import; on a busy machine some take half a minute."""
_END_S = 5.0
_CHUNK_BYTES = 1 << 16
_LAST_WORDS_S = 1.0


class GuestLost(Exception):
    """The process of a guest has ended."""


class Guest:
    """A process that plays another package's environments. Usable from any thread and event loop."""

    def __init__(self, python: Path, module: str, settings: str) -> None:
        """Start it. `settings`: the arguments of the module's `Guest`, as JSON. Raises: ConfigError."""
        self._name = Path(module).stem
        self._last_words = b""
        self._pending: dict[int, Future[Any]] = {0: Future()}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.is_alive = True
        self._process = subprocess.Popen(
            [str(python), str(_HOST), str(_HOST.with_name(module))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,
        )
        self.pid = self._process.pid
        atexit.register(self.end)
        threading.Thread(target=self._read_answers, daemon=True).start()
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        self._write(settings)
        try:
            self._pending[0].result(_START_S)
        except (RuntimeError, GuestLost, TimeoutError) as error:
            self.end()
            raise ConfigError(
                f"{self._name} cannot begin: {error}",
                allowed="an environment that loads",
                next_step=f"correct its settings; the package's own last words: {self._decode_last_words()}",
            ) from error

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method of the guest and wait. Raises: RuntimeError with the guest's error; GuestLost."""
        return self._send(do, arguments)[1].result()

    async def do(self, do: str, **arguments: Any) -> Any:
        """Call a method of the guest; a cancellation is passed on to it. Raises: AttemptFailed."""
        try:
            number, answer = self._send(do, arguments)
            try:
                return await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                self._write(json.dumps({"id": 0, "do": "cancel", "other": number}))
                raise
        except GuestLost as error:
            raise AttemptFailed(FailureOwner.INFRA, "guest_lost", str(error)) from error
        except RuntimeError as error:
            raise AttemptFailed(FailureOwner.TASK, "guest_failed", str(error)) from error

    def end(self) -> None:
        """End the process."""
        self.is_alive = False
        atexit.unregister(self.end)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, do: str, arguments: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        with self._lock:
            if not self.is_alive:
                raise self._lost()
            number = next(self._numbers)
            answer = self._pending[number] = Future()
        self._write(json.dumps({**arguments, "id": number, "do": do}))
        return number, answer

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                # It has ended: `_read_answers` fails every pending request.
                return

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                request = self._pending.pop(answer["id"], None)
            if request is None or not request.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                request.set_exception(RuntimeError(f"{answer['kind']}: {answer['error']}"))
            else:
                request.set_result(answer["found"])
        self._process.stdout.close()
        with self._lock:
            self.is_alive = False
            left = [*self._pending.values()]
            self._pending.clear()
        for request in left:
            if request.set_running_or_notify_cancel():
                request.set_exception(self._lost())

    def _read_stderr(self) -> None:
        """Log the package's output."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while data := os.read(stream.fileno(), _CHUNK_BYTES):
                self._last_words = (self._last_words + data)[-_LAST_WORDS_BYTES:]
                _log.info("%s %d:\n%s", self._name, self.pid, data.decode(errors="replace").rstrip())

    def _lost(self) -> GuestLost:
        return GuestLost(f"its process has ended; its last words: {self._decode_last_words()}")

    def _decode_last_words(self) -> str:
        self._stderr_reader.join(_LAST_WORDS_S)
        return self._last_words.decode(errors="replace").strip() or "none"


def log_guests(where: Path | IO[str]) -> None:
    """Write what guests print to a stream, or to a file, of which the last 8 to 16 MiB are kept."""
    handler: logging.Handler = logging.StreamHandler(None if isinstance(where, Path) else where)
    if isinstance(where, Path):
        handler = RotatingFileHandler(where, maxBytes=8 << 20, backupCount=1, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for earlier in _log.handlers[:]:
        _log.removeHandler(earlier)
        earlier.close()
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


_starting = threading.Lock()
_running: dict[tuple[Path, str, str], Guest] = {}


def running() -> list[Guest]:
    """Return the running guests of this process."""
    return [guest for guest in _running.values() if guest.is_alive]


def guest_of(python: Path, module: str, settings: Mapping[str, Any]) -> Guest:
    """Return the process for these settings; start one if none is running.

    Raises: ConfigError like `Guest`.
    """
    key = (python, module, json.dumps(settings, sort_keys=True))
    with _starting:
        if key not in _running or not _running[key].is_alive:
            _running[key] = Guest(*key)
        return _running[key]
