"""Images in an engine's store on this node: pulled as policy, registries and offline mode allow.

An image that is here is not pulled again, and several sandboxes of one image wait for one pull. A request
that a registry rate-limits (429), or that fails on the way, is repeated by the engine, in whose own files
mirrors are configured, and registries without TLS.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from weakref import WeakValueDictionary

from strop.errors import SandboxRefused, given_of
from strop.sandbox.container import ENGINES
from strop.store.policy import is_offline

_TRANSIENT: tuple[str, ...] = (
    # Words, not status codes: a name, a port or a digest may contain such a number.
    *("toomanyrequests", "too many requests", "service unavailable", "bad gateway", "internal server error"),
    *("timeout", "timed out", "connection reset", "connection refused", "unexpected eof", "no such host"),
    *("no route to host", "network is unreachable", "server misbehaving", "name resolution"),
)
_FULL_DISK = os.strerror(errno.ENOSPC).lower()
_SHOWN_CHARACTERS = 400
_PULL_LIMIT_S = 1800.0
_INSPECT_LIMIT_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,511}")
"""Images' names: no option, no path of the host, no glob."""
_log = logging.getLogger("strop.runtime.images")


class Images:
    """The images of this node, in the store of one engine."""

    def __init__(self, engine: str = ENGINES[0], registries: Collection[str] | None = None) -> None:
        """Images are pulled from `registries`, as HOST or HOST:PORT, alone; None: from all."""
        self.engine = engine
        self._registries = registries
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, image: str, policy: str) -> str:
        """Pull an image as its policy says; return its id.

        Raises: SandboxRefused with kind image; registry or no_space if another node may be able to pull it.
        """
        if not _NAME.fullmatch(image):
            raise SandboxRefused(f"{image!r} is not the name of an image", kind="image")
        local = await self._inspect(image)
        if local is None or policy == "Always":
            why = self._why_not_pulled(image, policy)
            if why and local is None:
                raise SandboxRefused(f"image {image} is not on this node, and {why}", kind="image")
            if why:
                _log.info("%s: %s is used as it is here", why, image)
            else:
                local = await self._pull_in_turn(image, policy)
        if local is None:
            raise SandboxRefused(f"image {image} is not here after its pull", kind="image")
        return local

    def _why_not_pulled(self, image: str, policy: str) -> str:
        """Return why an image may not be pulled; empty if it may."""
        if policy == "Never":
            return "its policy is Never"
        if is_offline():
            return "offline mode forbids to pull it"
        first, has_path, _ = image.partition("/")
        is_host = has_path and (first == "localhost" or "." in first or ":" in first)
        registry = first if is_host else "docker.io"
        # The engine names images that it made itself `localhost/...`.
        if registry == "localhost" or (self._registries is not None and registry not in self._registries):
            return f"clients' images are not pulled from {registry} (--registry of the node lists from where)"
        return ""

    async def _inspect(self, image: str) -> str | None:
        """Return the id of an image, None if it is not on this node."""
        code, output = await self._run(_INSPECT_LIMIT_S, "image", "inspect", "--format={{.Id}}", image)
        # Warnings follow on standard error.
        return None if code else output.split()[0]

    async def _pull_in_turn(self, image: str, policy: str) -> str | None:
        turn = self._turns.setdefault(image, asyncio.Lock())
        async with turn:
            # Another sandbox may have pulled it meanwhile.
            if policy == "Always" or await self._inspect(image) is None:
                _log.info("pulls %s", image)
                # Without a transport podman takes `dir:/etc` or `docker-archive:FILE` for files of the host.
                source = f"docker://{image}" if self.engine == "podman" else image
                code, output = await self._run(_PULL_LIMIT_S, "pull", "--quiet", source)
                if code:
                    cause = f"image {image} cannot be pulled: {output.strip()[-_SHOWN_CHARACTERS:]}"
                    raise SandboxRefused(cause, kind=kind_of(output))
        return await self._inspect(image)

    async def _run(self, limit_s: float, *words: str) -> tuple[int, str]:
        """Run the engine; return its exit code and its output, standard output first.

        Raises: SandboxRefused if it is not installed.
        """
        program = shutil.which(self.engine)
        if program is None:
            raise SandboxRefused(f"{self.engine} is not installed on this node", kind="image")
        pipe = asyncio.subprocess.PIPE
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(program, *words, stdin=null, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(limit_s):
                out, err = await process.communicate()
        except TimeoutError:
            return 124, f"{self.engine} {words[0]} timed out after {limit_s:.0f} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, f"{out.decode(errors='replace')}\n{err.decode(errors='replace')}"


def kind_of(output: str) -> str:
    """Return why a pull failed by an engine's output: image, or what another node or time may have."""
    if _FULL_DISK in output.lower():
        return "no_space"
    return "registry" if any(word in output.lower() for word in _TRANSIENT) else "image"


async def prebuild(images: Sequence[str], store: Images, say: Callable[[str], None]) -> int:
    """Fetch images before a run needs them; return how many failed. Those that are here are not pulled."""
    num_failed = 0
    for image in images:
        try:
            await store.fetch(image, "IfNotPresent")
            say(f"{image}: done")
        except SandboxRefused as refusal:
            num_failed += 1
            say(f"{image}: {refusal.kind}: {given_of(refusal)}")
    return num_failed
