"""What every test of the audit may lean on."""

from __future__ import annotations

import math

import pytest

from strop.audit import context


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe asks all its examples, however slow the machine is; a test of slow graders says so."""
    monkeypatch.setattr(context, "ENOUGH_S", math.inf)
