"""Choose the backend for this host by trying it, not by what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from strop.errors import ConfigError, SandboxRefused
from strop.sandbox.contract import IsolationLevel, SandboxSpec

if TYPE_CHECKING:
    from strop.sandbox.hosts import RayBackend
    from strop.sandbox.local import LocalBackend

    Backend: TypeAlias = LocalBackend | RayBackend

BACKENDS = ("bubblewrap", "podman", "docker", "process")
"""The backends of this machine in the order of trial: the fastest that isolates, the best isolated ones, the
rest."""
RAY = "ray"
"""The backend of the Ray cluster that this process is connected to."""
_tried: dict[tuple[str, IsolationLevel], SandboxRefused | None] = {}


def make_backend(name: str) -> Backend:
    """Return a backend without trying it.

    Raises: ConfigError for an unknown name, and for 'ray' if this process belongs to no cluster.
    """
    if name == RAY:
        from strop.sandbox.hosts import find_cluster

        return find_cluster()
    if name in BACKENDS:
        from strop.sandbox.local import LocalBackend

        return LocalBackend(name)
    raise ConfigError(
        f"sandbox backend {name!r}",
        allowed=", ".join(("auto", *BACKENDS, RAY)),
        next_step="name one of them",
    )


async def choose_backend(
    wanted: str = "auto", min_level: IsolationLevel = IsolationLevel.NAMESPACE
) -> Backend:
    """Return a backend that reaches `min_level`; 'auto': the first of this machine that does.

    Each is tried by one real start. The result is cached in this process; since every sandbox is measured
    again when it is created, a change of the host is noticed.

    Raises: SandboxRefused with the reason of each backend that was tried; ConfigError as `make_backend`.
    """
    return await choose_among(BACKENDS if wanted == "auto" else (wanted,), min_level)


async def choose_among(names: Sequence[str], min_level: IsolationLevel) -> Backend:
    """Return the first of these backends that reaches a level. Raises: as `choose_backend`."""
    refusals: list[SandboxRefused] = []
    for name in names:
        backend = make_backend(name)
        if name == RAY:
            # Its nodes differ, so a trial says little: each sandbox is checked when it is created.
            return backend
        key = (name, min_level)
        if key not in _tried:
            try:
                async with await backend.create(SandboxSpec(min_level=min_level)):
                    _tried[key] = None
            except SandboxRefused as error:
                _tried[key] = error
        refusal = _tried[key]
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
