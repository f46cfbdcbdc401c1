"""What a reply to a sum is worth."""

import re


def score(reply: str, answer: str) -> bool:
    """Right if the last number of the reply is the answer."""
    numbers = re.findall(r"-?\d+", reply)
    return bool(numbers) and numbers[-1] == answer
