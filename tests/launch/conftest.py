"""Engines and images for all tests that start containers: each image is built once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from strop.launch.container.engine import Engine
from strop.launch.container.image import BuiltImage, ImagePlan, Variant, build_image, plan_image
from strop.launch.container.layers import FULL_PACKAGES, LIBRARIES
from tests.conftest import require_system_part
from tests.fixtures.containers import own_storage, working_engine
from tests.fixtures.scripted_jobs import world

PACKAGES = tuple(sorted({*LIBRARIES, *FULL_PACKAGES, "python3", "python3-venv"}))
"""Of the base that images share: what one of wheels needs as well."""
__all__ = ["agent_image", "base_image", "engine", "world"]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A podman that starts containers, with storage of its own."""
    require_system_part("podman", shutil.which("podman") is not None)
    with own_storage():
        found = working_engine()
        require_system_part("a podman that starts containers (podman, runc)", found is not None)
        assert found is not None
        yield found


@pytest.fixture(scope="session")
def agent_image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    """The small image, built offline from this machine's environment."""
    folder = tmp_path_factory.mktemp("agent")
    try:
        return build(engine, plan_image(Variant.AGENT), folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that keeps the Debian base of images with `PACKAGES`, once one is built."""
    folder = tmp_path_factory.mktemp("debian")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base_image(engine: Engine, debian: Path) -> BuiltImage:
    """Libraries, a compiler and bubblewrap: for containers that are shown this machine's environment."""
    return build(engine, with_packages(plan_image(Variant.BASE)), debian)


def with_packages(plan: ImagePlan) -> ImagePlan:
    """Return a plan with the packages of another one too: a base takes 30 s of processor time to make."""
    return replace(plan, packages=PACKAGES)


def build(engine: Engine, plan: ImagePlan, cache_dir: Path) -> BuiltImage:
    require_system_part("mmdebstrap", shutil.which("mmdebstrap") is not None)
    return build_image(engine, plan, cache_dir=cache_dir)
