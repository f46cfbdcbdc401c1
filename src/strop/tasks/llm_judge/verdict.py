"""What of a judge's answer counts: the JSON object that it ends with, and nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from strop.rollout import Failure, FailureOwner
from strop.tasks.thinking import text_after_thinking

UNPARSABLE = "judge_unparsable"
"""Kind of failure: the judge answered, and not with a score."""
OUT_OF_BOUNDS = "judge_out_of_bounds"
_MAX_SHOWN = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A score that a judge gave."""

    score: float
    """In [0, 1]."""
    reason: str = ""


def read_judgement(answer: str) -> Judgement | Failure:
    """Read the last JSON object of an answer; what the judge thought before is dropped.

    A failure where the answer does not end in an object with a number from 0 to 1 as its score.
    """
    text = text_after_thinking(answer)
    found = None if text is None else _last_object(text)
    score = None if found is None else found.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        shown = answer.strip()[-_MAX_SHOWN:]
        return Failure(owner=FailureOwner.ENGINE, kind=UNPARSABLE, detail=f"the judge ended with {shown!r}")
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        detail = f"the judge gave {score}, and scores are from 0 to 1"
        return Failure(owner=FailureOwner.ENGINE, kind=OUT_OF_BOUNDS, detail=detail)
    assert found is not None
    return Judgement(score=float(score), reason=str(found.get("reason", "")))


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text ends with, in a code fence or not, or None."""
    text = text.rstrip().removesuffix("```").rstrip()
    if not text.endswith("}"):
        return None
    decoder = json.JSONDecoder()
    start = text.rfind("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = -1
        if end == len(text):
            return value if isinstance(value, dict) else None
        start = text.rfind("{", 0, start)
    return None
