"""The report, and that of a comparison, as a browser shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from strop.view.comparison import write_comparison
from strop.view.report import write_report
from tests.fixtures.browser import find_faults, is_wider_than_screen, open_page
from tests.view.synthetic_run import make_run, raise_alarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow


def test_the_report_can_be_read_by_everybody(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path)
    raise_alarm(run, 3, "x" * 300)
    probes = [{"probe": "echo", "status": "warn", "detail": "y" * 200}]
    (run.path / "audit.json").write_text(json.dumps({"verdict": "amber", "probes": probes}))
    require_readable(browser, write_report(run.path))


def test_a_comparison_can_be_read_by_everybody(tmp_path: Path, browser: Browser) -> None:
    runs = [make_run(tmp_path) for _ in range(7)]
    for place, run in enumerate(runs):
        spec = f'name = "arithmetic"\n[task]\nname = "arithmetic"\n[optimizer]\nlr = {place + 1}e-5\n'
        (run.path / "spec.toml").write_text(spec)
    require_readable(browser, write_comparison([run.path for run in runs], tmp_path))


def require_readable(browser: Browser, path: Path) -> None:
    with open_page(browser, width=400) as page:
        page.goto(path.as_uri())
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert not is_wider_than_screen(page)
        assert find_faults(page) == []
