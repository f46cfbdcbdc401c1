"""Reports, and a training while it goes on, as a browser shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from strop.view.report import write_comparison, write_report
from tests.fixtures.browser import find_faults, is_wider_than_screen, open_page
from tests.fixtures.commands import folder
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


def test_reports_can_be_read_by_everybody(tmp_path: Path, browser: Browser) -> None:
    runs = [make_run(tmp_path) for _ in range(7)]
    run = runs[0]
    raise_alarm(run, 3, "x" * 300)
    probes = [{"probe": "echo", "status": "warn", "detail": "y" * 200}]
    (run.path / "audit.json").write_text(json.dumps({"verdict": "amber", "probes": probes}))
    require_readable(browser, write_report(run.path))
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


if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["folder"]

LIMIT_MS = 240_000
NUM_STEPS = 4


@contextmanager
def command(words: Sequence[str], out: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and end it if it has not ended by itself."""
    program = str(Path(sys.executable).parent / "strop")
    with (
        Path(f"{words[0]}.err").open("w") as errors,
        subprocess.Popen(
            [program, *words], stdout=out, stderr=errors, text=True, env={**os.environ, "STROP_OFFLINE": "1"}
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def test_a_training_is_followed_from_its_beginning(folder: Path, browser: Browser) -> None:
    (folder / "runs").mkdir()
    with (
        command(["view", "runs", "--address", "127.0.0.1:0"], subprocess.PIPE) as view,
        browser.new_context() as context,
    ):
        assert view.stdout is not None
        address = view.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.goto(address)
        page.get_by_text("No run is here yet").wait_for()
        words = ["train", "run.toml", f"train.steps={NUM_STEPS}", "eval.every=2"]
        with command(words, subprocess.DEVNULL) as train:
            page.locator("tbody a").filter(has_text="tiny-").click()
            # Step after step, without a hand on the page.
            for step in range(1, NUM_STEPS + 1):
                page.locator("#pulse.live").filter(has_text=re.compile(rf"step [{step}-9]$")).wait_for()
            page.locator("p b", has_text="finished").wait_for()
            assert train.wait(timeout=LIMIT_MS / 1000) == 0
        assert f"{NUM_STEPS} of {NUM_STEPS} steps" in page.locator("#main").inner_text()
        page.locator(".headline .after").wait_for()
        chart = page.get_by_role("slider", name="Accuracy")
        chart.focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        page.locator("tr[data-href] a").first.click()
        page.locator(".tokens").first.focus()
        told = page.locator(".readout", has_text="token 1 of ").inner_text()
    assert re.search(r"log-probability -\d+\.\d{3} .*, advantage (-?\d+\.\d{3}|absent)$", told)
