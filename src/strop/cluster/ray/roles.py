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
from strop.spec.layout import ENV, RoleSlot

if TYPE_CHECKING:
    from strop.store import ModelHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleStart:
    """The parameters of a role, sent before anything else."""

    slot: RoleSlot
    log_path: Path
    num_threads: int = 1
    log_level: str | None = None
    """From `output.log_level` for the role, if that is set."""
    takes_devices: bool = True
    """Whether the slot names its GPUs; else Ray has chosen them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the run's process may have from its run file; on an attached cluster also the job's."""
    mark_path: Path = Path("/")
    """A file on the disk of the run's process: a role that sees it shares that disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFacts:
    """Identity of a role's process."""

    pid: int
    host: str


class RayRole:
    """Base of all roles."""

    computes = True
    """Whether it uses torch."""

    def __init__(self, start: RoleStart) -> None:
        self._start = start
        start.log_path.parent.mkdir(parents=True, exist_ok=True)
        # All output of this process and its children, including native code.
        with start.log_path.open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())

    def begin(self, source: ModelHandle) -> RoleFacts:
        """Take the GPUs, and find the model or fetch it.

        Raises: CheckRefused naming the role if its node shows fewer GPUs; as `bring_model`.
        """
        start, slot = self._start, self._start.slot
        os.environ.update({**level_variables(start.log_level), **start.variables})
        log_from(start.log_level)
        if slot.devices is not None:
            if start.takes_devices:
                os.environ.update(take_devices(slot.name, slot.devices, os.environ))
                for name in PART_DEVICES.values():
                    os.environ.pop(name, None)
            if slot.devices.part == ENV:
                # For the sandboxes of its attempts, too.
                os.environ[ENV_DEVICES] = os.environ.get(VISIBLE_DEVICES, "")
        if self.computes:
            # After the GPUs are chosen: importing torch may already look at them.
            with importing():
                import torch

            torch.set_num_threads(start.num_threads)
        sys.stdout.write(f"role {slot.name} on node {slot.node}, process {os.getpid()}\n")
        sys.stdout.flush()
        self._source = self.bring_model(source)
        return RoleFacts(pid=os.getpid(), host=socket.gethostname())

    @property
    def sees_run(self) -> bool:
        """Whether it sees the disk of the run's process."""
        return self._start.mark_path.exists()

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
                f" {self._start.slot.name} is",
                allowed=f"the model of the run, {source.digest[:12]}, on every machine",
                next_step="name a revision of it, or keep it in the store of the run",
            )
        return replace(source, path=model.path)

    def wait_for_end(self) -> str:
        """Wait for ever: the call fails when this process or its node dies."""
        threading.Event().wait()
        return ""


class AsyncRole(RayRole):
    """A role that waits. Its methods are coroutines, or quick: Ray runs them all in one event loop."""

    def __init__(self, start: RoleStart) -> None:
        super().__init__(start)
        self._ended = asyncio.Event()
        self._cause = ""

    async def wait_for_end(self) -> str:  # type: ignore[override]
        """Return why this role is of no use any more; for a killed role the call fails instead."""
        await self._ended.wait()
        return self._cause

    def note_end(self, cause: str) -> None:
        """Say that this role is of no use any more."""
        self._cause = cause
        self._ended.set()

    async def end(self) -> None:
        """Release everything."""
