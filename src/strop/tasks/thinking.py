"""Where a reply's thinking ends: what stands inside it is never judged."""

from __future__ import annotations

import re

# One tag at a time, so the time is linear in the text.
_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)


def text_after_thinking(text: str) -> str | None:
    """Return the text behind the last closed thinking block; all of it where nothing was thought.

    None if a block was opened and not closed: the reply ended before its answer. A closing tag
    without an opening one counts, because chat templates may open the block themselves.
    """
    start, is_open = 0, False
    for tag in _TAG.finditer(text):
        is_open = not tag.group(1)
        if not is_open:
            start = tag.end()
    return None if is_open else text[start:]
