"""Engines and images for all tests that start containers: each image is built once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.launch.container.engine import Engine
from strop.launch.container.image import BuiltImage, Variant, build_image, plan_image
from tests.conftest import require_system_part
from tests.fixtures.containers import own_storage, working_engine
from tests.fixtures.scripted_jobs import world

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
    return build(engine, Variant.AGENT, tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="session")
def base_image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    """Libraries, a compiler and bubblewrap: for containers that are shown this machine's environment."""
    return build(engine, Variant.BASE, tmp_path_factory.mktemp("base"))


def build(engine: Engine, variant: Variant, cache_dir: Path) -> BuiltImage:
    require_system_part("mmdebstrap", shutil.which("mmdebstrap") is not None)
    try:
        return build_image(engine, plan_image(variant), cache_dir=cache_dir)
    finally:
        shutil.rmtree(cache_dir)
