"""The report: the page with its answers inside, one HTML file that asks nobody.

It opens from a disk or an attachment. Of each run it holds the curves, the evaluations, the facts, and a few
rollouts of the first and of the last recorded step. Texts of a model are JSON in it, which the page shows as
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from strop import __version__
from strop.io import write_bytes_atomically
from strop.record.files import DirectoryRecord, RecordFiles
from strop.view.answers import compare, describe_row, describe_run, instant, list_runs
from strop.view.live import EVALUATION, TRAINING, LiveRun

REPORT_NAME = "report.html"
COMPARISON_NAME = "comparison.html"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)


def write_report(run_dir: Path) -> Path:
    """Write a run's report into its directory atomically, and return its path.

    Works while the run goes on; a later call replaces the file.
    Raises: StoreError if it is not a run directory or the disk fails; CorruptRecord if a record in it
        is damaged.
    """
    path = run_dir / REPORT_NAME
    live = LiveRun(key=run_dir.resolve().name, record=DirectoryRecord(run_dir))
    write_bytes_atomically(path, render([live]).encode())
    return path


def write_report_of(name: str, record: RecordFiles, folder: Path) -> Path:
    """Write the report of a job's or a store's run as NAME-report.html in a folder; return its path.

    Raises: like `write_report`.
    """
    path = folder / f"{name.replace('/', '-')}-{REPORT_NAME}"
    write_bytes_atomically(path, render([LiveRun(key=name, record=record)]).encode())
    return path


def write_comparison(paths: Sequence[Path], folder: Path) -> Path:
    """Write comparison.html, the report of several runs beside the first, into a folder; return its path.

    Where their evaluations cannot be compared, it says why.
    Raises: StoreError if one is no run directory, or the disk fails; CorruptRecord if one is damaged.
    """
    path = folder / COMPARISON_NAME
    places = list(dict.fromkeys(run.resolve() for run in paths))
    names = [place.name for place in places]
    runs = [
        LiveRun(key=place.name if names.count(place.name) == 1 else str(place), record=DirectoryRecord(place))
        for place in places
    ]
    write_bytes_atomically(path, render(runs).encode())
    return path


def render(runs: Sequence[LiveRun]) -> str:
    """Return the page with its answers about these runs; of several, it begins with their comparison."""
    answers: list[tuple[list[Any], Any]] = [(["runs"], list_runs(runs))]
    start = f"#/run/{quote(runs[0].key, safe='')}"
    if len(runs) > 1:
        keys = [run.key for run in runs]
        answers.append((["compare", *keys], compare(runs)))
        start = f"#/compare?{urlencode([('run', key) for key in keys])}"
    for run in runs:
        answers += _answer(run)
    content = {
        "start": start,
        "made": f"report of {instant(_last_change(runs))}, strop {__version__}",
        # As the page asks: the path, then the values.
        "answers": {
            json.dumps([str(word) for word in words], ensure_ascii=False, separators=(",", ":")): answer
            for words, answer in answers
        },
    }
    # NaN is no JSON: numbers that were not measured must be absent. A text cannot end the script.
    kept = json.dumps(content, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return _inline(kept)


def _answer(run: LiveRun) -> list[tuple[list[Any], Any]]:
    """Return what the page may ask about a run: words and answer."""
    recorded = run.rollout_steps()
    steps = list(dict.fromkeys([*recorded[:1], *recorded[-1:]]))
    key = run.key
    told = {**describe_run(run), "writes_notes": False, "rollout_steps": steps, "reply_steps": []}
    answers: list[tuple[list[Any], Any]] = [
        (["run", key], told),
        (["metrics", key], run.list_metrics()),
        (["steps", key, TRAINING], {"steps": steps}),
        (["steps", key, EVALUATION], {"steps": []}),
    ]
    for step in steps:
        rows = run.choose_rows(step)
        answers.append((["rollouts", key, step, TRAINING], {"step": step, "rows": rows}))
        answers += [
            (["rollout", key, step, row["key"], TRAINING], describe_row(run, step, row["key"]))
            for row in rows
        ]
    return answers


def _last_change(runs: Sequence[LiveRun]) -> float:
    """Return when the last of the runs ended, or began where it has not."""
    states = [run.read_state() for run in runs]
    return max(state.finished_at or state.created_at for state in states)


def _inline(kept: str) -> str:
    """Return the page's one file: its modules are in an import map, because a file on a disk imports none."""
    folder = files("strop.view") / "page"
    page = folder.joinpath("index.html").read_text(encoding="utf-8")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    imports = {}
    for module in folder.iterdir():
        if module.name.endswith(".js"):
            text = module.read_text(encoding="utf-8").replace('from "./', 'from "strop/')
            imports[f"strop/{module.name}"] = f"data:text/javascript;charset=utf-8,{quote(text)}"
    scripts = (
        f'<script type="application/json" id="kept">{kept}</script>\n'
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
        '<script type="module">import "strop/main.js";</script>'
    )
    page = re.sub(r'<link rel="modulepreload"[^>]*>\n', "", page)
    for old, new in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="content-security-policy" content="{_POLICY}">',
        ),
        ('<link rel="stylesheet" href="page/page.css">', f"<style>{style}</style>"),
        ('<script type="module" src="page/main.js"></script>', scripts),
    ):
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page
