"""Sums of two whole numbers: the canary that every machine can train on.

All ordered pairs of a range, so 3 + 5 and 5 + 3 are two examples and may stand on different sides
of the split. A pair is made when it is looked at; a range of any size costs no memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import overload

from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import ArithmeticSpec
from strop.tasks.answers import ends_with_number, last_number
from strop.tasks.contract import TaskLimits
from strop.tasks.version import hash_version, limit_reply

_MAX_REPLY_TOKENS = 32
_PROMPT = "What is {a} + {b}?"
_VERIFIER = "last-number-1"
_NUM_ROUNDS = 4


class Arithmetic:
    """What is a + b? Right if the last number of the reply is the sum.

    `format_ok`: the reply ends with a number. See `answers` for what reads as a number.
    """

    name = "arithmetic"

    def __init__(self, spec: ArithmeticSpec) -> None:
        self._spec = spec
        # With a = 0 the question ends in its answer.
        num_values = spec.max_value - spec.min_value + 1
        chance = 1.0 / num_values if spec.min_value == 0 else 0.0
        limits = TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS, chance=chance)
        self.limits = limit_reply(limits, spec.max_reply_tokens)
        self.version = hash_version(self.name, _PROMPT, _VERIFIER, self.limits, spec)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the pairs of a split; which ones is fixed by the range, not by a run's seed."""
        num_held_out = self._spec.num_held_out
        if split is Split.HELD_OUT:
            return _Sums(self._spec, range(num_held_out))
        return _Sums(self._spec, range(num_held_out, self._spec.num_pairs))

    def render(self, example: Example) -> tuple[Message, ...]:
        """Ask for the sum in one sentence."""
        return (Message(role="user", content=_PROMPT.format(**example.fields)),)

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last number of the reply with the sum."""
        is_correct = last_number(text) == Decimal(example.fields["a"]) + Decimal(example.fields["b"])
        return Outcome(
            parts={"correct": float(is_correct)}, is_correct=is_correct, format_ok=ends_with_number(text)
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the sum alone, in a sentence, with thousands commas and with a decimal part."""
        total = example.fields["a"] + example.fields["b"]
        question = f"{example.fields['a']} + {example.fields['b']}"
        return str(total), f"{question} = {total}.", f"The answer is {total:,}", f"**{total}.0**"


class _Sums(Sequence[Example]):
    """The sums at some ranks of the shuffled range, made on demand."""

    def __init__(self, spec: ArithmeticSpec, ranks: range) -> None:
        self._spec = spec
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> _Sums: ...
    def __getitem__(self, index: int | slice) -> Example | _Sums:
        if isinstance(index, slice):
            return _Sums(self._spec, self._ranks[index])
        num_values = self._spec.max_value - self._spec.min_value + 1
        first, second = divmod(_shuffled(self._ranks[index], self._spec.num_pairs), num_values)
        a, b = self._spec.min_value + first, self._spec.min_value + second
        return make_example("arithmetic", {"a": a, "b": b}, str(a + b))

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))


def _shuffled(rank: int, size: int) -> int:
    """Return where `rank` goes in a fixed shuffle of range(size): one to one, without a table.

    A Feistel network permutes the next larger square power of two; a result beyond `size` is
    permuted again until it falls inside, which keeps the map one to one.
    """
    num_bits = max(1, math.ceil((size - 1).bit_length() / 2))
    mask = (1 << num_bits) - 1
    while True:
        left, right = rank >> num_bits, rank & mask
        for round_index in range(_NUM_ROUNDS):
            name = f"arithmetic/{size}/{round_index}/{right}".encode()
            noise = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
            left, right = right, left ^ (noise & mask)
        rank = left << num_bits | right
        if rank < size:
            return rank
