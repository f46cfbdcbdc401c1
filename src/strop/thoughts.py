"""Thoughts in replies, as each family of models marks them."""

from __future__ import annotations

import re
from collections.abc import Callable

_THOUGHTS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning")),
    # Seed-OSS, LongCat, Magistral, Kimi-VL, Command A, Apertus, Sky-T1, MedGemma, Hy3.
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<unused94>thought", "<unused95>"),
    ("<think:opensource>", "</think:opensource>"),
    # Gemma 4; gpt-oss, whose answer stands in a channel of its own.
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""How families begin and end a thought."""
_CLOSING = {mark.lower() for _, mark in _THOUGHTS}
_THOUGHT = re.compile("|".join(re.escape(mark) for pair in _THOUGHTS for mark in pair), re.IGNORECASE)
_BARE = (
    # gpt-oss without its special tokens, and Granite 3.2: words that can only stand at the beginning.
    (re.compile(r"analysis(?=[A-Z\"'(])"), "assistantfinal"),
    (re.compile(r"here(?:'s| is) my thought process:", re.IGNORECASE), "Here is my response:"),
)
_WRAPPERS = re.compile(
    r"\s*(?:</?response>|<\|(?:START|END)_RESPONSE\|>|<\|(?:begin|end)_of_solution\|>)\s*", re.IGNORECASE
)


def split_thought(text: str) -> tuple[str | None, str | None]:
    """Return what a reply thinks, and what it says behind that.

    The thought is None if there is none; what is said is None if a thought has no end. A mark that closes
    counts without one that opens, because chat templates may open the thought themselves; of several
    thoughts the last closed one counts.
    """
    for opening, closing in _BARE:
        if (begun := opening.match(text.lstrip())) is not None:
            thought, is_closed, said = text.lstrip()[begun.end() :].rpartition(closing)
            return (thought, said) if is_closed else (said, None)
    start, end, opened, first = 0, 0, -1, None
    for mark in _THOUGHT.finditer(text):
        if mark.group().lower() in _CLOSING:
            end, start, opened = mark.start(), mark.end(), -1
        else:
            opened = mark.end() if opened < 0 else opened
        first = mark if first is None else first
    if first is None:
        return None, text
    inner = first.end() if first.group().lower() not in _CLOSING else 0
    if opened >= 0:
        return text[opened:], None
    said = text[start:]
    if _WRAPPERS.match(said):
        said = _WRAPPERS.sub("", said)
    return text[inner:end], said


def first_mark(text: str) -> tuple[int, bool]:
    """Return where the first mark of a thought stands, and whether it opens one; -1 where there is none."""
    mark = _THOUGHT.search(text)
    return (-1, False) if mark is None else (mark.start(), mark.group().lower() not in _CLOSING)


def begun_thought(prompt: str) -> str:
    """Return the mark of a thought with which a prompt ends: what a reply to it goes on with."""
    tail = prompt[-64:].rstrip()
    return next((opening for opening, _ in _THOUGHTS if tail.endswith(opening)), "")


def first_thought(text: str, is_argument: Callable[[str], bool]) -> tuple[str | None, str | None]:
    """Split a reply behind its first thought, as `split_thought` does; marks behind that stand in prose.

    `is_argument` says of a mark that does not begin the reply whether it stands in the arguments of a call.
    """
    marks = list(_THOUGHT.finditer(text))
    if not marks:
        return split_thought(text)
    opening = marks[0] if marks[0].group().lower() not in _CLOSING else None
    closing = next((mark for mark in marks if mark.group().lower() in _CLOSING), None)
    begin = 0 if opening is None else opening.end()
    if (opening is None or text[: opening.start()].strip()) and is_argument(marks[0].group()):
        return None, text
    return (text[begin:], None) if closing is None else (text[begin : closing.start()], text[closing.end() :])
