"""The project's own image: Python, strop with its dependencies, and the agent as its entry point.

There are three ways to build it; the first one that applies is used:

* `base_image` of the site profile, from a registry: its Python gets this environment's package versions.
* a folder of wheels: a Debian base built here, and an environment installed from the folder.
* neither: a Debian base built here, and this machine's interpreter and packages at their own paths.

The tag is a hash of all inputs: a changed package or line of strop gives another image, and an unchanged
image is not built again. No argument of a build is a secret.

Measured on two shared cores with podman 4.3.1: the small image (470 MB) with 44 s of processor time, 20 s of
them for the base, which is built once; the full one (1.7 GB) in 280 s. Not tried: a base from a registry,
builds by docker.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import strop
from strop.errors import CheckRefused, ConfigError
from strop.hardware import require_free_disk
from strop.io import user_cache_dir
from strop.launch.container.engine import Engine, quote_words
from strop.launch.container.layers import (
    AGENT_PACKAGES,
    FULL_PACKAGES,
    LIBRARIES,
    Layer,
    interpreter_layer,
    is_system_python,
    make_base,
    packages_layer,
    python_of_environment,
    read_suite,
    required_packages,
    strop_layer,
    write_layer,
)

REPOSITORY = "localhost/strop"
TAG_LENGTH = 16
ENTRY = ("python", "-m", "strop.launch.node")
BUILD_LIMIT_S = 3600.0
_FORMAT = "1"
"""Increase this when equal inputs must give another image."""
_BASE_BYTES = 400 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SOURCE_FOLDER = "/opt/strop/src"


class Variant(StrEnum):
    """The contents of an image."""

    FULL = "full"
    """Everything that a run needs, with a compiler and a sandbox for model-written code."""
    AGENT = "agent"
    """Only the needs of a node's agent: for jobs whose roles bring their own programs."""
    BASE = "base"
    """Only libraries: for containers that mount this machine's environment read-only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlan:
    """The inputs of an image, before it is built."""

    variant: Variant
    base_image: str | None = None
    """None: a Debian base built here."""
    suite: str = ""
    packages: tuple[str, ...] = ()
    """Debian packages."""
    layers: tuple[Layer, ...] = ()
    requirements: tuple[str, ...] = ()
    """Python packages with their exact versions, for a base from a registry."""
    wheels: tuple[Path, ...] = ()
    tag: str = ""

    @property
    def name(self) -> str:
        """Repository and tag."""
        return f"{REPOSITORY}:{self.tag}"

    @property
    def size_bytes(self) -> int:
        """Bytes on top of the base, before compression."""
        return sum(layer.size_bytes for layer in self.layers) + sum(
            path.stat().st_size for path in self.wheels
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltImage:
    """An image that the engine has."""

    name: str
    size_bytes: int
    wall_s: float
    """Seconds of the build; 0 if the image existed."""


def plan_image(
    variant: Variant = Variant.FULL, *, base_image: str | None = None, wheels: Path | None = None
) -> ImagePlan:
    """Plan an image from this machine's environment. Builds nothing.

    Raises: ConfigError for a folder without a wheel of strop; CheckRefused if a package is not installed.
    """
    roots = AGENT_PACKAGES if variant is Variant.AGENT else None
    layers: tuple[Layer, ...] = ()
    if base_image is not None:
        requirements: tuple[str, ...] = ()
        if variant is not Variant.BASE:
            layers = (strop_layer(),)
            # Local versions such as +cpu are unknown to package registries.
            requirements = tuple(
                f"{entry.metadata['Name']}=={entry.version.partition('+')[0]}"
                for entry in required_packages(roots)
            )
        return _tagged(
            ImagePlan(variant=variant, base_image=base_image, requirements=requirements, layers=layers)
        )
    packages = {*LIBRARIES, *(FULL_PACKAGES if variant is not Variant.AGENT else ())}
    wheel_paths: tuple[Path, ...] = ()
    if wheels is not None:
        wheel_paths = tuple(sorted(wheels.glob("*.whl")))
        if not any(path.name.startswith("strop-") for path in wheel_paths):
            raise ConfigError(
                f"{wheels} has {len(wheel_paths)} wheels and none of strop",
                allowed="a folder with wheels of strop and of all that it needs",
                next_step=f"fill it: pip wheel --wheel-dir {wheels} .",
            )
        packages |= {"python3", "python3-venv"}
    elif variant is not Variant.BASE:
        layers = (interpreter_layer(), packages_layer(roots), strop_layer())
    if is_system_python():
        packages |= {"python3"}
    return _tagged(
        ImagePlan(
            variant=variant,
            suite=read_suite(),
            packages=tuple(sorted(packages)),
            layers=tuple(layer for layer in layers if layer.files),
            wheels=wheel_paths,
        )
    )


def build_image(
    engine: Engine,
    plan: ImagePlan,
    *,
    no_cache: bool = False,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> BuiltImage:
    """Build an image unless the engine has it; `no_cache` rebuilds everything, including the Debian base.

    `say` receives a line before each long step.

    Raises: CheckRefused with the message of mmdebstrap or the engine, or if the disk is too small.
    """
    present = find_image(engine, plan.name)
    if present is not None and not no_cache:
        return BuiltImage(name=plan.name, size_bytes=present[1], wall_s=0.0)
    started = time.monotonic()
    folder = (cache_dir or user_cache_dir()) / "images"
    folder.mkdir(parents=True, exist_ok=True)
    # The archives, and the engine's copy of them.
    require_free_disk(folder, 2 * (plan.size_bytes + _BASE_BYTES), f"building image {plan.name}")
    base_path = None
    if plan.base_image is None:
        say(f"Debian {plan.suite} with {len(plan.packages)} packages; about 20 s the first time")
        base_path = make_base(folder, plan.suite, plan.packages, is_fresh=no_cache)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as context:
        say(f"image {plan.name}: {plan.size_bytes / 1e6:.0f} MB on top of its base")
        _fill_context(plan, Path(context), base_path)
        words = ["build", "--tag", plan.name, "--file", str(Path(context) / "Containerfile")]
        # Only a base from a registry needs the network.
        words += ["--network", "host" if plan.base_image is not None else "none"]
        words += ["--no-cache"] if no_cache else []
        done = engine.ask(*words, context, limit_s=BUILD_LIMIT_S)
        if done.returncode != 0:
            raise CheckRefused(
                f"{engine.kind} did not build {plan.name}: {quote_words(done)}",
                allowed="an image that builds" if plan.base_image is None else "a registry that answers",
                next_step="free some space if the disk is full"
                if plan.base_image is None
                else "check base_image of the site profile, or remove it: then the base is made here",
            )
    built = find_image(engine, plan.name)
    if built is None:
        raise CheckRefused(f"{engine.kind} built {plan.name} and does not have it")
    wall_s = time.monotonic() - started
    return BuiltImage(name=plan.name, size_bytes=built[1], wall_s=wall_s)


def find_image(engine: Engine, name: str) -> tuple[str, int] | None:
    """Return id and size in bytes of an image, or None if the engine does not have it.

    Raises: StoreError if the engine does not answer.
    """
    images = engine.read_json("image", "inspect", name)
    if not images:
        return None
    image_id = str(images[0]["Id"])
    return image_id if ":" in image_id else f"sha256:{image_id}", int(images[0].get("Size", 0))


def list_images(engine: Engine) -> list[str]:
    """Return the names of the project's images that the engine has. Raises: StoreError."""
    done = engine.ask("images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"reference={REPOSITORY}")
    if done.returncode != 0:
        return []
    return sorted(set(done.stdout.split()))


def render_containerfile(plan: ImagePlan) -> str:
    """Return the text of the Containerfile."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("strop.launch.container", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = _quoted
    is_public = plan.base_image is not None
    variables = {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    if not is_public:
        variables["PATH"] = f"{Path(image_python(plan)).parent}:{_PATH}"
    elif plan.layers:
        variables["PYTHONPATH"] = _SOURCE_FOLDER
    archives = [] if is_public else ["base.tar", *(f"{layer.name}.tar" for layer in plan.layers)]
    return environment.get_template("Containerfile.j2").render(
        base=plan.base_image if is_public else "scratch",
        archives=archives,
        requirements=plan.requirements,
        wheels=[path.name for path in plan.wheels],
        strop_path=_SOURCE_FOLDER if is_public and plan.layers else None,
        variables=variables,
        labels={"strop.image": plan.tag or "unknown", "strop.variant": plan.variant.value},
        entry=ENTRY,
    )


def image_python(plan: ImagePlan) -> str:
    """Return the interpreter inside an image."""
    if plan.wheels:
        return "/opt/strop/venv/bin/python"
    return "python" if plan.base_image is not None else str(python_of_environment())


def environment_mounts() -> tuple[str, ...]:
    """Return the folders of this machine that a container with a `base` image mounts read-only."""
    folders = [sys.base_prefix, sys.prefix, strop_folder()]
    kept: list[str] = []
    for folder in dict.fromkeys(folders):
        inside = any(Path(folder).is_relative_to(other) for other in kept)
        if not inside and folder not in {"/", "/usr"}:
            kept.append(folder)
    return tuple(kept)


def strop_folder() -> str:
    """Return the folder that strop is imported from."""
    return str(Path(strop.__file__).absolute().parent.parent)


def _tagged(plan: ImagePlan) -> ImagePlan:
    parts = {
        "format": _FORMAT,
        "containerfile": render_containerfile(plan),
        "suite": plan.suite,
        "packages": plan.packages,
        "layers": [(layer.name, layer.key, len(layer.files)) for layer in plan.layers],
        "requirements": plan.requirements,
        "wheels": [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in plan.wheels],
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return replace(plan, tag=digest[:TAG_LENGTH])


def _fill_context(plan: ImagePlan, context: Path, base_path: Path | None) -> None:
    (context / "Containerfile").write_text(render_containerfile(plan), encoding="utf-8")
    if base_path is not None:
        _link(base_path, context / "base.tar")
        for layer in plan.layers:
            write_layer(layer, context / f"{layer.name}.tar")
        if plan.wheels:
            (context / "wheels").mkdir()
        for path in plan.wheels:
            _link(path, context / "wheels" / path.name)
        return
    (context / "requirements.txt").write_text("\n".join(plan.requirements) + "\n", encoding="utf-8")
    for layer in plan.layers:
        root = Path(os.path.commonpath([target for _, target in layer.files]))
        for source, target in layer.files:
            path = context / layer.name / Path(target).relative_to(root)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system.
        shutil.copyfile(source, target)


def _quoted(value: str) -> str:
    """Quote a value for a Containerfile, where $ would be expanded and a quote end it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'
