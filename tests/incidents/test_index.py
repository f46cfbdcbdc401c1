"""The table of incidents in docs/incidents.md: each code, what it was, and the tests that inject it.

`python -m tests.incidents.test_index` writes the tests' names into the table; what an incident was is written
there by hand.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "incidents.md"
_TEST = re.compile(r"^\s*(?:async )?def test_([a-z]{3})_(\d+)_\w+", re.MULTILINE)
_ROW = re.compile(r"^\| ([A-Z]{3}-\d+) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def find_tests() -> dict[str, str]:
    """Return links to the files with tests of each incident, by code."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(TESTS.rglob("test_*.py")):
        place = file.relative_to(TESTS).as_posix()
        for letters, number in dict.fromkeys(_TEST.findall(file.read_text())):
            found[f"{letters.upper()}-{number}"].append(f"[{place}](../tests/{place})")
    return {code: ", ".join(places) for code, places in found.items()}


def test_every_incident_has_a_row_with_its_tests() -> None:
    rows = {code: (what, tests) for code, what, tests in _ROW.findall(PAGE.read_text())}
    assert {code: tests for code, (_, tests) in rows.items()} == find_tests()
    assert all(len(what) > 20 for what, _ in rows.values())


if __name__ == "__main__":
    tests = find_tests()
    text = _ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {tests.pop(row[1], '')} |", PAGE.read_text())
    PAGE.write_text(text)
