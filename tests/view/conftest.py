"""A browser for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.conftest import require_system_part
from tests.fixtures.browser import axe_path, find_chromium, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium. While it is open, tests of its module cannot call `asyncio.run`."""
    program = find_chromium()
    require_system_part("chromium", program is not None)
    assert program is not None
    require_system_part("playwright (make venv)", find_spec("playwright") is not None)
    require_system_part("axe-core (make browser-deps)", axe_path().exists())
    with open_browser(program) as browser:
        yield browser
