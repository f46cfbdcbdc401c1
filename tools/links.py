"""Find dead links in Markdown: files that are not there, headings of other names, tests that are gone.

Only what this repository can answer for: relative links, anchors, and in code spans the names of tests
(`test_what_it_does`, or `test_what_...` for several) and paths below tests/. Addresses on the web are left
out on purpose, because a check that needs the network fails for reasons of its own.

Usage: python -m tools.links [ROOT]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import unquote

_FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
_CODE_SPAN = re.compile(r"(`+)(?:(?!\1).)+\1")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)")
_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+(.*?)\s*#*\s*$")
_HTML_ANCHOR = re.compile(r"<[^>]+\b(?:id|name)=\"([^\"]+)\"")
_TEST = re.compile(r"`(tests/[\w/.-]+|test_\w+(?:\.\.\.)?)`")
_TEST_FUNCTION = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
_ELSEWHERE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines outside fenced code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        elif not fence:
            yield number, line


def name_anchors(text: str) -> set[str]:
    """Return the anchors of a document: its headings in the spelling of code hosts, and HTML ids."""
    seen: Counter[str] = Counter()
    anchors: set[str] = set()
    for _, line in prose_lines(text):
        anchors.update(_HTML_ANCHOR.findall(line))
        heading = _HEADING.match(line)
        if not heading:
            continue
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def find_links(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and target of every link outside code."""
    for number, line in prose_lines(text):
        plain = _CODE_SPAN.sub("", line)
        reference = _REFERENCE.match(plain)
        targets = [reference[1]] if reference else _LINK.findall(plain)
        for target in targets:
            yield number, target


@cache
def name_tests(root: Path) -> frozenset[str]:
    """Return the names of all tests."""
    files = (root / "tests").rglob("test_*.py")
    return frozenset(name for path in files for name in _TEST_FUNCTION.findall(path.read_text("utf-8")))


def has_test(root: Path, name: str) -> bool:
    """Return whether there is a test of a name, one that begins so, or such a path."""
    if name.startswith("tests/"):
        return (root / name).exists()
    beginning = name.removesuffix("...")
    return any(one == name or (name != beginning and one.startswith(beginning)) for one in name_tests(root))


def check_document(path: Path, root: Path) -> Iterator[str]:
    """Yield one message per dead link of a document."""
    text = path.read_text(encoding="utf-8")
    for number, line in prose_lines(text):
        for name in _TEST.findall(line):
            if not has_test(root, name):
                where = f"{path.relative_to(root).as_posix()}:{number}"
                yield f"{where}: {name} is no test. Next: name the test that proves it."
    for number, target in find_links(text):
        if _ELSEWHERE.match(target):
            continue
        name, _, anchor = target.partition("#")
        aim = (path.parent / unquote(name)).resolve() if name else path.resolve()
        where = f"{path.relative_to(root).as_posix()}:{number}"
        if not aim.is_relative_to(root.resolve()):
            yield f"{where}: {target} leads out of the repository. Next: link to a file in it."
        elif not aim.exists():
            yield f"{where}: {target} does not exist. Next: correct or remove the link."
        elif anchor and aim.suffix == ".md" and anchor not in name_anchors(aim.read_text(encoding="utf-8")):
            yield f"{where}: {target} names no heading of {aim.name}. Next: use a heading's own words."


def list_documents(root: Path) -> list[Path]:
    """List the Markdown files that git would keep, so an environment's own files are left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "*.md"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in sorted(listed.split("\0")) if name and (root / name).is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all documents; return 1 if a link is dead."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    root = Path(given[0] if given else ".")
    documents = list_documents(root)
    dead = [message for path in documents for message in check_document(path, root)]
    for message in dead:
        print(message)
    print(f"links: {len(documents)} documents, {len(dead)} dead links")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
