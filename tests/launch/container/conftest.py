"""Engines and images for the tests of containers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from strop.launch.container.engine import Engine
from strop.launch.container.image import BuiltImage, Variant, build_image, plan_image
from tests.conftest import require_system_part
from tests.fixtures.containers import own_storage, working_engine


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
def agent_image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltImage]:
    """The small image, built offline from this machine's environment."""
    require_system_part("mmdebstrap", shutil.which("mmdebstrap") is not None)
    cache_dir = tmp_path_factory.mktemp("images")
    yield build_image(engine, plan_image(Variant.AGENT), cache_dir=cache_dir)
    shutil.rmtree(cache_dir)
