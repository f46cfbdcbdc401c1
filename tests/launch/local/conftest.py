"""Limits of the product that a busy machine does not keep."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreters take their time to start, and processes to die."""
    monkeypatch.setattr("strop.launch.local.backend.START_LIMIT_S", 180.0)
    monkeypatch.setattr("strop.launch.local.backend.KILL_LIMIT_S", 180.0)
    monkeypatch.setattr("strop.launch.launcher.KILL_LIMIT_S", 180.0)
