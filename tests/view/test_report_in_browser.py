"""The report as a browser shows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from strop.view.report import write_report
from tests.fixtures.browser import find_faults, is_wider_than_screen, open_page
from tests.view.synthetic_run import make_run, raise_alarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow


def test_the_report_can_be_read_by_everybody(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path)
    raise_alarm(run, 3, "x" * 300)
    report = write_report(run.path)
    with open_page(browser, width=400) as page:
        page.goto(report.as_uri())
        assert not is_wider_than_screen(page)
        assert find_faults(page) == []
