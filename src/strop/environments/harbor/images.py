"""Images of task directories: named ones, and built ones; what an image says of how its programs begin."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from strop.environments.harbor.directories import HarborTask, digest_tree
from strop.errors import ConfigError
from strop.io import FileLock
from strop.io.variables import user_cache_dir
from strop.rollout import FailureOwner
from strop.sandbox.engine import ENGINES, Engine, engine_environ
from strop.sandbox.local import find_program
from strop.tasks.failures import AttemptFailed

_PULL_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """What sandboxes are made of."""

    name: str
    """Of the engine's store, or the path of a directory tree."""
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)


def choose_engine(backend: str) -> str:
    """Return the backend whose sandboxes have images: the one that is asked for. Raises: ConfigError."""
    if backend == "auto":
        return next((name for name in ENGINES if shutil.which(name)), ENGINES[0])
    if backend not in ENGINES:
        raise ConfigError(
            f"task.sandbox={backend} has no images, and tasks of Harbor's are images",
            allowed="podman or docker",
            next_step="set task.sandbox",
        )
    return backend


def find_image(task: HarborTask, backend: str) -> Image:
    """Return a task's image, pulled or built where it is not in the store.

    Raises: AttemptFailed if it cannot be had; SandboxRefused if there is no such engine.
    """
    if task.image is not None and Path(task.image).is_absolute():
        return Image(name=task.image)
    engine = Engine(name=backend, program=find_program(backend, backend), environ=engine_environ())
    # Of what it is built from: other tests need no other image.
    name = task.image or f"localhost/strop-harbor:{digest_tree(task.folder / 'environment')[:24]}"
    # Many attempts at once want the same.
    lock = hashlib.sha256(f"{backend} {name}".encode()).hexdigest()[:16]
    folder = user_cache_dir() / "harbor"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{lock}.lock"):
            try:
                return _inspect(engine, name)
            except OSError:
                if task.image is not None:
                    engine.run("pull", "--quiet", name, limit_s=_PULL_LIMIT_S)
                else:
                    context = str(task.folder / "environment")
                    engine.run("build", "--quiet", "--tag", name, context, limit_s=task.build_limit_s)
                return _inspect(engine, name)
    except OSError as error:
        detail = f"the image of {task.name}: {error}"
        raise AttemptFailed(FailureOwner.INFRA, "no_image", detail) from error


def _inspect(engine: Engine, name: str) -> Image:
    """Return what an image of the store says. Raises: OSError if it is not there."""
    config = json.loads(engine.run("image", "inspect", "--format", "{{json .Config}}", name))
    env = dict(one.split("=", 1) for one in config.get("Env") or () if "=" in one)
    return Image(name=name, workdir=config.get("WorkingDir") or "/", env=env)
