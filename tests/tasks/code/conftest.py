"""What every test of tasks of programs may lean on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right programs have a minute, whatever else the machine does; a test that wants a time-out says so."""
    for name in ("WALL_S", "_TEST_S"):
        monkeypatch.setattr(f"strop.tasks.code.extraction.{name}", 60.0)
