"""The page in a real browser: what a person does with it, and what it must never do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from strop.record.rollouts import StoredRollout, read_row
from strop.view.report import write_comparison, write_report
from tests.fixtures.browser import find_faults, is_wider_than_screen, open_page
from tests.fixtures.commands import folder
from tests.view.rich_runs import ALARMS, HOSTILE, LAST, NOTE, RichRuns, append_step, cut_back, make_runs
from tests.view.served import served
from tests.view.synthetic_run import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["folder"]

pytestmark = pytest.mark.slow

NO_WORDS = r"\b(?:null|undefined|NaN)\b|\[object"
LIMIT_MS = 60_000
"""Two busy cores may need it; what is waited for takes a moment."""
SUM, TALK, LOST, SCRIPT, ESCAPED, TURNED, TOKENS, LINE = 0, 4, 6, 7, 8, 9, 10, 11
"""Rows of the last step of `RichRuns.whole`."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RichRuns:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def address(runs: RichRuns) -> Iterator[str]:
    with served(runs.root) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that keeps its security policy, and may not complain."""
    complaints: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
    assert complaints == []


def show(page: Page, address: str, place: str) -> None:
    """Open a view by its deep link, and wait until it is there."""
    page.goto(f"{address}/#{place}")
    wait_for(page, place)


def wait_for(page: Page, place: str) -> None:
    page.locator(f'#main[data-view="#{place}"]').wait_for(timeout=LIMIT_MS)


def wait_for_text(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for(timeout=LIMIT_MS)


def place_of(runs: RichRuns, *parts: object) -> str:
    """Return the place of the whole run, of a step, or of a rollout."""
    names = ["step", *parts] if parts else []
    return "/".join(["/run", runs.whole.path.name, *map(str, names)])


def compare_place(runs: RichRuns) -> str:
    return "/compare?" + urlencode([("run", run.path.name) for run in (runs.whole, runs.other)])


def all_places(runs: RichRuns) -> list[str]:
    others = (f"/run/{run.path.name}" for run in (runs.imitated, runs.begun))
    rollouts = (place_of(runs, LAST, index) for index in (SUM, TALK, LOST, ESCAPED))
    search = f"{place_of(runs)}/search?text=script"
    return ["/", place_of(runs), *others, place_of(runs, LAST), *rollouts, search, compare_place(runs)]


def stored(runs: RichRuns, index: int) -> StoredRollout:
    path = runs.whole.rollouts_path(LAST)
    return read_row(path.read_bytes(), str(path), index)


def open_folds(page: Page) -> None:
    for fold in page.locator("summary").all():
        fold.click()


def test_every_view_can_be_read_by_everybody(
    browser: Browser, address: str, runs: RichRuns, tmp_path: Path
) -> None:
    found = {}
    # Their last evaluations are of different steps, of which a note tells.
    several = [make_run(tmp_path, num_steps=3, eval_steps=(0, step)).path for step in (2, 3)]
    with open_page(browser, width=400) as page:
        for place in all_places(runs):
            show(page, address, place)
            open_folds(page)
            found[place] = find_faults(page) + ["wider than the screen"] * is_wider_than_screen(page)
            found[place] += re.findall(NO_WORDS, page.locator("#main").inner_text())
        for index in (0, 1):
            show(page, address, place_of(runs, LAST, index))
            page.get_by_label("colour tokens by").select_option("advantage")
            found[f"advantages {index}"] = find_faults(page)
        page.get_by_role("button", name="Keys").click()
        found["keys"] = find_faults(page)
        for path in (write_report(runs.whole.path), write_comparison(several, tmp_path)):
            page.goto(path.as_uri())
            page.locator("#main[data-view] h1").wait_for()
            open_folds(page)
            # What was opened takes its place in the next moment.
            page.wait_for_timeout(500)
            found[path.name] = find_faults(page) + ["wider than the screen"] * is_wider_than_screen(page)
            found[path.name] += re.findall(NO_WORDS, page.locator("#main").inner_text())
        # Its 4,000 tokens keep axe busy for seconds.
        show(page, address, place_of(runs, LAST, LINE))
        found["line"] = ["wider than the screen"] * is_wider_than_screen(page)
    assert {place: faults for place, faults in found.items() if faults} == {}


def test_a_running_run_is_followed(page: Page, address: str, runs: RichRuns) -> None:
    run = runs.other
    show(page, address, f"/run/{run.path.name}")
    wait_for_text(page, "#pulse", f"following, step {LAST}")
    append_step(run, LAST + 1, accuracy=0.5)
    wait_for_text(page, "#pulse", f"following, step {LAST + 1}")
    wait_for_text(page, "figure .read", f"step {LAST + 1}: training, each step 50.0%")
    # As a resume does: what came later never was.
    cut_back(run, LAST - 5)
    wait_for_text(page, "figure .read", re.compile(f"^step {LAST - 5}: training"))
    for step in range(LAST - 4, LAST + 1):
        append_step(run, step)
    wait_for_text(page, "#pulse", f"following, step {LAST}")
    assert f"step {LAST + 1}" not in page.locator("#main").inner_text()


def test_a_step_of_a_curve_opens_its_rollouts(page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, place_of(runs))
    chart = page.get_by_role("slider", name="Accuracy")
    chart.scroll_into_view_if_needed()
    # It is drawn when it comes into sight.
    wait_for_text(page, "figure .read", f"step {LAST}: training")
    box = chart.bounding_box()
    assert box is not None
    chart.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    step = int(chart.get_attribute("aria-valuenow") or "")
    assert 10 < step < 20
    assert (chart.get_attribute("aria-valuetext") or "").startswith(f"step {step}: training, each step ")
    chart.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    wait_for(page, place_of(runs, step))
    assert page.get_by_role("heading", level=1).inner_text() == f"Step {step}"
    page.go_back()
    wait_for(page, place_of(runs))


def test_a_reply_is_read_token_by_token(page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, place_of(runs, LAST, SUM))
    kept = stored(runs, SUM)
    reply, advantages = kept.rollout.turns[1], kept.advantages[1]
    tokens = page.get_by_role("group", name="tokens of turn 2")
    assert "".join(tokens.locator("span").all_text_contents()) == reply.text
    tokens.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert reply.logprobs is not None
    assert advantages is not None
    told = page.locator(".readout").inner_text()
    assert told.startswith(f"token 4 of {len(reply.token_ids)}: ")
    assert f"log-probability {reply.logprobs[3]:.3f} " in told
    assert f"advantage {advantages[3]:.3f}" in told
    # Where nothing was recorded, nothing is claimed.
    show(page, address, place_of(runs, LAST, ESCAPED))
    page.get_by_role("group", name="tokens of turn 2").focus()
    wait_for_text(page, ".readout", "advantage absent")


def test_a_conversation_is_told_turn_by_turn(page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, place_of(runs, LAST, TALK))
    texts = page.get_by_role("article").all_inner_texts()
    told = [["prompt", "What is 17 * 23?"], ["calculator", "17*23"], ["environment", "391"], ["It is 391."]]
    assert len(texts) == len(told)
    for text, words in zip(texts, told, strict=True):
        assert all(word in text for word in words)


def test_rollouts_are_filtered_and_found(browser: Browser, page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, place_of(runs, LAST))
    rows = page.locator("tr[data-href]")
    assert rows.count() == 12
    page.get_by_label("show").select_option("solved")
    wait_for_text(page, "[role=status]", "4 of 12 rollouts")
    page.get_by_label("show").select_option("")
    page.get_by_label("search in this step").fill("17*23")
    page.keyboard.press("Enter")
    wait_for_text(page, "[role=status]", "2 of 12 rollouts")
    # The address leads somebody else to the same rows.
    with browser.new_context() as elsewhere:
        other = elsewhere.new_page()
        other.goto(page.url)
        wait_for_text(other, "[role=status]", "2 of 12 rollouts")
        assert other.locator("tr[data-href]").all_inner_texts() == rows.all_inner_texts()
    show(page, address, f"{place_of(runs)}/search?{urlencode({'text': 'zwölf'})}")
    wait_for_text(page, "[role=status]", "1 found")
    page.locator("tr[data-href] a").click()
    wait_for(page, place_of(runs, LAST, 2))


def test_two_runs_are_compared(page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, "/")
    button = page.get_by_role("button", name="compare the chosen runs")
    assert button.is_disabled()
    for run in (runs.whole, runs.other):
        page.get_by_label(f"compare {run.path.name}").check()
    button.click()
    wait_for(page, compare_place(runs))
    change = page.get_by_role("region", name="Paired changes").inner_text()
    assert re.search(r"[+\u2212]\d+\.\d points", change)
    assert "no difference shown" in change
    differing = page.get_by_role("region", name="Settings that differ").inner_text()
    assert "train.lr" in differing
    assert "2e-05" in differing
    assert page.get_by_role("slider", name="Reward").is_visible()


def test_an_alarm_is_explained(page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, place_of(runs))
    alarms = page.locator("section", has=page.get_by_role("heading", name="Alarms")).locator(".alarm")
    told = {text.split()[0]: text for text in alarms.all_inner_texts()}
    for cause, detail in ALARMS.items():
        assert detail in told[cause]
    meaning = alarms.filter(has_text="reply_collapse").locator("details")
    meaning.locator("summary").click()
    assert "Read the rollouts" in meaning.inner_text()
    alarms.filter(has_text="reply_collapse").get_by_role("link", name="step").click()
    wait_for(page, place_of(runs, 11))


def test_notes_gate_and_plan_are_shown(page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, place_of(runs))
    for name in ("Notes", "Gate: 2 checks"):
        page.locator("summary", has_text=name).first.click()
    text = page.locator("#main").inner_text()
    assert NOTE in text
    assert "20 of 20 gold answers are right" in text
    assert "Predicted and actual" in text
    assert "price of a step" in text


def test_notes_are_written_where_the_page_may(page: Page, runs: RichRuns) -> None:
    path = runs.other.path / "notes.md"
    with served(runs.root, writes_notes=True) as address:
        show(page, address, f"/run/{runs.other.path.name}")
        page.locator("summary", has_text="Notes").first.click()
        page.get_by_label("notes").fill(f"Warm-up was too short. {HOSTILE}")
        page.get_by_role("button", name="save notes").click()
        page.get_by_text("saved", exact=True).wait_for()
        assert path.read_text() == f"Warm-up was too short. {HOSTILE}"
        page.reload()
        page.locator("summary", has_text="Notes").first.click()
        assert page.get_by_label("notes").input_value() == path.read_text()
        page.goto("about:blank")
    path.unlink()


def test_hostile_texts_stay_texts(page: Page, address: str, runs: RichRuns) -> None:
    places = [place_of(runs), place_of(runs, LAST)]
    places += [place_of(runs, LAST, index) for index in (SCRIPT, ESCAPED, TURNED, TOKENS, LINE)]
    for place in places:
        show(page, address, place)
        open_folds(page)
        assert page.locator("main :is(script, img, iframe, a[href^=javascript])").count() == 0
        text = page.locator("main").text_content() or ""
        # Tags are read, and what would act on a terminal or turn letters round is seen.
        assert "<script>" in text
        assert not set("\x1b\x07\u202e\u2066\u2069") & set(text)
        assert "caught" not in page.title()
    show(page, address, place_of(runs, LAST, SCRIPT))
    assert page.get_by_role("group", name="tokens of turn 2").text_content() == HOSTILE


def test_a_theme_is_chosen_and_kept(page: Page, address: str) -> None:
    def paper() -> object:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    show(page, address, "/")
    light = paper()
    page.emulate_media(color_scheme="dark")
    dark = paper()
    assert dark != light
    page.keyboard.press("t")
    assert paper() == light
    page.reload()
    wait_for(page, "/")
    assert paper() == light
    page.get_by_role("button", name="Theme").click()
    assert paper() == dark


def press_until(page: Page, key: str, selector: str) -> None:
    """Press a key until what is focused matches."""
    for _ in range(80):
        page.keyboard.press(key)
        if page.evaluate("one => document.activeElement.matches(one)", selector):
            return
    pytest.fail(f"{key} does not reach {selector}")


def test_everything_is_reached_by_keys_alone(page: Page, address: str, runs: RichRuns) -> None:
    show(page, address, "/")
    press_until(page, "j", f"a[href$='{runs.whole.path.name}']")
    page.keyboard.press("Enter")
    wait_for(page, place_of(runs))
    press_until(page, "Tab", "canvas")
    page.keyboard.press("Home")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    wait_for(page, place_of(runs, LAST))
    press_until(page, "j", f"a[href$='/{TALK}']")
    page.keyboard.press("Enter")
    wait_for(page, place_of(runs, LAST, TALK))
    press_until(page, "Tab", ".tokens")
    page.keyboard.press("ArrowRight")
    wait_for_text(page, ".readout", "token 2 of 85")
    page.keyboard.press("j")
    wait_for(page, place_of(runs, LAST, TALK + 1))
    page.keyboard.press("u")
    wait_for(page, place_of(runs, LAST))
    page.keyboard.press("[")
    wait_for(page, place_of(runs, LAST - 1))
    page.keyboard.press("/")
    page.keyboard.type("sum")
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    wait_for(page, place_of(runs))
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    wait_for(page, "/")


def test_what_is_not_there_is_said(browser: Browser, address: str, runs: RichRuns) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        for place in ("/run/nobody", place_of(runs, 999), place_of(runs, LAST, 99)):
            show(page, address, place)
            assert len(page.get_by_role("alert").inner_text()) > 20


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


TRAINING_LIMIT_MS = 240_000
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
        page.set_default_timeout(TRAINING_LIMIT_MS)
        page.goto(address)
        page.get_by_text("No run is here yet").wait_for()
        words = ["train", "run.toml", f"train.steps={NUM_STEPS}", "eval.every=2"]
        with command(words, subprocess.DEVNULL) as train:
            page.locator("tbody a").filter(has_text="tiny-").click()
            # Step after step, without a hand on the page.
            for step in range(1, NUM_STEPS + 1):
                page.locator("#pulse.live").filter(has_text=re.compile(rf"step [{step}-9]$")).wait_for()
            page.locator("p b", has_text="finished").wait_for()
            assert train.wait(timeout=TRAINING_LIMIT_MS / 1000) == 0
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
