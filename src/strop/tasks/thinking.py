"""Where a reply's thinking ends: what stands inside it is never judged."""

from __future__ import annotations

import re
from collections.abc import Sequence

from strop.tasks.answers import cut_at_first

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


def judged_text(reply: str, markers: Sequence[str] = ()) -> str | None:
    """Return the part of a reply that counts: behind its thinking, and before the first marker there.

    None if its thinking did not end. Thoughts may hold a marker; a block that begins behind one does not
    count, because the reply had gone on to a problem of its own making.
    """
    head = cut_at_first(reply, tuple(markers))
    first_tag = _TAG.search(reply)
    if first_tag is None or (not first_tag.group(1) and first_tag.start() >= len(head)):
        return head
    answer = text_after_thinking(reply)
    return None if answer is None else cut_at_first(answer, tuple(markers))
