"""The processes in which other packages play their environments; equal settings share one."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from strop.environments.guests.process import Process
from strop.errors import ConfigError
from strop.rollout import FailureOwner
from strop.tasks.failures import AttemptFailed

_HOST = Path(__file__).with_name("host.py")
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE")
"""Environment variables that a guest inherits: none of the run's keys."""
_LAST_WORDS_BYTES = 2000
_START_S = 300.0
"""Limit of a package's import; on a busy machine some take half a minute."""
_log_path: Path | None = None


def log_guests(path: Path) -> None:
    """Append what guests print from now on to a file; without one it is kept for their last words alone."""
    global _log_path  # noqa: PLW0603  (one log for each process)
    _log_path = path


class Guest(Process):
    """A process that plays another package's environments."""

    def __init__(self, python: Path, module: str, settings: Mapping[str, Any]) -> None:
        """Start it. `settings`: the arguments of the module's `start`. Raises: ConfigError."""
        self._errors: IO[bytes]
        # An earlier run's folder may be gone.
        if _log_path is not None and _log_path.parent.is_dir():
            self._errors = _log_path.open("a+b")
        else:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (`end` closes it)
        env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        argv = [str(python), str(_HOST), str(_HOST.with_name(module))]
        try:
            super().__init__(argv, settings, _START_S, env=env, stderr=self._errors)
        except (RuntimeError, OSError) as error:
            said = self._last_words()
            # There is none where the Python itself cannot be started.
            if hasattr(self, "process"):
                self.end()
            raise ConfigError(
                f"{Path(module).stem} cannot begin: {error}",
                allowed="an environment that loads",
                next_step=f"correct its settings; the package's own last words: {said}",
            ) from error

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    async def do(self, do: str, **arguments: Any) -> Any:
        """Call a method of the guest; a cancellation is passed on to it. Raises: AttemptFailed."""
        try:
            return await super().do(do, **arguments)
        except OSError as error:
            detail = f"its process has ended; its last words: {self._last_words()}"
            raise AttemptFailed(FailureOwner.INFRA, "guest_lost", detail) from error
        except RuntimeError as error:
            raise AttemptFailed(FailureOwner.TASK, "guest_failed", str(error)) from error

    def end(self) -> None:
        """End the process."""
        super().end()
        self._errors.close()

    def _last_words(self) -> str:
        if self._errors.closed:
            return "none"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_WORDS_BYTES))
        return self._errors.read().decode(errors="replace").strip() or "none"


_starting = threading.Lock()
_running: dict[tuple[Path, str, str], Guest] = {}


def running() -> list[Guest]:
    """Return the running guests of this process."""
    return [guest for guest in _running.values() if guest.is_alive]


def guest_of(python: Path, module: str, settings: Mapping[str, Any]) -> Guest:
    """Return the process for these settings; start one if none is running. Raises: ConfigError."""
    key = (python, module, json.dumps(settings, sort_keys=True))
    with _starting:
        if key not in _running or not _running[key].is_alive:
            _running[key] = Guest(python, module, settings)
        return _running[key]
