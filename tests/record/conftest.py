"""What tests of a mirror share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.mirrored import PlayedRun


@pytest.fixture
def played(tmp_path: Path) -> PlayedRun:
    return PlayedRun.create(tmp_path / "runs")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "store")
