"""Turn the report of `strop audit --all --json` into a table: `python -m tools.audit_table < report.json`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

ORDER = ("red", "amber", "green", None)


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


def main() -> int:
    """Read the report from standard input and print Markdown."""
    reports: dict[str, dict[str, Any]] = json.load(sys.stdin)
    counts = Counter(report["verdict"] or "not audited" for report in reports.values())
    print("; ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) + ".\n")
    print("| task | verdict | what the probes found |\n|---|---|---|")
    for label in sorted(reports, key=lambda name: (ORDER.index(reports[name]["verdict"]), name)):
        report = reports[label]
        print(f"| `{label}` | {report['verdict'] or 'not audited'} | {describe(report)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
