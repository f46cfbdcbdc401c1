"""Images in an engine's store on this node: pulled as policy and offline mode allow, each once at a time.

A pull that a registry rate-limits (429), or that fails on the way, is retried with growing pauses. A refused
pull is not repeated for a minute, so that many sandboxes of one missing image do not all ask the registry.
Mirrors, and registries without TLS, are configured in podman or in docker's daemon.

`prebuild` fetches the images of a data set before a run needs them: in shards, with one result file for each
image. It skips images with a successful result, so a repeated command resumes.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.io.atomic import write_bytes_atomically
from strop.runtime.contract import FailureKind
from strop.runtime.planes import SandboxFailed
from strop.sandbox.engine import ENGINES
from strop.store.policy import is_offline

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_TRANSIENT: tuple[str, ...] = (
    # Words, not status codes: a name, a port or a digest may contain such a number.
    *("toomanyrequests", "too many requests", "service unavailable", "bad gateway", "internal server error"),
    *("timeout", "timed out", "connection reset", "connection refused", "unexpected eof", "no such host"),
    *("no route to host", "network is unreachable", "server misbehaving", "name resolution"),
)
_FULL_DISK = os.strerror(errno.ENOSPC).lower()
_SHOWN_CHARACTERS = 400
_PULL_LIMIT_S = 1800.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,511}")
"""Images' names: no option, no path of the host, no glob."""
_REFUSED_FOR_S = 60.0
"""A refused pull is not repeated for this long."""


class Images:
    """The images of this node, in the store of one engine."""

    def __init__(
        self,
        engine: str = ENGINES[0],
        *,
        registries: Collection[str] | None = None,
        max_tries: int = 6,
        first_pause_s: float = 1.0,
    ) -> None:
        """Images are pulled from `registries`, as HOST or HOST:PORT, alone; None: from all.

        A transient failure of a pull is tried `max_tries` times; the pause doubles each time.
        """
        self._engine = engine
        self._registries = registries
        self._max_tries = max_tries
        self._first_pause_s = first_pause_s
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self.num_pulls = 0
        """Pulls so far, retries included."""

    async def fetch(self, image: str, policy: str, say: Callable[[str], None]) -> str:
        """Pull an image as its policy says; return its id.

        Raises: SandboxFailed of kind image_error; infra_lost if no registry answered or the disk is full.
        """
        if not _NAME.fullmatch(image):
            raise _failed(f"{image!r} is not the name of an image")
        local = await self._inspect(image)
        if local is None or policy == "Always":
            why = self._why_not_pulled(image, policy)
            if why and local is None:
                raise _failed(f"image {image} is not on this node, and {why}")
            if why:
                say(f"{why}: {image} is used as it is here")
            else:
                refused_until, refusal = self._refused.get(image, (0.0, ""))
                if time.monotonic() < refused_until:
                    raise _failed(f"image {image} was refused lately: {refusal}")
                await self._pull_once(image, say)
                local = await self._inspect(image)
        if local is None:
            raise _failed(f"image {image} is not here after its pull")
        architecture = local.get("Architecture", "")
        wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
        if architecture not in ("", wanted):
            raise _failed(f"image {image} is made for {architecture}, and this node is {wanted}")
        return str(local["Id"])

    def _why_not_pulled(self, image: str, policy: str) -> str:
        """Return why an image may not be pulled; empty if it may."""
        if policy == "Never":
            return "its policy is Never"
        if is_offline():
            return "offline mode forbids to pull it"
        registry = registry_of(image)
        # The engine names images that it made itself so.
        if registry == "localhost" or (self._registries is not None and registry not in self._registries):
            return f"clients' images are not pulled from {registry} (--registry of the node lists from where)"
        return ""

    async def _inspect(self, image: str) -> dict[str, Any] | None:
        """Return what the engine knows of an image, None if it is not on this node."""
        code, output = await run_engine(self._engine, "image", "inspect", image)
        # Warnings follow on standard error.
        return None if code else dict(json.JSONDecoder().raw_decode(output.lstrip())[0][0])

    async def _pull_once(self, image: str, say: Callable[[str], None]) -> None:
        task = self._pulls.get(image)
        if task is None:
            task = asyncio.create_task(self._pull(image, say))
            self._pulls[image] = task
            task.add_done_callback(lambda _: self._pulls.pop(image, None))
        else:
            say(f"waits for the pull of {image}")
        # A caller that is cancelled must not end the pull for the others.
        await asyncio.shield(task)

    async def _pull(self, image: str, say: Callable[[str], None]) -> None:
        pause_s = self._first_pause_s
        for number in range(self._max_tries):
            say(f"pulls {image}" + (f", try {number + 1}" if number else ""))
            self.num_pulls += 1
            # Without a transport podman takes `dir:/etc` or `docker-archive:FILE` for files of the host.
            source = f"docker://{image}" if self._engine == "podman" else image
            code, output = await run_engine(self._engine, "pull", "--quiet", source, limit_s=_PULL_LIMIT_S)
            if code == 0:
                return
            why = output.strip()[-_SHOWN_CHARACTERS:]
            if _FULL_DISK in output.lower():
                raise _failed(f"image {image} cannot be pulled: {why}", FailureKind.INFRA_LOST)
            if not is_transient(output):
                self._refused[image] = (time.monotonic() + _REFUSED_FOR_S, why)
                raise _failed(f"image {image} cannot be pulled: {why}")
            if number + 1 < self._max_tries:
                say(f"the registry puts {image} off; next try in {pause_s:.1f} s")
                await asyncio.sleep(pause_s)
                pause_s *= 2
        # Neither the client nor the image is to blame: another node may be able to pull it.
        cause = f"image {image} cannot be pulled, {self._max_tries} times: {why}"
        raise _failed(cause, FailureKind.INFRA_LOST)

    async def close(self) -> None:
        """Cancel the running pulls."""
        pulls = list(self._pulls.values())
        for task in pulls:
            task.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)


def registry_of(image: str) -> str:
    """Return the registry of an image's name, `docker.io` for a name without one."""
    first, has_path, _ = image.partition("/")
    is_host = has_path and (first == "localhost" or "." in first or ":" in first)
    return first if is_host else "docker.io"


def is_transient(output: str) -> bool:
    """Whether an engine's output names an error that may pass, so that a failed pull may succeed later."""
    return any(word in output.lower() for word in _TRANSIENT)


def engine_of(backends: Sequence[str]) -> str:
    """Return the engine whose store has a node's images: the first engine among its backends."""
    return next((name for name in backends if name in ENGINES), ENGINES[0])


async def run_engine(engine: str, *words: str, limit_s: float = 600.0) -> tuple[int, str]:
    """Run podman or docker; return its exit code and its output, standard output first.

    Raises: SandboxFailed if it is not installed.
    """
    program = shutil.which(engine)
    if program is None:
        raise _failed(f"{engine} is not installed on this node")
    process = await asyncio.create_subprocess_exec(
        program,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
    except TimeoutError:
        return 124, f"{engine} {words[0]} timed out after {limit_s:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, (out + err).decode(errors="replace")


def _failed(cause: str, kind: FailureKind = FailureKind.IMAGE_ERROR) -> SandboxFailed:
    return SandboxFailed(kind, cause)


def list_images(dataset: Path, field: str) -> list[str]:
    """Return the distinct images that the rows of a JSONL or Parquet file name, in the order of the file.

    Raises: ConfigError if the file cannot be read, or a row names no image.
    """
    images: dict[str, None] = {}
    try:
        for number, row in enumerate(_read_rows(dataset), start=1):
            image = row.get(field) if isinstance(row, dict) else None
            if not isinstance(image, str) or not image:
                raise _bad_dataset(dataset, f"has no image in field {field!r} of row {number}")
            images[image] = None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _bad_dataset(dataset, f"cannot be read ({error})") from error
    return list(images)


def shard_of(images: Sequence[str], shard: str) -> list[str]:
    """Return a shard of images; '2/8' is the second of eight. Raises: ConfigError if the shard is invalid."""
    first, _, second = shard.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise ConfigError(f"shard {shard!r}", allowed="I/N with 1 <= I <= N", next_step="give it so, as 1/1")
    # By a hash of the name, so that no image changes its shard when the file grows.
    number, count = int(first) - 1, int(second)
    return [image for image in images if int(_key_of(image), 16) % count == number]


async def prebuild(
    images: Sequence[str], store: Images, results: Path, *, num_at_once: int, say: Callable[[str], None]
) -> int:
    """Fetch the images that have no successful result in an existing folder; return how many failed."""
    turn = asyncio.Semaphore(num_at_once)
    successes = await asyncio.gather(*(_fetch(image, store, results, turn, say) for image in images))
    return successes.count(False)


async def _fetch(
    image: str, store: Images, results: Path, turn: asyncio.Semaphore, say: Callable[[str], None]
) -> bool:
    path = results / f"{_key_of(image)}.json"
    try:
        has_succeeded = bool(json.loads(path.read_bytes()).get("image_id"))
    except (OSError, ValueError, AttributeError):
        has_succeeded = False
    if has_succeeded:
        say(f"{image}: done before")
        return True
    async with turn:
        began = time.monotonic()
        result: dict[str, Any] = {"image": image, "at": time.time()}
        try:
            result["image_id"] = await store.fetch(image, "IfNotPresent", lambda line: None)
        except SandboxFailed as failure:
            result |= {"error": failure.cause, "failure_kind": failure.kind.value}
        result["seconds"] = time.monotonic() - began
    write_bytes_atomically(path, json.dumps(result).encode())
    say(f"{image}: {result.get('error', 'done')}")
    return "error" not in result


def _key_of(image: str) -> str:
    return hashlib.sha256(image.encode()).hexdigest()[:16]


def _read_rows(dataset: Path) -> Iterator[Any]:
    if dataset.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(dataset).iter_batches():
            yield from batch.to_pylist()
        return
    with dataset.open() as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _bad_dataset(dataset: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"data set {dataset} {fault}",
        allowed="a JSONL or Parquet file whose rows name an image",
        next_step="name its field by --field",
    )
