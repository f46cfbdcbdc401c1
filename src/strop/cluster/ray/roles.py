"""The base of all roles of a run on Ray.

`spec/layout.py` assigns node and GPUs to each role: Ray's scheduler never chooses a GPU, and a run always has
the same layout. A role is a plain class; `placement` makes actors of it. It logs from its first line, and
`begin` takes its GPUs before anything is loaded.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import CheckRefused
from strop.hardware.allocation import take_devices
from strop.hardware.tuning import importing
from strop.hardware.visible_devices import ENV_DEVICES, PART_DEVICES, VISIBLE_DEVICES
from strop.io.variables import level_variables, log_from
from strop.spec.layout import DeviceShare

if TYPE_CHECKING:
    from strop.store import ModelHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleStart:
    """The parameters of a role, sent before anything else."""

    name: str
    node: int
    log_path: str
    num_threads: int = 1
    log_level: str | None = None
    """From `output.log_level` for the role, if that is set."""
    devices: DeviceShare | None = None
    has_env_gpus: bool = False
    """Whether its GPUs are for environments, and so for the sandboxes of its attempts, too."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables of `store.policy`, which the run's process may have from its run file; on an attached
    cluster all that the role needs."""
    mark_path: str = ""
    """A file on the disk of the run's process: a role that sees it shares that disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFacts:
    """Identity of a role's process."""

    pid: int
    host: str
    sees_run: bool = True
    """Whether it sees the disk of the run's process."""


class RayRole:
    """Base of all roles."""

    computes = True
    """Whether it uses torch."""

    def __init__(self, start: RoleStart) -> None:
        self._start = start
        self._ended = threading.Event()
        path = Path(start.log_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # All output of this process and its children, including native code.
        with path.open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())

    def begin(self) -> RoleFacts:
        """Take the GPUs. Raises: CheckRefused naming the role if its node shows fewer."""
        start = self._start
        os.environ.update({**level_variables(start.log_level), **start.variables})
        log_from(start.log_level)
        if start.devices is not None:
            os.environ.update(take_devices(start.name, start.devices, os.environ))
            for name in PART_DEVICES.values():
                os.environ.pop(name, None)
        if start.has_env_gpus:
            os.environ[ENV_DEVICES] = os.environ.get(VISIBLE_DEVICES, "")
        if self.computes:
            # After the GPUs are chosen: importing torch may already look at them.
            with importing():
                import torch

            torch.set_num_threads(start.num_threads)
        sys.stdout.write(f"role {start.name} on node {start.node}, process {os.getpid()}\n")
        sys.stdout.flush()
        sees_run = not start.mark_path or Path(start.mark_path).exists()
        return RoleFacts(pid=os.getpid(), host=socket.gethostname(), sees_run=sees_run)

    def bring_model(self, source: ModelHandle) -> ModelHandle:
        """Return the model on this machine, fetched if it is not here.

        Raises: StoreError if it cannot be fetched; CheckRefused if it is another one than the run's.
        """
        if not source.uri or source.path.is_dir():
            return source
        from strop.store import get_model

        sys.stdout.write(f"{source.path} is not on {socket.gethostname()}: fetching {source.uri}\n")
        sys.stdout.flush()
        model = get_model(source.uri)
        if model.digest != source.digest:
            raise CheckRefused(
                f"{source.uri} has digest {model.digest[:12]} on {socket.gethostname()}, where role"
                f" {self._start.name} is",
                allowed=f"the model of the run, {source.digest[:12]}, on every machine",
                next_step="name a revision of it, or keep it in the store of the run",
            )
        return replace(source, path=model.path)

    def wait_for_end(self) -> str:
        """Return why this role ended, once it has; for a killed role the call fails instead."""
        self._ended.wait()
        return "it was told to end"

    def end(self) -> None:
        """Release everything."""
        self._ended.set()


class AsyncRole(RayRole):
    """A role that waits. Its methods are coroutines, or quick: Ray runs them all in one event loop."""

    _cause = "it was told to end"

    async def wait_for_end(self) -> str:  # type: ignore[override]
        """Return why this role ended, once it has; for a killed role the call fails instead."""
        await asyncio.to_thread(self._ended.wait)
        return self._cause

    async def end(self) -> None:  # type: ignore[override]
        """Release everything."""
        self._ended.set()

    def note_end(self, cause: str) -> None:
        """Say that this role is of no use any more."""
        self._cause = cause
        self._ended.set()
