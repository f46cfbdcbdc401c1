"""The letter that a reply gives as its answer, compared with the right one."""

import re

_ANSWER = re.compile(r"answer(?: is)?:?\s*\**\(?([A-D])\b", re.IGNORECASE)


def score(reply: str, answer: str) -> float:
    """Pay for the last answer that a reply names; none named is a wrong one."""
    named = _ANSWER.findall(reply)
    return float(bool(named) and named[-1].upper() == answer)
