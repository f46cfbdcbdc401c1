"""The page loses one's place, hides damaged runs, calls the unscored trained, and shows what links name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tests.fixtures.attempts import start_command, wait_for_end
from tests.fixtures.browser import find_chromium, open_browser
from tests.view.served import served
from tests.view.synthetic_run import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("my runs")
    for name in ("one", "two"):
        make_run(root / name, num_steps=10, eval_steps=(0,))
        (run,) = (root / name).iterdir()
        run.rename(root / f"{name}-run")
        (root / name).rmdir()
    return root


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with served(root) as address:
        yield address


def ask(address: str, path: str) -> Any:
    with urlopen(f"{address}/api/{path}") as answer:
        return json.load(answer)


def test_notes_are_a_file_of_the_run(root: Path, address: str) -> None:
    secret = root.parent / "secret"
    secret.write_text("private")
    (root / "one-run" / "notes.md").symlink_to(secret)
    assert ask(address, f"run?run={quote('one-run')}")["notes"] == ""
    (root / "one-run" / "notes.md").unlink()


def test_a_run_without_its_state_is_listed_as_damaged(root: Path, address: str) -> None:
    lost = root / "two-run" / "run.json"
    kept = lost.read_bytes()
    lost.unlink()
    try:
        phases = {run["key"]: run["phase"] for run in ask(address, "runs")}
    finally:
        lost.write_bytes(kept)
    assert phases["two-run"] == "damaged"
    assert phases["one-run"] != "damaged"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    pytest.importorskip("playwright", reason="there is no Playwright")
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium")
    with open_browser(program) as browser:
        yield browser


@pytest.mark.slow
def test_runs_are_searched_and_sorted_and_back_finds_its_place(address: str, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 900, "height": 200})
    page.set_default_timeout(60_000)
    page.goto(f"{address}/#/")
    names = page.locator("tbody th a")
    page.locator("tbody tr").nth(1).wait_for()
    page.locator("select[name=sort]").select_option("name")
    assert names.all_inner_texts() == ["one-run", "two-run"]
    page.locator("input[type=search]").fill("TWO")
    names.nth(1).wait_for(state="detached")
    assert names.all_inner_texts() == ["two-run"]
    names.first.click()
    page.locator('#main[data-view="#/run/two-run"]').wait_for()
    page.go_back()
    # The page of a run has a search, too.
    page.get_by_label("search in runs").wait_for()
    # Search and order are those that were left.
    assert page.get_by_label("search in runs").input_value() == "TWO"
    assert names.all_inner_texts() == ["two-run"]

    page.goto(f"{address}/#/run/one-run")
    page.locator('#main[data-view="#/run/one-run"]').wait_for()
    page.evaluate("window.scrollTo(0, 300)")
    page.wait_for_function("window.scrollY === 300")
    page.wait_for_timeout(200)
    page.evaluate("location.hash = '#/'")
    page.locator('#main[data-view="#/"]').wait_for()
    page.wait_for_function("window.scrollY === 0")
    page.go_back()
    page.locator('#main[data-view="#/run/one-run"]').wait_for()
    page.wait_for_function("window.scrollY === 300")
    page.close()


REWARD = """
import zlib

def score(reply, answer, n):
    # Of four replies about one has no score, and the others differ.
    place = zlib.crc32(reply.encode()) % 4
    return None if place == 0 else float(place == 1)
"""


def test_a_rollout_without_a_score_is_not_called_trained(folder: Path) -> None:
    (folder / "own.py").write_text(REWARD)
    rows = [json.dumps({"q": f"{n}?", "a": str(n), "n": n}) for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    text = (folder / "run.toml").read_text()
    settings = '"rows"\nsource = "./rows.jsonl"\nprompt = "q"\nanswer = "a"\nreward = "own.py:score"'
    (folder / "run.toml").write_text(text.replace('"arithmetic"', settings))
    accepted = "train.accept=weights: random; audit: random"
    words = ("train", "run.toml", accepted, "train.group_size=16", "task.max_reply_tokens=16")
    assert wait_for_end(start_command(words, folder / "log")) == 0, (folder / "log").read_text()
    with served(folder / "runs") as address:
        (listed,) = json.load(urlopen(f"{address}/api/runs"))
        asked = json.load(urlopen(f"{address}/api/rollouts?run={listed['key']}&step=1"))
    statuses = {(row["reward"] is None, row["status"]) for row in asked["rows"]}
    assert (True, "unscored") in statuses, statuses
    assert (True, "trained") not in statuses
