"""Chooses the backend for this host by trying it, not by looking at what is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.errors import ConfigError, SandboxRefused
from strop.sandbox.contract import IsolationLevel, SandboxSpec

if TYPE_CHECKING:
    from strop.sandbox.local import LocalBackend

BACKENDS = ("bubblewrap", "podman", "process")
"""In the order in which they are tried: the quickest that isolates, the one that isolates best, the rest."""
_tried: dict[tuple[str, IsolationLevel], SandboxRefused | None] = {}


def make_backend(name: str) -> LocalBackend:
    """Return a backend without trying it.

    Raises: ConfigError for a name that there is not.
    """
    if name in BACKENDS:
        # Here: the daemon imports this room too, and a small process is forked faster.
        from strop.sandbox.local import LocalBackend

        return LocalBackend(name)
    raise ConfigError(
        f"sandbox backend {name!r}", allowed=", ".join(("auto", *BACKENDS)), next_step="name one of them"
    )


async def choose_backend(
    wanted: str = "auto", min_level: IsolationLevel = IsolationLevel.NAMESPACE
) -> LocalBackend:
    """Return the first backend that reaches `min_level` here; 'auto' tries all, best first.

    Each is tried by one real start. The answer is kept for the life of this process, and every sandbox
    is measured again when it is created, so a host that changes is noticed.

    Raises: SandboxRefused with the reason of each backend that was tried; ConfigError for an unknown name.
    """
    names = BACKENDS if wanted == "auto" else (wanted,)
    refusals: list[SandboxRefused] = []
    for name in names:
        backend = make_backend(name)
        refusal = await _try(backend, min_level)
        if refusal is None:
            return backend
        refusals.append(refusal)
    raise SandboxRefused(
        f"no sandbox of level {min_level.word} on this host. "
        + " ".join(f"[{name}] {refusal}" for name, refusal in zip(names, refusals, strict=True)),
        allowed=f"a backend that reaches {min_level.word}",
        next_step="run make system-deps as root, or accept a lower level in the run file",
        kind=refusals[0].kind if len(refusals) == 1 else "level",
    )


async def _try(backend: LocalBackend, min_level: IsolationLevel) -> SandboxRefused | None:
    key = (backend.name, min_level)
    if key not in _tried:
        try:
            async with await backend.create(SandboxSpec(min_level=min_level)):
                _tried[key] = None
        except SandboxRefused as refusal:
            _tried[key] = refusal
    return _tried[key]
