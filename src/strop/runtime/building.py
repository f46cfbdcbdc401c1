"""Image builds from the contexts that clients send: each content is built once, for all clients and nodes.

The key is a hash of the context. The built image is saved as an archive, beside its result, in a folder that
nodes may share; a node that lacks the image loads the archive. A node that builds holds a lock file, which
names its host, process and start time, and touches it; a lock that has not been touched for a minute is taken
over. A failed build is not retried for ten minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.hardware.identity import ProcessIdentity, identify_self
from strop.io.atomic import write_bytes_atomically
from strop.runtime.contract import BuildStatus, FailureKind
from strop.runtime.planes import SandboxFailed
from strop.runtime.pulling import run_engine
from strop.sandbox.engine import ENGINES
from strop.store.policy import is_offline

_TOUCH_S = 5.0
_SHOWN_CHARACTERS = 2000
_BUILD_LIMIT_S = 1800.0
_FAILED_FOR_S = 600.0
"""A failed build is not retried for this long."""
_STALE_AFTER_S = 60.0
"""A lock of another host that has not been touched for this long is taken over."""


class Builds:
    """The builds of one node, one at a time, by one engine."""

    def __init__(self, folder: Path, engine: str = ENGINES[0]) -> None:
        """`folder` holds results, archives and locks. Nodes that share it build each context once."""
        # One engine may not load the other's archives, and its image ids differ.
        self._folder = folder if engine == ENGINES[0] else folder / engine
        self._engine = engine
        self._status: dict[str, BuildStatus] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self.num_built = 0
        """Builds that this node carried out."""

    def start(self, context: bytes, image: str, tags: Sequence[str]) -> str:
        """Begin to build a gzip tar and tag the result as `image` and `tags`; return the build's id."""
        key = hashlib.sha256(context).hexdigest()
        build_id = hashlib.sha256(f"{key} {image} {sorted(tags)}".encode()).hexdigest()[:32]
        status = self._status.get(build_id)
        if status is None or status.status not in ("QUEUED", "WORKING"):
            self._status[build_id] = BuildStatus(status="QUEUED")
            task = asyncio.create_task(self._follow(build_id, key, context, image, tags))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return build_id

    def find(self, build_id: str) -> BuildStatus | None:
        """Return the status of a build, None for an unknown id."""
        return self._status.get(build_id)

    async def close(self) -> None:
        """Cancel the running builds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, build_id: str, key: str, context: bytes, image: str, tags: Sequence[str]) -> None:
        try:
            async with self._turn:
                self._status[build_id] = BuildStatus(status="WORKING")
                image_id = await self.build(key, context)
                for name in dict.fromkeys((image, *tags)):
                    await self._run("tag", image_id, name)
            self._status[build_id] = BuildStatus(status="SUCCESS", image=image)
        except SandboxFailed as failure:
            self._status[build_id] = BuildStatus(status="FAILURE", error=failure.cause)
        except (OSError, tarfile.TarError) as error:
            self._status[build_id] = BuildStatus(status="INTERNAL_ERROR", error=str(error))

    async def build(self, key: str, context: bytes) -> str:
        """Return the id of the image of a context, which this node or another one has built.

        Raises: SandboxFailed if the build fails or failed recently; OSError if the folder cannot be written;
            TarError if the context is no archive.
        """
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            result = _read(folder / f"{key}.json")
            if result.get("image_id"):
                image_id = str(result["image_id"])
                code, _ = await run_engine(self._engine, "image", "inspect", image_id)
                if code:
                    await self._run("load", "--quiet", "--input", str(folder / f"{key}.oci"))
                return image_id
            if result.get("error") and time.time() < result["until"]:
                raise _failed(f"this build has failed lately: {result['error']}")
            if take_lock(folder / f"{key}.lock"):
                break
            await asyncio.sleep(0.2)
        touching = asyncio.create_task(_keep_touching(folder / f"{key}.lock"))
        try:
            return await self._build_here(key, context)
        finally:
            touching.cancel()
            (folder / f"{key}.lock").unlink(missing_ok=True)

    async def _build_here(self, key: str, context: bytes) -> str:
        if self._engine == "docker" and is_offline():
            # docker has no option that keeps a build from pulling its base image.
            raise _failed("docker may ask a registry in a build, which offline mode forbids")
        result_path = self._folder / f"{key}.json"
        self.num_built += 1
        name = f"localhost/strop-build:{key[:32]}"
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(context), mode="r:*") as archive:
                # The filter refuses devices and paths outside the folder.
                archive.extractall(folder, filter="data")
            pull = ("--pull=never",) if self._engine == "podman" else ()
            words = ("build", "--network", "none", *pull, "--tag", name, folder)
            code, output = await run_engine(self._engine, *words, limit_s=_BUILD_LIMIT_S)
        (self._folder / f"{key}.log").write_text(output)
        if code:
            error = output.strip()[-_SHOWN_CHARACTERS:]
            _write(result_path, {"error": error, "until": time.time() + _FAILED_FOR_S})
            raise _failed(error)
        image_id = (await self._run("image", "inspect", "--format", "{{.Id}}", name)).strip()
        partial = self._folder / f"{key}.{os.getpid()}.partial"
        try:
            # docker has one format, and prints no progress.
            form = ("--quiet", "--format", "oci-archive") if self._engine == "podman" else ()
            await self._run("save", *form, "--output", str(partial), name)
            partial.replace(self._folder / f"{key}.oci")
        finally:
            partial.unlink(missing_ok=True)
        _write(result_path, {"image_id": image_id, "image": name, "built_at": time.time()})
        return image_id

    async def _run(self, *words: str) -> str:
        code, output = await run_engine(self._engine, *words)
        if code:
            raise _failed(f"{self._engine} {words[0]}: {output.strip()[-_SHOWN_CHARACTERS:]}")
        return output


def take_lock(path: Path) -> bool:
    """Write a lock file that names this process, or take over one whose process is gone.

    Returns: whether this process holds the lock now. Raises: OSError.
    """
    holder = identify_self()
    content = {
        "host": platform.node(),
        "pid": holder.pid,
        "start_ticks": holder.start_ticks,
        "boot_id": holder.boot_id,
        "pid_namespace": holder.pid_namespace,
    }
    for _ in range(2):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            if not _is_abandoned(path):
                return False
            # Renamed, not removed: of two processes that see an abandoned lock, one can rename it.
            aside = path.with_name(f"{path.name}.{os.getpid()}.stale")
            with suppress(FileNotFoundError):
                path.rename(aside)
                aside.unlink()
            continue
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        return True
    return False


def _is_abandoned(path: Path) -> bool:
    content = _read(path)
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    if content.get("host") != platform.node():
        return age_s > _STALE_AFTER_S
    fields = ("pid", "start_ticks", "boot_id", "pid_namespace")
    if any(name not in content for name in fields):
        # Half-written: its writer is still at it, or has died.
        return age_s > _STALE_AFTER_S
    holder = ProcessIdentity(**{name: content[name] for name in fields})
    return (
        not holder.is_alive() if holder.is_seen_here or not holder.is_of_this_boot else age_s > _STALE_AFTER_S
    )


async def _keep_touching(path: Path) -> None:
    while True:
        await asyncio.sleep(_TOUCH_S)
        with suppress(OSError):
            os.utime(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    write_bytes_atomically(path, json.dumps(content).encode())


def _failed(cause: str) -> SandboxFailed:
    return SandboxFailed(FailureKind.IMAGE_ERROR, cause)
