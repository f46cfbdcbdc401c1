"""The base of all roles of a run on Ray, and the run's record of each.

`spec/layout.py` assigns node and GPUs to each role. A role is a plain class; `placement` makes actors of it.
It logs from its first line, and `begin` takes its GPUs before anything is loaded.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cluster.ray.deaths import lost
from strop.errors import CheckRefused, EngineLost
from strop.hardware.allocation import take_devices
from strop.hardware.process import tail
from strop.hardware.tuning import importing
from strop.hardware.visible_devices import ENV_DEVICES, PART_DEVICES, VISIBLE_DEVICES
from strop.io.variables import log_from
from strop.spec.layout import ENV, RoleSlot

if TYPE_CHECKING:
    from strop.store import ModelHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleStart:
    """The parameters of a role, sent before anything else."""

    slot: RoleSlot
    log_path: Path
    num_threads: int = 1
    takes_devices: bool = True
    """Whether the slot names its GPUs; else Ray has chosen them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the log, and of the run's process by its run file; on an attached cluster also the job's."""
    mark_path: Path = Path("/")
    """A file on the disk of the run's process: a role that sees it shares that disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFacts:
    """Identity of a role's process, and the GPUs that it sees."""

    pid: int
    host: str
    visible_devices: str | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class RunningRole:
    """A role that was started."""

    start: RoleStart
    actor: Any = None
    facts: RoleFacts | None = None
    """None until it has begun."""

    async def ended(self, call: Awaitable[object]) -> EngineLost:
        """Wait for the end of `wait_for_end`, and describe it."""
        from ray.exceptions import RayError

        try:
            cause = str(await call)
        except RayError as error:
            cause = str(error).strip()
        slot, path, host = self.start.slot, self.start.log_path, self.facts.host if self.facts else "unknown"
        lines = tail(path) if path.exists() else f"(they are on {host})"
        where = f"role {slot.name} on node {slot.node} ({host})"
        where += f", process {self.facts.pid}, ended" if self.facts else " ended"
        return lost(f"{where}: {cause}\nIts last log lines ({path}):\n{lines}\n")


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

    def begin(self, source: ModelHandle, beside: RoleFacts | None = None) -> RoleFacts:
        """Take the GPUs, those of another role if it is `beside` that one, and find the model or fetch it.

        Raises: CheckRefused naming the role if its node shows fewer GPUs; as `bring_model`.
        """
        start, slot = self._start, self._start.slot
        os.environ.update(start.variables)
        log_from(None)
        if slot.devices is not None:
            if beside is not None:
                os.environ[VISIBLE_DEVICES] = beside.visible_devices or ""
            elif start.takes_devices:
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
        devices = os.environ.get(VISIBLE_DEVICES)
        return RoleFacts(pid=os.getpid(), host=socket.gethostname(), visible_devices=devices)

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

    def wait_for_end(self) -> None:
        """Wait for ever: the call fails when this process or its node dies."""
        threading.Event().wait()


class AsyncRole(RayRole):
    """A role that waits. Its methods are coroutines, or quick: Ray runs them all in one event loop."""

    def __init__(self, start: RoleStart) -> None:
        super().__init__(start)
        self.undo = AsyncExitStack()
        """What `end` releases."""

    async def wait_for_end(self) -> None:  # type: ignore[override]
        """Wait for ever, and let others work meanwhile."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        """Release everything."""
        await self.undo.aclose()
