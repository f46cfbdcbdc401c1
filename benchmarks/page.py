"""How fast `strop view` shows a run of 1,000 steps x 512 rollouts, in the system's Chromium.

Each round starts the server anew, opens a run, a step and a rollout by their addresses, each in a browser
that has seen nothing, scrolls through the run and through the step's rows, and appends steps to the record.
Times are taken in the page: from the navigation's start until all is there and the frame with it is out, from
the append until the step's number stands in the page.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Measured
from strop.record import MetricsLog, RunDir
from strop.record.run_dir import TOKENIZER_NAME
from strop.testing.records import RecordSize, make_record
from tests.fixtures.browser import find_chromium, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize

SIZE = RecordSize(num_steps=1000, num_rollouts=512)
SMALL = RecordSize(num_steps=40, num_rollouts=64, num_reply_tokens=60)
SCREEN: ViewportSize = {"width": 1280, "height": 1600}
"""High enough for a run's first curves below its alarms: others are drawn when they come into sight."""
NUM_ROUNDS = 5
NUM_APPENDS = 8
_LIMIT_MS = 60_000
_WATCH = """(() => {
    const isThere = () => document.querySelector('#main[data-view]') && (%s);
    const look = () => {
        if (window.shownAt !== undefined || !isThere()) return;
        window.shownAt = null;
        requestAnimationFrame(() => setTimeout(() => { window.shownAt = performance.now(); }));
    };
    new MutationObserver(look).observe(
        document, { subtree: true, childList: true, attributes: true, characterData: true });
})()"""
"""Notes when a condition holds and the frame with it is out."""
_SCROLL = """async () => {
    const gaps = [], tasks = [];
    new PerformanceObserver((list) => tasks.push(...list.getEntries().map((one) => one.duration)))
        .observe({ type: 'longtask' });
    let last = await new Promise(requestAnimationFrame);
    while (scrollY + innerHeight < document.documentElement.scrollHeight - 2) {
        scrollBy(0, 150);
        const now = await new Promise(requestAnimationFrame);
        gaps.push(now - last);
        last = now;
    }
    return { gaps, tasks };
}"""
_UNTIL = """(text) => new Promise((done) => {
    const pulse = document.getElementById('pulse');
    const look = () => { if (pulse.textContent.endsWith(text)) { done(Date.now()); watch.disconnect(); } };
    const watch = new MutationObserver(look);
    watch.observe(pulse, { childList: true, characterData: true, subtree: true });
    look();
})"""


def views(run: RunDir, size: RecordSize) -> dict[str, tuple[str, str]]:
    """Return what is opened: its place, and when all of it is there."""
    place = f"/run/{run.path.name}"
    curves = (
        "[...document.querySelectorAll('.read')]"
        f".some((one) => one.textContent.startsWith('step {size.num_steps}:'))"
    )
    rows = f"document.querySelectorAll('tr[data-href]').length === {size.num_rollouts}"
    tokens = f"document.querySelectorAll('.tokens span').length >= {size.num_reply_tokens}"
    step = f"{place}/step/{size.num_steps}"
    return {"run": (place, curves), "step": (step, rows), "rollout": (f"{step}/0", tokens)}


@contextmanager
def view_server(run: RunDir) -> Iterator[tuple[str, float]]:
    """Start `strop view`; yield its address and the seconds until it answered."""
    begun_at = time.perf_counter()
    program = str(Path(sys.executable).parent / "strop")
    command = [program, "view", str(run.path), "--address", "127.0.0.1:0"]
    # Its bytecode is kept, as where strop is installed.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip().rstrip("/")
            with urllib.request.urlopen(f"{address}/", timeout=60) as answer:
                assert answer.status == 200
            yield address, time.perf_counter() - begun_at
        finally:
            server.terminate()


def open_view(context: BrowserContext, address: str, place: str, condition: str) -> tuple[Page, float, float]:
    """Return a page with a view, the milliseconds until it was shown, and the kilobytes that were sent."""
    page = context.new_page()
    page.add_init_script(_WATCH % condition)
    sent = 0.0
    tap = context.new_cdp_session(page)
    tap.send("Network.enable")

    def count(event: Mapping[str, float]) -> None:
        nonlocal sent
        sent += event["encodedDataLength"]

    tap.on("Network.loadingFinished", count)
    page.goto(f"{address}/#{place}")
    deadline = time.monotonic() + _LIMIT_MS / 1000
    while not (shown_at := page.evaluate("window.shownAt")):
        assert time.monotonic() < deadline, f"{place} is not shown"
        page.wait_for_timeout(20)
    # What was asked last may still be counted.
    page.wait_for_timeout(200)
    return page, float(shown_at), sent / 1000


def follow(page: Page, run: RunDir, num_appends: int) -> list[float]:
    """Append steps; return the milliseconds until each was shown."""
    log, found = MetricsLog(run.path / "metrics.jsonl"), []
    lines = log.read()
    step, values = (
        int(lines[-1]["step"]),
        {name: value for name, value in lines[-1].items() if name != "step"},
    )
    for number in range(1, num_appends + 1):
        # Not in step with the server's looking.
        page.wait_for_timeout(300 + 37 * number)
        begun_at = time.time() * 1000
        log.append(step + number, values)
        found.append(page.evaluate(_UNTIL, f"step {step + number}") - begun_at)
    log.truncate_after(step)
    log.close()
    return found


def run_round(browser: Browser, run: RunDir, size: RecordSize, num_appends: int) -> dict[str, list[float]]:
    """Return what one round measured, by name; times of the server in s, of the page in ms."""
    found: dict[str, list[float]] = defaultdict(list)
    with view_server(run) as (address, start_s):
        found["start_s"].append(start_s)
        for name, (place, condition) in views(run, size).items():
            with browser.new_context(viewport=SCREEN) as context:
                page, shown_ms, kilobytes = open_view(context, address, place, condition)
                found[f"{name}_ms"].append(shown_ms)
                found[f"{name}_kB"].append(kilobytes)
                if name == "rollout":
                    continue
                scrolled = page.evaluate(_SCROLL)
                found[f"{name}_frames_ms"] += scrolled["gaps"]
                found[f"{name}_long_tasks_ms"] += scrolled["tasks"]
                if name == "run":
                    found["append_ms"] += follow(page, run, num_appends)
    return found


def measure_page(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure the page over a record of 1,000 x 512, whose tokens are those of a model."""
    program = find_chromium()
    assert program is not None, "chromium is not installed"
    size = SMALL if is_quick else SIZE
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, open_browser(program) as browser:
        run = make_record(Path(folder), size)
        shutil.copyfile(model_dir / "tokenizer.json", run.path / TOKENIZER_NAME)
        for number in range(1 if is_quick else NUM_ROUNDS + 1):
            measured = run_round(browser, run, size, 2 if is_quick else NUM_APPENDS)
            if number == 0 and not is_quick:
                # The first one reads Chromium and strop from the disk.
                continue
            for name, values in measured.items():
                found[name] += values

    def figure(name: str, key: str, unit: str, choose: str = "median", **goal: float) -> Figure:
        values = found[key] or [0.0]
        value = statistics.median(values) if choose == "median" else max(values)
        return Figure(name=name, unit=f"{unit}, {choose}", value=value, measured=tuple(values), **goal)

    return Measured(
        figures=[
            figure("start to the first answer", "start_s", "s", at_most=1.0),
            figure("a run, until its curves are shown", "run_ms", "ms", at_most=1000.0),
            figure("a step, until all rows are shown", "step_ms", "ms", at_most=1000.0),
            figure("a rollout, until its tokens are shown", "rollout_ms", "ms", at_most=1000.0),
            figure("sent for a run", "run_kB", "kB"),
            figure("sent for a step", "step_kB", "kB"),
            figure("sent for a rollout", "rollout_kB", "kB"),
            figure("scrolling through a run, a frame", "run_frames_ms", "ms", "max", at_most=100.0),
            figure("scrolling through a step's rows, a frame", "step_frames_ms", "ms", "max", at_most=100.0),
            figure("from an append until it is shown", "append_ms", "ms", "max", at_most=1000.0),
        ],
        details={"size": {"steps": size.num_steps, "rollouts": size.num_rollouts}, "rounds": dict(found)},
    )
