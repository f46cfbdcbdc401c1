"""An engine for all tests that start containers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from strop.launch.sagemaker.engine import Engine, locate_engine
from tests.conftest import require_system_part
from tests.fixtures.containers import own_storage
from tests.fixtures.scripted_jobs import world

__all__ = ["engine", "world"]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A podman with storage of its own."""
    require_system_part("podman", shutil.which("podman") is not None)
    with own_storage():
        yield locate_engine()
