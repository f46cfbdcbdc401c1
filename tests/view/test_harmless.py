"""What a model wrote cannot act on the reader's terminal or hide from the reader."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.view import make_harmless


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, \u00fcber 12\n\tnext", "plain, \u00fcber 12\n\tnext"),
        ("\x1b[2Jgone", "\u241b[2Jgone"),
        ("\x1b]0;title\x07", "\u241b]0;title\u2407"),
        ("over\rwritten", "over\u240dwritten"),
        ("dos\r\nline", "dos\nline"),
        ("c1 \x9b2J", "c1 <U+009B>2J"),
        ("\x7f", "\u2421"),
        ("abc\u202edef", "abc<U+202E>def"),
        ("zero\u200bwidth", "zero<U+200B>width"),
        ("half \ud800 pair", "half <U+D800> pair"),
    ],
)
def test_harmful_characters_become_visible(text: str, shown: str) -> None:
    assert make_harmless(text) == shown


@given(st.text(alphabet=st.characters(codec=None)))
def test_nothing_that_controls_is_left(text: str) -> None:
    shown = make_harmless(text)
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs")} - {"\n", "\t"}
    assert not left
    shown.encode("utf-8")
    assert make_harmless(shown) == shown
