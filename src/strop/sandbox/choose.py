"""Chooses the backend for this host by trying it, not by looking at what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from strop.errors import ConfigError, SandboxRefused
from strop.sandbox.contract import IsolationLevel, SandboxSpec

if TYPE_CHECKING:
    from strop.sandbox.local import LocalBackend
    from strop.sandbox.remote import RemoteBackend

    Backend: TypeAlias = LocalBackend | RemoteBackend

BACKENDS = ("bubblewrap", "podman", "docker", "process")
"""This machine's, in the order in which they are tried: the quickest that isolates, those that isolate best,
the rest."""
REMOTE = "remote"
"""The service that this process was handed, if there is one."""
_tried: dict[tuple[str, IsolationLevel], SandboxRefused | None] = {}


def make_backend(name: str) -> Backend:
    """Return a backend without trying it.

    Raises: ConfigError for a name that there is not; SandboxRefused with kind service for 'remote' where no
    service was handed to this process.
    """
    if name == REMOTE:
        from strop.sandbox.remote import find_service

        return find_service()
    if name in BACKENDS:
        # Here: the daemon imports this room too, and a small process is forked faster.
        from strop.sandbox.local import LocalBackend

        return LocalBackend(name)
    raise ConfigError(
        f"sandbox backend {name!r}",
        allowed=", ".join(("auto", *BACKENDS, REMOTE)),
        next_step="name one of them",
    )


async def choose_backend(
    wanted: str = "auto", min_level: IsolationLevel = IsolationLevel.NAMESPACE
) -> Backend:
    """Return a backend that reaches `min_level`; 'auto' is the first of this machine's that does.

    Each is tried by one real start. The answer is kept for the life of this process, and every sandbox
    is measured again when it is created, so a host that changes is noticed.

    Raises: SandboxRefused with the reason of each backend that was tried; ConfigError for an unknown name.
    """
    return await choose_among(BACKENDS if wanted == "auto" else (wanted,), min_level)


async def choose_among(names: Sequence[str], min_level: IsolationLevel) -> Backend:
    """Return the first backend of some that reaches a level. Raises: as `choose_backend`."""
    refusals: list[SandboxRefused] = []
    for name in names:
        backend = make_backend(name)
        refusal = await _try(backend, min_level)
        if refusal is None:
            return backend
        refusals.append(refusal)
    if len(refusals) == 1:
        raise refusals[0]
    raise SandboxRefused(
        f"no sandbox of level {min_level.word} on this host. "
        + " ".join(f"[{name}] {refusal}" for name, refusal in zip(names, refusals, strict=True)),
        allowed=f"a backend that reaches {min_level.word}",
        next_step="run make system-deps as root, or accept a lower level in the run file",
        kind="level",
    )


async def _try(backend: Backend, min_level: IsolationLevel) -> SandboxRefused | None:
    if backend.name == REMOTE:
        # What its nodes make changes as they come and go: each sandbox is refused for itself.
        return None
    key = (backend.name, min_level)
    if key not in _tried:
        try:
            async with await backend.create(SandboxSpec(min_level=min_level)):
                _tried[key] = None
        except SandboxRefused as refusal:
            _tried[key] = refusal
    return _tried[key]
