"""Put what `strop sandbox attack --json` found behind the text of a page, as tables.

`strop sandbox attack --json | python -m tools.attack_table docs/sandbox-attacks.md` replaces all that stands
behind the line `MARK`; without a page, the tables go to standard output. A line of facts about the host comes
first; a test compares what follows it with attacks that are made anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from strop.sandbox.attack import ATTACKS
from strop.sandbox.choose import REMOTE
from strop.sandbox.doctor import read_facts
from tools.audit_table import publish

MARK = "<!-- Written by tools/attack_table.py; what stands below is replaced. -->"
BACKENDS = ("process", "bubblewrap", "podman", "docker", REMOTE)
_FACTS = ("kernel", "user", "control groups", "bwrap", "podman", "docker daemon", "runc")


def describe_host() -> str:
    """Return the line of facts about this host."""
    facts = read_facts()
    return f"On {time.strftime('%Y-%m-%d')}: " + "; ".join(f"{name} {facts[name]}" for name in _FACTS) + "."


def render(found: list[dict[str, Any]]) -> str:
    """Return the tables as Markdown.

    Raises: ValueError naming a backend or an attack of which nothing was found.
    """
    by_name = {one["name"]: one for one in found}
    codes = {name: _codes(by_name, name) for name in BACKENDS}
    lines = [
        f"| row | attack | it tries | judged by | {' | '.join(BACKENDS)} |",
        "|---" * (4 + len(BACKENDS)) + "|",
    ]
    for one in ATTACKS:
        cells = " | ".join(_code(codes[name], one.name) for name in BACKENDS)
        lines.append(f"| {one.row} | `{one.name}` | {one.tries} | {one.judged} | {cells} |")
    lines += ["", "Worse than contained, and what the sandbox's record says there:", ""]
    lines += ["| backend | attack | code | record |", "|---|---|---|---|"]
    for name in BACKENDS:
        for attack, verdict in codes[name].items():
            if verdict["code"] > "C":
                lines.append(f"| {name} | `{attack}` | {verdict['code']} | {verdict['why']} |")
    return "\n".join(lines) + "\n"


def _code(verdicts: dict[str, dict[str, Any]], attack: str) -> str:
    return str(verdicts[attack]["code"]) if attack in verdicts else "-"


def _codes(by_name: dict[str, dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    verdicts = {one["attack"]: one for one in by_name.get(name, {}).get("verdicts", ())}
    needed = [attack.name for attack in ATTACKS if name == REMOTE or not attack.is_on_service]
    if missing := [attack for attack in needed if attack not in verdicts]:
        raise ValueError(f"nothing of {missing[0]} and {len(missing) - 1} others on {name}")
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    """Read what was found from standard input; write into the page that is named, or print."""
    parser = argparse.ArgumentParser(prog="python -m tools.attack_table", description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, help="the page; without it, the tables are printed")
    page: Path | None = parser.parse_args(arguments).page
    try:
        text = f"{describe_host()}\n\n{render(json.loads(sys.stdin.read()))}"
    except (ValueError, KeyError, TypeError) as error:
        print(
            f"standard input: {error}. Allowed: what `strop sandbox attack --json` writes, of all backends."
            " Next: strop sandbox attack --json | python -m tools.attack_table docs/sandbox-attacks.md",
            file=sys.stderr,
        )
        return 2
    return publish(page, MARK, text)


if __name__ == "__main__":
    sys.exit(main())
