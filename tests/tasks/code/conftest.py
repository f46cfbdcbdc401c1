"""What every test of tasks of programs may lean on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right programs have a minute, whatever else the machine does; a test that wants a time-out says so."""
    for name in ("mbpp.WALL_S", "humaneval.WALL_S", "apps._BASE_WALL_S", "apps._TEST_S"):
        monkeypatch.setattr(f"strop.tasks.code.{name}", 60.0)
