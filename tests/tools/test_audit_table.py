"""The tables of a report of `strop audit all`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tools.audit_table import MARK, main, render


def probe(name: str, status: str = "pass", value: float | None = 0.0, num: int = 3) -> dict[str, Any]:
    return {"probe": name, "status": status, "value": value, "num": num}


REPORTS: dict[str, dict[str, Any]] = {
    "sums": {
        "verdict": "green",
        "num_examples": 32,
        "probes": [probe("noop"), *(probe(name, "n/a", None, 0) for name in ("os_exit", "gold"))],
    },
    "programs": {
        "verdict": "red",
        "num_examples": 20,
        "probes": [probe("noop"), probe("gold"), probe("label_leak", "fail", 0.25, 6)],
    },
    "gsm8k": {"verdict": None, "cause": "needs files: gsm8k.source=...\nmore"},
}


def test_the_tables_by_hand() -> None:
    lines = render(REPORTS, "2026-01-02").splitlines()
    assert lines[0].startswith("On 2026-01-02, with ")
    assert lines[0].endswith("at most 32 examples of each: 1 green; 1 not audited; 1 red.")
    # Red first; of 3 probes of the sums, 2 do not apply.
    assert lines[4:7] == [
        "| `programs` | red | 3 | label_leak fail 0.25 |",
        "| `sums` | green | 1 |  |",
        "| `gsm8k` | not audited |  | needs files: gsm8k.source=... |",
    ]


def test_a_page_keeps_what_stands_above_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{MARK}\n\nold\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(REPORTS)))
    assert main([str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{MARK}\n\nOn ")
    assert "old" not in text


def test_a_page_without_the_mark_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(REPORTS)))
    assert main([str(page)]) == 1
    assert (page.read_text(), MARK in capsys.readouterr().err) == ("# Title\n", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "standard input is empty. Allowed: what `strop audit all --json` writes."),
        ("Usage: strop audit", "standard input is no JSON (Expecting value"),
        ("[]", "holds no table of reports by task"),
        ('{"sums": {"probes": []}}', "has no report with a verdict under 'sums'"),
        ('{"sums": {"verdict": "blue"}}', "has no report with a verdict under 'sums'"),
        ('{"sums": {"verdict": "green"}}', "has a report of 'sums' without num_examples and probes"),
    ],
)
def test_what_is_no_report_is_refused(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{MARK}\n\nold\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main([str(page)]) == 2
    assert words in capsys.readouterr().err
    assert page.read_text() == f"{MARK}\n\nold\n"
