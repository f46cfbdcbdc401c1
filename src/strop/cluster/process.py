"""The learner in this process, the engine in a child process with its own copy of the model.

Weights go by file, `<work_dir>/weights/v000012.safetensors`, with version and digest. The child dies
with this process, however it ends, and writes its log to `<work_dir>/engine.log` from its first byte.
Everything else under `work_dir` that this placement made is gone after `stop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from strop.cluster.contract import ModelSource, Roles
from strop.cluster.engine_process import EngineProcess
from strop.cluster.inline import build_learner
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.remote import RemoteEngine, WaitLimits
from strop.errors import EngineError, explain_refusal
from strop.policy.learner import Learner
from strop.policy.weights import publish_weights, weights_digest
from strop.spec.run import RunSpec
from strop.store.atomic import explain_write_failure
from strop.tokenizer import Tokenizer


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
        self._process = EngineProcess(spec, source.path, work_dir, limits=limits)
        self._publisher = FilePublisher(work_dir.absolute() / "weights", lambda: self._process.served_version)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._process.pid

    async def start(self) -> Roles:
        """Start the engine, load the learner meanwhile, and have both hold the same weights.

        Raises: EngineError with the engine's last log lines if it does not come up; ConfigError if
        the model cannot be loaded or the server extra is missing; StoreError if `work_dir` cannot be
        written.
        """
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
        await self._process.stop()
        self._publisher.clear()

    async def _start(self) -> Roles:
        self._publisher.clear()
        self._process.launch()
        learner = build_learner(self._spec, self._source)
        engine = await self._process.connect()
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
