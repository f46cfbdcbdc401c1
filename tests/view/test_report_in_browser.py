"""The report, and that of several runs, as a browser shows them from a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from strop.view.report import write_comparison, write_report
from tests.fixtures.browser import find_faults, is_wider_than_screen, open_page
from tests.view.rich_runs import HOSTILE, LAST, make_runs
from tests.view.synthetic_run import make_run, raise_alarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow


def test_a_report_is_the_page_and_asks_nobody(tmp_path: Path, browser: Browser) -> None:
    run = make_runs(tmp_path).whole
    path = write_report(run.path)
    asked: list[str] = []
    complaints: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        page.get_by_role("heading", name=run.path.name).wait_for()
        # It is drawn when it comes into sight.
        page.get_by_role("slider", name="Accuracy").scroll_into_view_if_needed()
        page.wait_for_selector(f"[role=slider][aria-label=Accuracy][aria-valuenow='{LAST}']")
        # What would act in it is text.
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert HOSTILE.split("<")[0] in (page.locator("main").text_content() or "")
        assert page.locator("main :is(script, img, iframe)").count() == 0
        # A reply is read token by token, and `j` leads to the next one.
        page.get_by_role("region", name=f"Rollouts of step {LAST}").get_by_role("link").first.click()
        page.locator("article .tokens").first.wait_for()
        first = page.url
        page.keyboard.press("j")
        page.wait_for_function("before => location.href !== before", arg=first)
        page.get_by_role("article").first.wait_for()
        # What it does not hold is said.
        page.goto(f"{path.as_uri()}#/run/{run.path.name}/step/2")
        assert page.get_by_role("alert").inner_text()
    assert {url.partition("#")[0] for url in asked if not url.startswith("data:")} == {path.as_uri()}
    assert complaints == []


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
        page.locator("main h1").wait_for()
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        # What was opened takes its place in the next moment.
        page.wait_for_timeout(500)
        assert not is_wider_than_screen(page)
        assert find_faults(page) == []
