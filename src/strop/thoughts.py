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


def split_thought(
    text: str, is_argument: Callable[[str], bool] | None = None
) -> tuple[str | None, str | None]:
    """Return what a reply thinks, and what it says behind that.

    The thought is None if there is none; what is said is None if a thought has no end. A mark that closes
    counts without one that opens, because chat templates may open the thought themselves; of several
    thoughts the last closed one counts.
    `is_argument`: for a reply that may call tools. Only its first thought counts, because marks behind that
    may stand in arguments. It says of a mark that does not begin the reply whether it stands in those of a
    call.
    """
    for opening, closing in _BARE:
        if (begun := opening.match(text.lstrip())) is not None:
            thought, is_closed, said = text.lstrip()[begun.end() :].rpartition(closing)
            return (thought, said) if is_closed else (said, None)
    marks = [(mark.start(), mark.end(), mark.group().lower() in _CLOSING) for mark in _THOUGHT.finditer(text)]
    closed = [index for index, (_, _, is_closing) in enumerate(marks) if is_closing]
    if marks and is_argument is not None:
        start, end, is_closing = marks[0]
        if (is_closing or text[:start].strip()) and is_argument(text[start:end]):
            return None, text
        closed = closed[:1]
        marks = marks[: closed[0] + 1] if closed else marks
    if not marks:
        return None, text
    first_open = closed[-1] + 1 if closed else 0
    if first_open < len(marks):
        return text[marks[first_open][1] :], None
    start, end, _ = marks[-1]
    thought, said = text[0 if marks[0][2] else marks[0][1] : start], text[end:]
    return thought, _WRAPPERS.sub("", said) if _WRAPPERS.match(said) else said


def first_mark(text: str) -> tuple[int, bool]:
    """Return where the first mark of a thought stands, and whether it opens one; -1 where there is none."""
    mark = _THOUGHT.search(text)
    return (-1, False) if mark is None else (mark.start(), mark.group().lower() not in _CLOSING)


def begun_thought(prompt: str) -> str:
    """Return the mark of a thought with which a prompt ends: what a reply to it goes on with."""
    tail = prompt[-64:].rstrip()
    return next((opening for opening, _ in _THOUGHTS if tail.endswith(opening)), "")
