"""An engine in a child process, from its start to its end.

The child dies with this process, however it ends, and writes its log to `<work_dir>/engine.log` from its
first byte. Key and address are handed over by files under `work_dir`, which go as soon as they were read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from pathlib import Path

import torch

from strop.engine.remote import RemoteEngine, WaitLimits
from strop.engine.wire import ReadyForm, require_server_part
from strop.errors import EngineError, StoreError, explain_refusal
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.hardware.visible_devices import INFER_DEVICES, VISIBLE_DEVICES
from strop.spec.run import RunSpec
from strop.store.atomic import explain_write_failure

START_LIMIT_S = 300.0
"""Loading a model and listening take no longer."""
_STOP_GRACE_S = 5.0
_POLL_S = 0.05


class EngineProcess:
    """One engine, and the process that it lives in."""

    def __init__(
        self,
        spec: RunSpec,
        model_dir: Path,
        work_dir: Path,
        *,
        version: int = 0,
        limits: WaitLimits | None = None,
    ) -> None:
        """`version` is what the engine calls the weights that it loads."""
        self._spec = spec
        self._model_dir = model_dir.absolute()
        self._work_dir = work_dir.absolute()
        self._version = version
        self._limits = limits
        self._key = ""
        self._child: ChildProcess | None = None
        self._engine: RemoteEngine | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def served_version(self) -> int | None:
        """Version of the weights that it acknowledged last, None before the first."""
        return None if self._engine is None else self._engine.version

    def launch(self) -> None:
        """Start the process and do not wait for it.

        Raises: ConfigError if the server extra is missing; StoreError if `work_dir` cannot be written.
        """
        for module in ("httpx", "fastapi", "uvicorn"):
            require_server_part(module)
        self._remove_handover()
        self._key = self._write_key()
        self._child = spawn(self._server_args(), self._log_path, _engine_environment())

    async def connect(self) -> RemoteEngine:
        """Wait until it listens.

        Raises: EngineError with its last log lines if it does not come up.
        """
        child = self._child
        assert child is not None, "launch comes first"
        url = await self._await_ready(child)
        self._remove_handover()
        self._engine = RemoteEngine(
            url, self._key, find_death=lambda: _describe_end(child), read_log=child.tail, limits=self._limits
        )
        return self._engine

    async def stop(self) -> None:
        """End the process and remove what was handed over. May be called at any time, and twice."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._child is not None:
            await asyncio.to_thread(terminate, self._child, _STOP_GRACE_S)
            self._child = None
        self._remove_handover()

    async def _await_ready(self, child: ChildProcess) -> str:
        """Return the engine's address once it listens."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready_path.exists():
            end = _describe_end(child)
            if end is not None:
                raise _not_started(child, end)
            if time.monotonic() > deadline:
                raise _not_started(child, f"it did not listen within {START_LIMIT_S:g} s")
            await asyncio.sleep(_POLL_S)
        return ReadyForm.model_validate_json(self._ready_path.read_bytes()).url

    def _server_args(self) -> list[str]:
        # -P: a file in the current directory never stands in for one of strop's modules.
        args = [sys.executable, "-P", "-m", "strop.engine.server"]
        args += ["--model", str(self._model_dir), "--dtype", self._spec.model.dtype]
        args += ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
        args += ["--key-file", str(self._key_path), "--ready-file", str(self._ready_path)]
        args += ["--threads", str(torch.get_num_threads())]
        args += ["--version", str(self._version)]
        if self._spec.engine.max_rows is not None:
            args += ["--max-rows", str(self._spec.engine.max_rows)]
        return args

    def _write_key(self) -> str:
        """Write a fresh key for the engine, readable by this user only."""
        key = secrets.token_urlsafe(32)
        try:
            self._work_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(key)
        except OSError as error:
            raise explain_write_failure(error, self._key_path) from error
        return key

    def _remove_handover(self) -> None:
        """Remove the files that only the start needs; left ones are of an attempt that was killed."""
        try:
            self._key_path.unlink(missing_ok=True)
            self._ready_path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                explain_refusal(
                    f"{self._work_dir} cannot be cleaned ({error})",
                    allowed="a directory that this user may write to",
                    next_step="mend its permissions and start the run again",
                )
            ) from error

    @property
    def _log_path(self) -> Path:
        return self._work_dir / "engine.log"

    @property
    def _key_path(self) -> Path:
        return self._work_dir / "engine.key"

    @property
    def _ready_path(self) -> Path:
        return self._work_dir / "engine.ready"


def _describe_end(child: ChildProcess) -> str | None:
    """Say how a child ended, None while it runs."""
    exit_code = child.poll()
    if exit_code is None:
        return None
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"its process {child.pid} ended with {how}"


def _not_started(child: ChildProcess, cause: str) -> EngineError:
    return EngineError(
        explain_refusal(
            f"the engine did not start: {cause}\nIts last log lines:\n{child.tail()}\n",
            allowed="a child process that loads the model and listens on this machine",
            next_step=f"read {child.log_path}, mend the cause and start the run again",
        )
    )


def _engine_environment() -> dict[str, str] | None:
    """Return the environment of an engine that has devices of its own; None: the one of this process."""
    devices = os.environ.get(INFER_DEVICES)
    return None if devices is None else {**os.environ, VISIBLE_DEVICES: devices}
