r"""Finding the number that answers a grade-school problem: strop's way, and the three of lm-eval.

`auto` looks, in the text before any marker of a follow-up problem, for the first sentence 'The answer
is N.', then the first '#### N', then the last box, then the last number. It reads numbers as `answers`
does and compares them as decimals.

`strict`, `hash` and `flex` are lm-eval 0.4.13's filters bit for bit, for scores that are compared with
published ones: 'strict-match' of its task gsm8k_cot, 'strict-match' of gsm8k, and 'flexible-extract' of
both. Their flaws are kept: strict loses the last digit where no period follows, flex takes '..' for a
number and a minus for a sign, nothing is cut at a follow-up problem, and '18.00' is not '18', because
texts are compared. Source of the patterns: lm_eval/tasks/gsm8k/{gsm8k,gsm8k-cot}.yaml (MIT).
"""

from __future__ import annotations

import re
from typing import Literal

from strop.tasks.answers import NUMBER_PATTERN, last_number_text, parse_number
from strop.tasks.mathematics.answers import find_boxes

HarnessMode = Literal["strict", "hash", "flex"]

MARKED = re.compile(rf"####\s*({NUMBER_PATTERN})")
"""The form that strop's prompt asks for."""
_PHRASE = re.compile(
    rf"\bThe answer is:?\s*[*_]*({NUMBER_PATTERN})[*_]*(?=[ \t]*(?:\n|$)|[.!](?:\s|$))", re.IGNORECASE
)
_HARNESS = {
    "strict": re.compile(r"The answer is (\-?[0-9\.\,]+)."),
    "hash": re.compile(r"#### (\-?[0-9\.\,]+)"),
    "flex": re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"),
}
_HARNESS_IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


def find_number_text(text: str) -> str | None:
    """Return the text of the answering number by strop's own rules, or None."""
    if phrase := _PHRASE.search(text):
        return phrase.group(1)
    if marked := MARKED.search(text):
        return marked.group(1)
    boxes = find_boxes(text)
    if boxes and parse_number(boxes[-1]) is not None:
        return boxes[-1].strip()
    return last_number_text(text)


def harness_answer(mode: HarnessMode, text: str) -> str | None:
    """Return what lm-eval's filter takes from a reply, not yet cleaned; None for its '[invalid]'."""
    found = _HARNESS[mode].findall(text)
    if not found:
        return None
    last = found[-1 if mode == "flex" else 0]
    parts = [part for part in last if part] if isinstance(last, tuple) else [last]
    return parts[0].strip() if parts else None


def harness_clean(text: str) -> str:
    """Clean a text as lm-eval's metric `exact_match` does with the settings of its gsm8k tasks."""
    for pattern in _HARNESS_IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def harness_gold(mode: HarnessMode, solution: str) -> str:
    """Return the cleaned gold answer of a worked solution: all of it in gsm8k, its end in gsm8k_cot."""
    return harness_clean(solution if mode == "hash" else solution.rpartition("####")[2].strip())
