"""The container engines, podman and docker: how they are run, and whether this host's are usable.

Not covered: a disk that fills up later, which the engine then reports.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from strop.errors import SandboxRefused
from strop.sandbox.cgroup import clear_container_groups
from strop.sandbox.linux import read_or_empty
from strop.sandbox.rootless import require_ranges
from strop.sandbox.spawning import remove_tree, run_program

ENGINES = ("podman", "docker")
"""The backends with containers and images, named like their programs."""
_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 60.0
_ID_FILE = "id"
_RUNTIMES = ("runc", "crun")
"""Each keeps the state of podman's containers in a directory of /run with its own name."""
_MAX_ERROR_CHARS = 600
_UNFIT = {
    "name=rootless": "but its daemon belongs to an ordinary user",
    "name=userns": "but shows its images' files as those of other users (userns-remap)",
}
"""Security options of a docker daemon whose containers cannot be sandboxes, with the reason."""
_VARIABLES = (
    *("HOME", "PATH", "XDG_RUNTIME_DIR", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"),
    *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_API_VERSION"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A program that makes containers."""

    name: str
    """One of `ENGINES`."""
    program: str
    environ: Mapping[str, str]

    def run(self, *words: str, stdin: int | None = None, limit_s: float = _LIMIT_S) -> str:
        """Run the engine and return its standard output. Raises: OSError with its standard error."""
        done = run_program([self.program, *words], self.environ, stdin=stdin, limit_s=limit_s)
        if done.exit_code:
            error = done.stderr.decode(errors="replace").strip()[-_MAX_ERROR_CHARS:]
            raise OSError(errno.EIO, f"{self.name} {words[0]}: {error or f'exit code {done.exit_code}'}")
        return done.stdout.decode(errors="replace")

    def remove(self, container: str, container_id: str = "") -> None:
        """Remove a container if it exists, running or not.

        `container_id`: the engine's id, empty if there is none yet. If podman or its monitor was killed,
        podman forgets the container; the leftovers in the runtime's directory are then found by this id.
        """
        words = ("--time", "0", "--ignore") if self.name == "podman" else ()
        # docker fails for a container that does not exist.
        with suppress(OSError):
            self.run("rm", "--force", "--volumes", *words, container)
        if container_id:
            clear_container_groups(container_id)
            for runtime in _RUNTIMES:
                remove_tree(f"/run/{runtime}/{container_id}")

    def list_containers(self, part: str) -> dict[str, str]:
        """Return the ids by name of all containers with `part` in their names. Raises: OSError."""
        words = ("--all", "--no-trunc", "--format", "{{.Names}} {{.ID}}", "--filter", f"name={part}")
        lines = self.run("ps", *words).splitlines()
        return {name: container_id for name, _, container_id in (line.partition(" ") for line in lines)}


def engine_environ() -> dict[str, str]:
    """Return the variables of this process that are passed to an engine."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def container_name(runtime_dir: str, last: object) -> str:
    """Return the name of a daemon's container, by which it can be removed later.

    `last`: the id of its supervisor, or its purpose.
    """
    return f"{Path(runtime_dir).name}-{last}"


def id_file(scratch: str) -> str:
    """Return the file into which the engine writes the id of the container with this private directory."""
    return f"{scratch}/{_ID_FILE}"


def read_container_id(scratch: str) -> str:
    """Return the id of the container with this private directory; empty if there is none."""
    return read_or_empty(id_file(scratch)).strip()


@cache
def require_engine(name: str, program: str) -> None:
    """Refuse an engine that does not answer, or whose containers cannot be sandboxes.

    Blocks for a tenth of a second. Raises: SandboxRefused with the engine's name as its kind, or graph_root;
    for an ordinary user of podman, newuidmap or subuid.
    """
    engine = Engine(name=name, program=program, environ=os.environ)
    is_podman = name == "podman"
    if is_podman and os.geteuid() != 0:
        require_ranges(program, os.environ)
    template = "{{.Store.GraphRoot}}" if is_podman else "{{json .SecurityOptions}}"
    try:
        answer = engine.run("info", "--format", template, limit_s=_ANSWER_LIMIT_S).strip()
        options = [] if is_podman else list(json.loads(answer))
    except (OSError, ValueError, TypeError) as error:
        raise SandboxRefused(
            f"{name} does not tell what it is: {getattr(error, 'strerror', '') or error}",
            allowed=f"a {name} that works for this user",
            next_step=f"run {name} info, and mend the error that it reports",
            kind=name,
        ) from error
    if is_podman:
        require_local(Path(answer))
        return
    why = next((why for option, why in _UNFIT.items() if option in options), None)
    if os.geteuid() != 0:
        why = "and its containers belong to root, and this process to an ordinary user"
    if why is not None:
        raise SandboxRefused(
            f"docker answers, {why}",
            allowed="root, beside a docker daemon of this machine's root; or podman, for every user",
            next_step="use backend podman, which needs no daemon",
            kind=name,
        )


def require_local(graph_root: Path) -> None:
    """Refuse a graph root on a network disk.

    Raises: SandboxRefused with kind graph_root.
    """
    # Imported here, because the daemon imports this module, and a small process forks faster.
    from strop.hardware.disks import describe_disk

    disk = describe_disk(graph_root)
    if disk.is_network:
        raise SandboxRefused(
            f"podman keeps its containers on a disk that machines share: {disk}",
            allowed="a graph root on a local disk; overlays, and locks, do not work on others",
            next_step="set graphroot in storage.conf to a directory of a local disk",
            kind="graph_root",
        )
