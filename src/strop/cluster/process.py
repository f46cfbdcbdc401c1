"""The learner in this process, the engine in a child process with its own copy of the model.

Weights go by file, `<work_dir>/weights/v000012.safetensors`, with version and digest. The child dies
with this process, however it ends, and writes its log to `<work_dir>/engine.log` from its first byte.
Everything else under `work_dir` that this placement made is gone after `stop`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from strop.cluster.contract import ModelSource, Roles
from strop.cluster.inline import build_learner
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.remote import RemoteEngine, WaitLimits
from strop.engine.wire import ReadyForm, require_server_part
from strop.errors import EngineError, StoreError, explain_refusal
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.policy.learner import Learner
from strop.policy.weights import publish_weights, weights_digest
from strop.spec.run import RunSpec
from strop.store.atomic import explain_write_failure
from strop.tokenizer import Tokenizer

START_LIMIT_S = 300.0
"""Loading a model and listening take no longer."""
_STOP_GRACE_S = 5.0
_POLL_S = 0.05


class FilePublisher:
    """Publishes by file, and keeps only the files that an engine may still read.

    Publishing a version again writes the same bytes again. `find_acknowledged` returns the version
    that the engine serves, or None: older files are removed, that one stays until the next is served.
    """

    def __init__(self, weights_dir: Path, find_acknowledged: Callable[[], int | None]) -> None:
        self._weights_dir = weights_dir.absolute()
        self._find_acknowledged = find_acknowledged

    async def publish(self, learner: Learner) -> WeightUpdate:
        """Write the learner's compute copies to a file of their own.

        Raises: StoreError if they cannot be written.
        """
        self._remove_older()
        path = self._weights_dir / f"v{learner.version:06d}.safetensors"
        try:
            self._weights_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        # In a thread: writing and hashing are no work for the event loop.
        digest = await asyncio.to_thread(publish_weights, learner.model, path)
        return WeightUpdate(
            version=learner.version, digest=digest, transport=WeightTransport.FILE, path=str(path)
        )

    def clear(self) -> None:
        """Remove every publication; they only ever served transport."""
        for path in self._files():
            path.unlink(missing_ok=True)
        if self._weights_dir.is_dir() and not any(self._weights_dir.iterdir()):
            self._weights_dir.rmdir()

    def _remove_older(self) -> None:
        acknowledged = self._find_acknowledged()
        if acknowledged is None:
            return
        for path in self._files():
            if int(path.stem[1:]) < acknowledged:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        names = ("v[0-9]*.safetensors", "v[0-9]*.partial")
        return [path for name in names for path in self._weights_dir.glob(name)]


class ProcessPlacement:
    """Learner here, engine in a child process."""

    def __init__(
        self, spec: RunSpec, source: ModelSource, work_dir: Path, *, limits: WaitLimits | None = None
    ) -> None:
        self._spec = spec
        self._source = source
        self._work_dir = work_dir.absolute()
        self._limits = limits
        self._child: ChildProcess | None = None
        self._engine: RemoteEngine | None = None
        self._publisher = FilePublisher(self._work_dir / "weights", self._acknowledged)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return None if self._child is None else self._child.pid

    async def start(self) -> Roles:
        """Start the engine, load the learner meanwhile, and have both hold the same weights.

        Raises: EngineError with the engine's last log lines if it does not come up; ConfigError if
        the model cannot be loaded or the server extra is missing; StoreError if `work_dir` cannot be
        written.
        """
        for module in ("httpx", "fastapi", "uvicorn"):
            require_server_part(module)
        is_started = False
        try:
            roles = await self._start()
            is_started = True
        finally:
            if not is_started:
                await self.stop()
        return roles

    async def stop(self) -> None:
        """End the engine's process and remove key and weight files. May be called at any time, and twice."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._child is not None:
            await asyncio.to_thread(terminate, self._child, _STOP_GRACE_S)
            self._child = None
        self._remove_handover()
        self._publisher.clear()

    async def _start(self) -> Roles:
        self._remove_handover()
        self._publisher.clear()
        key = self._write_key()
        self._child = child = spawn(self._server_args(), self._log_path)
        learner = build_learner(self._spec, self._source)
        url = await self._await_ready(child)
        self._remove_handover()
        self._engine = engine = RemoteEngine(
            url, key, find_death=lambda: _describe_end(child), read_log=child.tail, limits=self._limits
        )
        await self._check_model(engine, learner)
        await engine.update(await self._publisher.publish(learner))
        return Roles(
            learner=learner,
            engine=engine,
            publisher=self._publisher,
            tokenizer=Tokenizer.load(self._source.path),
        )

    async def _check_model(self, engine: RemoteEngine, learner: Learner) -> None:
        """Refuse a model directory that changed while the two roles loaded it."""
        found, expected = (await engine.health()).model_digest, weights_digest(learner.model)
        if found != expected:
            raise EngineError(
                explain_refusal(
                    f"the engine loaded weights with digest {found[:12]} from {self._source.path}",
                    allowed=f"those of the learner, {expected[:12]}",
                    next_step="see that nothing writes to the model directory, then start the run again",
                )
            )

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
        args += ["--model", str(self._source.path.absolute()), "--dtype", self._spec.model.dtype]
        args += ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
        args += ["--key-file", str(self._key_path), "--ready-file", str(self._ready_path)]
        args += ["--threads", str(torch.get_num_threads())]
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

    def _acknowledged(self) -> int | None:
        return None if self._engine is None else self._engine.version

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
