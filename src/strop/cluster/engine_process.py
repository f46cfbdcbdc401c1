"""An engine in a child process, from its start to its end: the native one, or vLLM.

vLLM runs with another interpreter, which sees strop's modules and no other package of this environment. The
child ends with this process, however that ends, and writes its log, `engine.log`, from its first byte. Key
and address are exchanged by files under `work_dir`, which are removed once they are read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

import strop
from strop.engine.remote import RemoteEngine
from strop.engine.server import LOOPBACK
from strop.engine.vllm.environment import find_python
from strop.engine.wire import ReadyForm, require_server_part
from strop.errors import EngineError, StoreError
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.hardware.visible_devices import INFER_DEVICES, VISIBLE_DEVICES
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import Endpoint, write_secret
from strop.io.variables import level_variables, log_level_of
from strop.spec.run import RunSpec
from strop.store.python_environment import KEEP_BYTECODE

_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM 0.32 accepts (its LoRAConfig); smaller adapters fit as well."""
START_LIMITS_S = {"native": 300.0, "vllm": 900.0}
"""Time until an engine has loaded its model and listens. vLLM may compile first."""
_STOP_GRACE_S = 5.0
_POLL_S = 0.05


class EngineProcess:
    """One engine and its process."""

    def __init__(
        self,
        spec: RunSpec,
        model_dir: Path,
        work_dir: Path,
        *,
        version: int = 0,
        host: str = LOOPBACK,
        environment: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        """Nothing is started yet. `log_dir` is the folder of its log, by default `work_dir`.

        `version` is the version of the weights that the engine loads, `host` the address of this machine
        that it listens on, `environment` adds variables to those of this process: devices, for example.
        """
        self._spec = spec
        self._model_dir = model_dir.absolute()
        self._work_dir = work_dir.absolute()
        self._log_dir = (log_dir or work_dir).absolute()
        self._version = version
        self._host = host
        levels = level_variables(log_level_of(spec.output.log_level, "engine"))
        self._environment = {**levels, **(environment or {})}
        self._key = ""
        self._python = sys.executable
        self._url = ""
        self._child: ChildProcess | None = None
        self._engine: RemoteEngine | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def served_version(self) -> int | None:
        """Version of the last weights that it acknowledged, None before the first."""
        return None if self._engine is None else self._engine.version

    @property
    def endpoint(self) -> Endpoint:
        """Address and key, for a client in another process. Only once it is connected."""
        return Endpoint(url=self._url, key=self._key)

    @property
    def log_path(self) -> Path:
        """Its log."""
        return self._log_dir / "engine.log"

    def find_death(self) -> str | None:
        """Return how the process ended, None while it runs."""
        return None if self._child is None else _describe_end(self._child)

    def launch(self) -> None:
        """Start the process, without waiting for it.

        Raises: ConfigError if the server extra or an interpreter with vLLM is missing; StoreError if
        `work_dir` cannot be written.
        """
        for module in ("httpx", "fastapi", "uvicorn"):
            require_server_part(module)
        is_vllm = self._spec.engine.kind == "vllm"
        self._python = str(find_python(self._spec.engine.python)) if is_vllm else sys.executable
        self._remove_start_files()
        self._key = secrets.token_urlsafe(32)
        try:
            write_secret(self._key_path, self._key)
        except OSError as error:
            raise explain_write_failure(error, self._key_path) from error
        devices = os.environ.get(INFER_DEVICES)
        added = {} if devices is None else {VISIBLE_DEVICES: devices}
        if is_vllm:
            added |= vllm_environment(self._modules_dir)
        added |= self._environment
        environment = {**os.environ, **added} if added else None
        self._child = spawn(self._server_args(), self.log_path, environment)

    async def connect(self) -> RemoteEngine:
        """Wait until it listens.

        Raises: EngineError with its last log lines if it does not come up.
        """
        child = self._child
        assert child is not None, "launch comes first"
        limit_s = START_LIMITS_S[self._spec.engine.kind]
        deadline = time.monotonic() + limit_s
        while not self._ready_path.exists():
            end = _describe_end(child)
            if end is not None:
                raise _not_started(child, end)
            if time.monotonic() > deadline:
                raise _not_started(child, f"it did not listen within {limit_s:g} s")
            await asyncio.sleep(_POLL_S)
        url = self._url = ReadyForm.model_validate_json(self._ready_path.read_bytes()).url
        self._remove_start_files()
        self._engine = RemoteEngine(
            url,
            self._key,
            find_death=lambda: _describe_end(child),
            read_log=child.tail,
            is_streamed=streams_replies(self._spec),
        )
        return self._engine

    async def stop(self) -> None:
        """End the process and remove its files. May be called at any time, and twice."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._child is not None:
            await asyncio.to_thread(terminate, self._child, _STOP_GRACE_S)
            self._child = None
        self._remove_start_files()
        shutil.rmtree(self._modules_dir, ignore_errors=True)

    def _server_args(self) -> list[str]:
        engine = self._spec.engine
        is_vllm = engine.kind == "vllm"
        # -P: a file in the current directory never stands in for one of strop's modules.
        args = [self._python, "-P", "-m", "strop.engine.vllm.serve" if is_vllm else "strop.engine.server"]
        args += ["--model", str(self._model_dir), "--dtype", self._spec.model.dtype]
        args += ["--key-file", str(self._key_path), "--ready-file", str(self._ready_path)]
        args += ["--host", self._host, "--version", str(self._version)]
        if engine.max_num_seqs is not None:
            args += ["--max-num-seqs", str(engine.max_num_seqs)]
        if can_swap_adapters(self._spec):
            # The smallest rank of vLLM's table that fits the adapters.
            rank = self._spec.lora.rank or 0
            args += ["--lora-rank", str(next(size for size in _VLLM_RANKS if size >= rank))]
        if not is_vllm:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            return [*args, "--device", device, "--threads", str(torch.get_num_threads())]
        is_eager = not torch.cuda.is_available() if engine.is_eager is None else engine.is_eager
        args += ["--eager"] if is_eager else []
        values = {
            "--gpu-memory-frac": engine.gpu_memory_frac,
            "--max-model-tokens": engine.max_model_tokens,
            "--tensor-parallel": engine.tensor_parallel,
        }
        for name, value in values.items():
            args += [] if value is None else [name, str(value)]
        return args

    def _remove_start_files(self) -> None:
        """Remove the files that only the start needs; a killed attempt may have left some."""
        try:
            self._key_path.unlink(missing_ok=True)
            self._ready_path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self._work_dir} cannot be cleaned ({error})",
                allowed="a directory that this user may write to",
                next_step="mend its permissions and start the run again",
            ) from error

    @property
    def _modules_dir(self) -> Path:
        return self._work_dir / "modules"

    @property
    def _key_path(self) -> Path:
        return self._work_dir / "engine.key"

    @property
    def _ready_path(self) -> Path:
        return self._work_dir / "engine.ready"


def _describe_end(child: ChildProcess) -> str | None:
    """Return how a child ended, None while it runs."""
    exit_code = child.poll()
    if exit_code is None:
        return None
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"its process {child.pid} ended with {how}"


def _not_started(child: ChildProcess, cause: str) -> EngineError:
    return EngineError(
        f"the engine did not start: {cause}\nIts last log lines:\n{child.tail()}\n",
        allowed="a child process that loads the model and listens on this machine",
        next_step=f"read {child.log_path}, mend the cause and start the run again",
    )


def can_swap_adapters(spec: RunSpec) -> bool:
    """Whether a run's engines keep the base model and receive adapters instead of whole weights."""
    has_adapters = spec.lora.rank is not None and spec.lora.rank <= _VLLM_RANKS[-1]
    return has_adapters and spec.engine.kind == "vllm"


def streams_replies(spec: RunSpec) -> bool:
    """Whether an engine's replies return as they end, and not a batch at a time.

    A run that gives the same bits each time (the native engine, nothing sampled ahead or
    `train.deterministic`) needs whole batches: replies that return together make later requests one batch.
    """
    is_free = spec.engine.kind == "vllm" or spec.train.max_staleness > 0
    return is_free and not spec.train.deterministic


def vllm_environment(modules_dir: Path) -> dict[str, str]:
    """Return the variables by which vLLM's interpreter finds strop, and stays offline and on our cores.

    `modules_dir` is created to hold strop and none of this interpreter's other packages.
    """
    modules_dir.mkdir(parents=True, exist_ok=True)
    link = modules_dir / "strop"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(strop.__file__).parent)
    environment = {
        "PYTHONPATH": str(modules_dir),
        # vLLM's own processes start without -P.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **KEEP_BYTECODE,
    }
    if not torch.cuda.is_available():
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return environment
