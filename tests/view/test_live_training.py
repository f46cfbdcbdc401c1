"""A training is followed in a browser while it goes on, by the commands `strop train` and `strop view`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.commands import folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
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
