"""The processes in which other packages play their environments; equal settings share one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from strop.environments.guests.process import Process
from strop.errors import ConfigError
from strop.rollout import FailureOwner
from strop.tasks.failures import AttemptFailed

_HOST = Path(__file__).with_name("host.py")
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE")
"""Environment variables that a guest inherits: none of the run's keys."""
_START_S = 300.0
"""Limit of a package's import; on a busy machine some take half a minute."""
_log_path: Path | None = None
_starting = threading.Lock()
_running: dict[tuple[Path, str], Guest] = {}


def log_guests(path: Path) -> None:
    """Append what guests print from now on to a file; without one it goes to standard error."""
    global _log_path  # noqa: PLW0603  (one log for each process)
    _log_path = path


class Guest(Process):
    """A process that plays another package's environments."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    async def do(self, do: str, **arguments: Any) -> Any:
        """Call a method of the guest; a cancellation is passed on to it. Raises: AttemptFailed."""
        try:
            return await super().do(do, **arguments)
        except OSError as error:
            detail = f"its process has ended; what it said: {_log_path or 'on standard error'}"
            raise AttemptFailed(FailureOwner.INFRA, "guest_lost", detail) from error
        except RuntimeError as error:
            raise AttemptFailed(FailureOwner.TASK, "guest_failed", str(error)) from error


def running() -> list[Guest]:
    """Return the running guests of this process."""
    return [guest for guest in _running.values() if guest.is_alive]


def guest_of(python: Path, settings: Mapping[str, Any]) -> Guest:
    """Return verifiers' process for these settings; start one if none is running. Raises: ConfigError."""
    key = (python, json.dumps(settings, sort_keys=True))
    argv = [str(python), str(_HOST), "for_verifiers"]
    env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    # An earlier run's folder may be gone.
    log = _log_path if _log_path is not None and _log_path.parent.is_dir() else None
    with _starting:
        if key in _running and _running[key].is_alive:
            return _running[key]
        try:
            with nullcontext() if log is None else log.open("ab") as stderr:
                _running[key] = Guest(argv, settings, _START_S, env=env, stderr=stderr)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"verifiers cannot begin: {error}",
                allowed="an environment that loads",
                next_step=f"correct its settings; what the package said: {log or 'above'}",
            ) from error
        return _running[key]
