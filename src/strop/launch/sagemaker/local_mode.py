"""Local mode: a training job on this machine, started and stopped as on the platform, without AWS.

`Emulator` runs one start of a job, either in containers (podman or docker; an image or `--rootfs DIR:O`),
where the entry is process 1, or as plain processes with their own root. `FakeSageMaker` can use it as the
instances of a job.

Covered: /opt/ml, channels, several hosts on this machine, TERM, stop window, KILL, checkpoint copying, exit
codes, the failure file, leftovers. Not covered: the instances' own disks and networks, FastFile, EFA.
Tried with podman 4.3.1 and runc 1.1.5.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop.errors import CheckRefused
from strop.launch.node.environment import RAY_PORT
from strop.launch.sagemaker import places
from strop.launch.sagemaker.client import JobObjects
from strop.launch.sagemaker.engine import Engine
from strop.launch.sagemaker.local_platform import PlatformSync, build_tree, checkpoint_path
from strop.launch.sagemaker.places import NUM_FAILURE_CHARACTERS, STOP_WINDOW_S
from strop.launch.sagemaker.request import count_hosts

MARK = "STROP_EMULATOR"
"""Environment variable of every process of one start, which identifies leftovers."""
_POLL_S = 0.05
_ENGINE_LIMIT_S = 60.0
_CONTAINER_LIMITS = ("--memory", "4g", "--pids-limit", "1024", "--shm-size", "1g")
"""The engines' default of 64 MB for `/dev/shm` is too small for Ray's object store."""
_KNOWN_FOLDERS = ("checkpoints", "input", "model", "output")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatorSettings:
    """The settings of a request's start on this machine."""

    engine: Engine | None = None
    """A working podman or docker; None: plain processes."""
    image: str | None = None
    rootfs: Path | None = None
    """Instead of an image: an unpacked root file system, which is not written to."""
    python: str | None = None
    """Replaces the request's python3."""
    stop_window_s: float = STOP_WINDOW_S
    sync_every_s: float = 1.0
    ray_port: int = RAY_PORT
    gpus: tuple[str, ...] = ()
    """Indices or UUIDs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional variables, such as credentials or a PYTHONPATH."""


class _Host(Protocol):
    def poll(self) -> int | None: ...

    def send(self, number: signal.Signals) -> None: ...

    def remove(self) -> None: ...


class Emulator:
    """The hosts of one start of a job, on this machine. Implements `Instance` of the fake."""

    def __init__(self, root: Path, objects: JobObjects, settings: EmulatorSettings) -> None:
        self.root = root
        self._objects = objects
        self._settings = settings
        self._hosts: dict[str, _Host] = {}
        self._syncs: list[PlatformSync] = []
        self._mark = secrets.token_hex(8)
        self._is_stopping = False
        self._is_settled = False
        self.codes: dict[str, int] = {}
        """Exit codes by host, set once all have ended."""

    def start(self, request: Mapping[str, Any], attempt: int = 0) -> None:
        """Build every host's tree and start its entry. Raises: StoreError; CheckRefused."""
        settings = self._settings
        if settings.engine is not None and settings.image is None and settings.rootfs is None:
            raise CheckRefused("a container without an image: give an image or an unpacked root")
        # Without containers addresses replace host names: every 127.x is this machine.
        pattern = "127.0.1.{}" if settings.engine is None else "algo-{}"
        names = tuple(pattern.format(i + 1) for i in range(count_hosts(request)))
        for name in names:
            tree = self.tree_of(name)
            build_tree(tree, request, self._objects, hosts=names, host=name)
            if "CheckpointConfig" in request:
                uri = request["CheckpointConfig"]["S3Uri"]
                sync = PlatformSync(
                    checkpoint_path(tree, request), uri, self._objects, every_s=settings.sync_every_s
                )
                sync.start()
                self._syncs.append(sync)
        for name in names:
            entry = list(request["AlgorithmSpecification"]["ContainerEntrypoint"])
            if entry[0] == "python3" and (settings.python or settings.engine is None):
                entry[0] = settings.python or sys.executable
            entry += ["--ray-port", str(settings.ray_port), "--stop-window", str(settings.stop_window_s)]
            environment = {
                **request.get("Environment", {}),
                **settings.environment,
                "TRAINING_JOB_NAME": request["TrainingJobName"],
                MARK: self._mark,
            }
            if settings.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
            path = self.root / name
            self._hosts[name] = (
                _ProcessHost(path, entry, environment)
                if settings.engine is None
                else _ContainerHost(
                    *(path, entry, environment, settings, name, names),
                    mark=self._mark,
                )
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the started hosts."""
        return tuple(self._hosts)

    def tree_of(self, host: str) -> Path:
        """Return the folder that serves as a host's /opt/ml."""
        return self.root / host / "opt" / "ml"

    def log_of(self, host: str) -> str:
        """Return the output of a host's entry so far."""
        path = self.root / host / "entry.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def poll(self) -> int | None:
        """Once all hosts have ended, return the first code that is not 0, else 0."""
        codes = {name: host.poll() for name, host in self._hosts.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        if len(ended) < len(codes):
            return None
        if not self._is_settled:
            self.codes = ended
            self._settle(is_last=True)
        return next((code for code in self.codes.values() if code), 0)

    def wait(self, limit_s: float) -> int | None:
        """Poll up to a limit; return the code, or None after the limit."""
        deadline = time.monotonic() + limit_s
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the entry of every host, and to no other process."""
        self._is_stopping = True
        for host in self._hosts.values():
            host.send(signal.SIGTERM)

    def kill(self) -> None:
        """End every process of the job at once. After a stop, copy checkpoints once more."""
        for host in self._hosts.values():
            host.send(signal.SIGKILL)
        for host in self._hosts.values():
            deadline = time.monotonic() + _ENGINE_LIMIT_S
            while host.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        for pid in self.find_leftovers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._is_settled:
            self.codes = {name: host.poll() or 0 for name, host in self._hosts.items()}
            self._settle(is_last=self._is_stopping)

    def stop(self) -> int | None:
        """Stop like the platform: TERM, the window, KILL; return the code."""
        self.terminate()
        code = self.wait(self._settings.stop_window_s)
        self.kill()
        return code

    def failure(self) -> str:
        """Return the FailureReason: the text of the first non-empty failure file of a host."""
        for name in self._hosts:
            path = self.tree_of(name) / places.FAILURE
            if path.exists() and (text := path.read_text(errors="replace")):
                return text[:NUM_FAILURE_CHARACTERS]
        return ""

    def find_leftovers(self) -> list[int]:
        """Return the running processes of this start, which has ended."""
        mark = f"{MARK}={self._mark}".encode()
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    pids.append(int(path.parent.name))
        return pids

    def check_end(self) -> list[str]:
        """Return one sentence for each violation of the platform's rules by the job."""
        broken = []
        for name, code in self.codes.items():
            tree = self.tree_of(name)
            failure = tree / places.FAILURE
            if code not in {0, -signal.SIGKILL, 128 + signal.SIGKILL} and not failure.exists():
                broken.append(f"{name} ended with {code} and left no failure file")
            if code == 0 and failure.exists():
                broken.append(f"{name} ended with 0 and left a failure file")
            strange = {path.name for path in tree.iterdir()} - set(_KNOWN_FOLDERS)
            visible = sorted(path for path in strange if not path.startswith(".strop-"))
            if visible:
                broken.append(f"{name} wrote outside the platform's folders: {', '.join(visible)}")
            if any((tree / "model").iterdir()):
                broken.append(f"{name} left files in /opt/ml/model, which would be packed")
        if leftovers := self.find_leftovers():
            broken.append(f"processes {', '.join(map(str, leftovers))} outlived their entry")
        return broken

    def _settle(self, *, is_last: bool) -> None:
        self._is_settled = True
        for sync in self._syncs:
            sync.stop(is_last=is_last)
        for host in self._hosts.values():
            host.remove()


class _ProcessHost:
    """The entry as a plain process, with a private root and no namespace."""

    def __init__(self, host_path: Path, entry: list[str], environment: Mapping[str, str]) -> None:
        scratch = host_path / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        defaults = {"HOME": str(scratch), "PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(scratch)}
        argv = [*entry, "--root", str(host_path / "opt" / "ml")]
        if "--scratch" not in entry:
            argv += ["--scratch", str(scratch / "runs")]
        with (host_path / "entry.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                env={**defaults, **environment},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=scratch,
            )

    def poll(self) -> int | None:
        """Return the entry's exit code in the form of a container's."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Send a signal only to the entry, which ends its own children."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def remove(self) -> None:
        """Wait for the process, so that no zombie remains."""
        self._process.wait()


class _ContainerHost:
    """The entry as process 1 of a container."""

    def __init__(
        self,
        host_path: Path,
        entry: list[str],
        environment: Mapping[str, str],
        settings: EmulatorSettings,
        name: str,
        names: Sequence[str],
        *,
        mark: str,
    ) -> None:
        assert settings.engine is not None
        self._engine = settings.engine
        self._name = f"strop-local-{mark}-{name}"
        argv = self._engine.argv("run", "--name", self._name, "--volume", f"{host_path}/opt/ml:/opt/ml")
        argv += _CONTAINER_LIMITS
        argv += ["--entrypoint", entry[0]] if settings.rootfs is None else []
        argv += ["--network", "host"]
        argv += [word for host in names for word in ("--add-host", f"{host}:127.0.0.1")]
        # Only names, because values would be visible in the process list.
        argv += [word for key in sorted(environment) for word in ("--env", key)]
        argv += settings.engine.device_words(settings.gpus)
        if settings.rootfs is not None:
            argv += ["--rootfs", f"{settings.rootfs}:O", *entry]
        else:
            argv += [str(settings.image), *entry[1:]]
        with (host_path / "entry.log").open("ab") as log:
            self._client = subprocess.Popen(
                argv,
                cwd=host_path,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def poll(self) -> int | None:
        """Return the container's exit code, which its client passes on."""
        code = self._client.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to process 1 through the engine."""
        if self._client.poll() is None:
            self._run("kill", "--signal", number.name.removeprefix("SIG"), self._name)

    def remove(self) -> None:
        """Remove the container."""
        self._client.wait()
        self._run("rm", "--force", self._name)

    def _run(self, *words: str) -> None:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                self._engine.argv(*words), capture_output=True, check=False, timeout=_ENGINE_LIMIT_S
            )
