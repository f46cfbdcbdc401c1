"""How strop asks a guest: one process for equal settings, as long as this process lives."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.environments.printed import tell
from strop.errors import ConfigError
from strop.rollout import FailureOwner
from strop.tasks.failures import AttemptFailed

_HOST = Path(__file__).with_name("host.py")
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE")
"""What it finds of this process's environment: no keys of the run's."""
_TOLD_CHARS = 2000
_START_S = 300.0
"""Wall time that importing a package may take; on a busy machine some take half a minute."""
_END_S = 5.0
_CHUNK_BYTES = 1 << 16
_LAST_WORDS_S = 1.0


class GuestLost(Exception):
    """The process of a guest has ended."""


class Guest:
    """A process that plays another package's worlds. May be asked from any thread and event loop."""

    def __init__(self, python: Path, module: str, settings: str) -> None:
        """Start it. `settings`: of the module's `Guest`, as JSON. Raises: ConfigError if it cannot."""
        self._name = Path(module).stem
        self._last_words = b""
        self._asked: dict[int, Future[Any]] = {0: Future()}
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
        threading.Thread(target=self._hear, daemon=True).start()
        self._overhearing = threading.Thread(target=self._overhear, daemon=True)
        self._overhearing.start()
        self._write(settings)
        try:
            self._asked[0].result(_START_S)
        except (RuntimeError, GuestLost, TimeoutError) as error:
            self.end()
            raise ConfigError(
                f"{self._name} cannot begin: {error}",
                allowed="an environment that loads",
                next_step=f"correct its settings; the package's own last words: {self._tell_last_words()}",
            ) from error

    def ask(self, do: str, **given: Any) -> Any:
        """Have it do something, and wait. Raises: RuntimeError with what it raised; GuestLost."""
        return self._send(do, given)[1].result()

    async def do(self, do: str, **given: Any) -> Any:
        """Have it do something; where this is cancelled, so is that. Raises: AttemptFailed."""
        try:
            number, found = self._send(do, given)
            try:
                return await asyncio.wrap_future(found)
            except asyncio.CancelledError:
                self._write(json.dumps({"id": 0, "do": "cancel", "other": number}))
                raise
        except GuestLost as error:
            raise AttemptFailed(FailureOwner.INFRA, "guest_lost", str(error)) from error
        except RuntimeError as error:
            raise AttemptFailed(FailureOwner.TASK, "guest_failed", str(error)) from error

    def end(self) -> None:
        """End it."""
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

    def _send(self, do: str, given: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        with self._lock:
            if not self.is_alive:
                raise GuestLost(self._why())
            number = next(self._numbers)
            found = self._asked[number] = Future()
        self._write(json.dumps({**given, "id": number, "do": do}))
        return number, found

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                # It has ended: `_hear` fails every request that still waits.
                return

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                asked = self._asked.pop(answer["id"], None)
            if asked is None or not asked.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                asked.set_exception(RuntimeError(f"{answer['kind']}: {answer['error']}"))
            else:
                asked.set_result(answer["found"])
        self._process.stdout.close()
        with self._lock:
            self.is_alive = False
            left = [*self._asked.values()]
            self._asked.clear()
        for asked in left:
            if asked.set_running_or_notify_cancel():
                asked.set_exception(GuestLost(self._why()))

    def _overhear(self) -> None:
        """Keep what the package prints; see `printed`."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while data := os.read(stream.fileno(), _CHUNK_BYTES):
                self._last_words = (self._last_words + data)[-_TOLD_CHARS:]
                tell(f"{self._name} {self.pid}", "stderr", data)

    def _why(self) -> str:
        return f"its process has ended; its last words: {self._tell_last_words()}"

    def _tell_last_words(self) -> str:
        self._overhearing.join(_LAST_WORDS_S)
        return self._last_words.decode(errors="replace").strip() or "none"


_starting = threading.Lock()
_running: dict[tuple[Path, str, str], Guest] = {}


def running() -> list[Guest]:
    """Return the guests of this process."""
    return [guest for guest in _running.values() if guest.is_alive]


def guest_of(python: Path, module: str, settings: Mapping[str, Any]) -> Guest:
    """Return the process for these settings, started where there is none or it has ended.

    Raises: ConfigError like `Guest`.
    """
    key = (python, module, json.dumps(settings, sort_keys=True))
    with _starting:
        if key not in _running or not _running[key].is_alive:
            _running[key] = Guest(*key)
        return _running[key]
