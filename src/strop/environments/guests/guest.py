"""The processes in which verifiers plays its environments (`for_verifiers`); equal settings share one.

A request is a POST of JSON on the process's Unix socket; a broken connection cancels it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from strop.environments.tools import run_here
from strop.errors import ConfigError
from strop.rollout import FailureOwner
from strop.tasks.failures import AttemptFailed

_SCRIPT = Path(__file__).with_name("for_verifiers.py")
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE")
"""Environment variables that a guest inherits: none of the run's keys."""
_START_S = 300.0
"""Limit of a package's import; on a busy machine some take half a minute."""
_starting = threading.Lock()
running: dict[tuple[Path, str], Guest] = {}
"""The guests of this process, by their Python and settings."""


class Guest:
    """A process that plays environments; usable from any thread and event loop, until this process ends."""

    def __init__(self, python: Path, settings: str) -> None:
        """Start it. Raises: RuntimeError with its error; OSError if it ends, or has not begun in time."""
        self._folder = tempfile.TemporaryDirectory(prefix="strop-guest-")
        self._socket = f"{self._folder.name}/socket"
        env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        argv, pipe = [str(python), str(_SCRIPT), self._socket], subprocess.PIPE
        # In another session, out of reach of the terminal's signals: this process ends it.
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=env, start_new_session=True)
        atexit.register(self.end)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with ExitStack() as failed:
            failed.callback(self.end)
            self.process.stdin.write(settings.encode() + b"\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], _START_S)[0]:
                raise TimeoutError(f"it has not begun after {_START_S:g} s")
            _read(self.process.stdout.readline())
            failed.pop_all()

    def list_tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the data of the first `number` tasks, or of all. Raises: AttemptFailed."""
        return list(run_here(self.play("tasks", number)))

    async def play(self, kind: str, *arguments: Any) -> Any:
        """Play an episode: `run`, or `replay`; a cancellation ends it. Raises: AttemptFailed."""
        transport = httpx.AsyncHTTPTransport(uds=self._socket)
        try:
            async with httpx.AsyncClient(transport=transport, timeout=None) as client:
                return _read((await client.post(f"http://guest/{kind}", json=arguments)).content)
        except httpx.TransportError as error:
            raise AttemptFailed(FailureOwner.INFRA, "guest_lost", "its process has ended") from error
        except RuntimeError as error:
            raise AttemptFailed(FailureOwner.TASK, "guest_failed", str(error)) from error

    def end(self) -> None:
        """End the process."""
        atexit.unregister(self.end)
        self.process.kill()
        self.process.communicate()
        self._folder.cleanup()


def _read(answer: bytes) -> Any:
    if not answer:
        raise ConnectionResetError("its process has ended")
    found = json.loads(answer)
    if "error" in found:
        raise RuntimeError(found["error"])
    return found["found"]


def guest_of(python: Path, settings: Mapping[str, Any]) -> Guest:
    """Return verifiers' process for these settings; start one if none is running. Raises: ConfigError."""
    key = (python, json.dumps(settings, sort_keys=True))
    with _starting:
        if key in running and running[key].process.poll() is None:
            return running[key]
        try:
            running[key] = Guest(*key)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"verifiers cannot begin: {error}",
                allowed="an environment that loads",
                next_step="correct its settings; what the package said stands above",
            ) from error
        return running[key]
