"""What tests of environments share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from strop.io.endpoints import RUNTIME, Endpoint, hand_over, withdraw
from tests.fixtures.runtime_processes import service_of


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A sandbox service, handed to this process as a run hands it over."""
    folder = tmp_path_factory.mktemp("service")
    backend = "bubblewrap" if shutil.which("bwrap") else "process"
    with service_of(folder, "--backend", backend) as running:
        hand_over(folder / "servers", {RUNTIME: Endpoint(url=running.url, key=running.key)})
        try:
            yield
        finally:
            withdraw(folder / "servers", [RUNTIME])
