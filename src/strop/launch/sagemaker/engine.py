"""podman or docker, by their command line: for images of jobs, and for rehearsals of jobs on this machine."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import CheckRefused, given_of

IMAGE = "localhost/strop"
"""The repository of images that `site.build` makes."""
_ASK_LIMIT_S = 60.0
_BUILD_LIMIT_S = 3600.0
_MOST = {"nofile": 1 << 20, "nproc": 1 << 15}
_MAX_QUOTED = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A program that runs containers."""

    kind: str
    """`podman` or `docker`."""
    program: str

    def argv(self, *words: str) -> list[str]:
        """Return a command line of this engine; `run` gets limits that this process can pass on."""
        if words[:1] == ("run",):
            # Engines ask for more than some hosts allow.
            limits = (
                word for name, most in _own_limits().items() for word in ("--ulimit", f"{name}={most}:{most}")
            )
            words = ("run", *limits, *words[1:])
        return [self.program, *words]

    def ask(self, *words: str, limit_s: float = _ASK_LIMIT_S) -> str:
        """Return the output of a command. Raises: CheckRefused with the engine's message."""
        try:
            # podman's monitor leaves a file here when a container runs out of memory.
            done = subprocess.run(
                self.argv(*words),
                cwd=tempfile.gettempdir(),
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = " ".join(str(getattr(error, "stderr", None) or error).split())[-_MAX_QUOTED:]
            raise CheckRefused(
                f"{self.kind} {words[0]}: {said}",
                allowed="an engine that answers",
                next_step="try it by hand",
            ) from error
        return done.stdout

    def device_words(self, gpus: Sequence[str]) -> list[str]:
        """Return the options that show GPUs to a container."""
        if not gpus:
            return []
        if self.kind == "docker":
            words = ["--gpus", f'"device={",".join(gpus)}"']
        else:
            words = [word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]
        return [*words, "--env", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"]


def _own_limits() -> dict[str, int]:
    limits = {}
    for name, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        hard = resource.getrlimit(number)[1]
        limits[name] = _MOST[name] if hard == resource.RLIM_INFINITY else min(hard, _MOST[name])
    return limits


def locate_engine() -> Engine:
    """Return podman, or docker, if it answers. Raises: CheckRefused with the messages of both."""
    reasons = []
    for kind in ("podman", "docker"):
        if (program := shutil.which(kind)) is None:
            reasons.append(f"{kind}: not on PATH")
            continue
        engine = Engine(kind=kind, program=program)
        try:
            engine.ask("info")
        except CheckRefused as error:
            reasons.append(given_of(error))
        else:
            return engine
    raise CheckRefused(
        "no container engine answers: " + "; ".join(reasons),
        allowed="podman, or docker with a running daemon",
        next_step="install podman, or leave out what needs an image on this machine",
    )


def find_image(engine: Engine, name: str) -> str | None:
    """Return the id of an image, `sha256:...`; None if the engine does not have it."""
    try:
        found = json.loads(engine.ask("image", "inspect", name))
    except CheckRefused:
        return None
    image_id = str(found[0]["Id"])
    return image_id if ":" in image_id else f"sha256:{image_id}"


def build_image(engine: Engine, containerfile: Path, base: str | None) -> str:
    """Build an image in its Containerfile's folder, with the argument BASE; return its name, with a tag.

    Raises: CheckRefused with the engine's message.
    """
    words = ["build", "--quiet", "--tag", IMAGE, "--file", str(containerfile)]
    words += ["--build-arg", f"BASE={base}"] if base else []
    engine.ask(*words, str(containerfile.parent), limit_s=_BUILD_LIMIT_S)
    image_id = find_image(engine, IMAGE)
    assert image_id is not None
    name = f"{IMAGE}:{image_id.partition(':')[2][:16]}"
    engine.ask("tag", IMAGE, name)
    return name
