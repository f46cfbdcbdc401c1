"""Links between the pages lead to files and headings that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/*.md")]
PATH = re.compile(r"(?:tests|src|docs|recipes|benchmarks|tools)/[\w/.-]+")


@cache
def read(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings in the spelling of code hosts."""
    tokens = read(page)
    headings = [tokens[index + 1].content for index, one in enumerate(tokens) if one.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each relative link, and the paths that stand in code."""
    for token in (child for one in read(page) for child in one.children or ()):
        if token.type == "code_inline" and PATH.fullmatch(token.content):
            yield ROOT / token.content, ""
        link = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if link and not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            yield (page.parent / name if name else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_is_there(page: Path) -> None:
    found = list(targets(page))
    assert [file for file, _ in found if not file.exists()] == []
    assert [(file.name, anchor) for file, anchor in found if anchor and anchor not in anchors(file)] == []
