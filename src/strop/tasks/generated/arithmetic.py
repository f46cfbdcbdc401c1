"""Sums, differences and products of two whole numbers: the canary that every machine can train on.

All ordered pairs of a range under each operator, so 3 + 5 and 5 + 3 are two examples and may stand on
different sides of the split. A pair is made when it is looked at; a range of any size costs no memory.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any, overload

from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import ArithmeticSpec
from strop.tasks.answers import ends_with_number, last_number
from strop.tasks.contract import TaskLimits
from strop.tasks.prompt import pose
from strop.tasks.thinking import judged_text
from strop.tasks.version import fit_limits, hash_version

_MAX_REPLY_TOKENS = 32
_PROMPT = "What is {a} {op} {b}?"
_BASE_PROMPT = f"{_PROMPT}\nA:"
_BASE_STOP_STRINGS = ("\n",)
_VERIFIER = "last-number-2"
_OPERATORS: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {"+": operator.add, "-": operator.sub, "*": operator.mul}
)
_NUM_ROUNDS = 4


class Arithmetic:
    """What is a + b, a - b, or a * b? Right if the last number of the reply is that.

    `format_ok`: the reply ends with a number. See `answers` for what reads as a number.
    """

    name = "arithmetic"

    def __init__(self, spec: ArithmeticSpec) -> None:
        self._spec = spec
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS,
            base_stop_strings=_BASE_STOP_STRINGS,
            chance=_echo_chance(spec),
        )
        self.limits = fit_limits(limits, spec)
        self.version = hash_version(self.name, _BASE_PROMPT, _VERIFIER, self.limits, spec)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the pairs of a split; which ones is fixed by the range, not by a run's seed."""
        num_held_out = self._spec.num_held_out
        if split is Split.HELD_OUT:
            return _Sums(self._spec, range(num_held_out))
        return _Sums(self._spec, range(num_held_out, self._spec.num_pairs))

    def render(self, example: Example) -> tuple[Message, ...]:
        """Ask for the result in one sentence."""
        fields = self.prompt_fields(example)
        return pose(
            _PROMPT.format(**fields), base=_BASE_PROMPT.format(**fields), thinking=self._spec.thinking
        )

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return both numbers and the operator, which a sum's fields leave out."""
        return {"op": "+", **example.fields}

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last number of the reply with the result."""
        judged = judged_text(text) or ""
        is_correct = last_number(judged) == Decimal(_solve(example))
        return Outcome(
            parts={"correct": float(is_correct)}, is_correct=is_correct, format_ok=ends_with_number(judged)
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the result alone, in a sentence, with thousands commas and with a decimal part."""
        total = _solve(example)
        question = f"{example.fields['a']} {example.fields.get('op', '+')} {example.fields['b']}"
        return str(total), f"{question} = {total}.", f"The answer is {total:,}", f"**{total}.0**"


def _solve(example: Example) -> int:
    fields = example.fields
    return _OPERATORS[fields.get("op", "+")](fields["a"], fields["b"])


def _echo_chance(spec: ArithmeticSpec) -> float:
    """Return the share of questions that end in their answer: 0 + b, 1 * b, a * 0, and 2b - b."""
    low, high = spec.min_value, spec.max_value
    num_values = high - low + 1
    has_zero, has_one = low == 0, low <= 1 <= high
    counts = {
        "+": num_values * has_zero,
        "-": max(0, high // 2 - low + 1),
        "*": num_values * (has_zero + has_one) - (has_zero and has_one),
    }
    return sum(counts[op] for op in spec.operators) / spec.num_pairs


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
        kind, pair = divmod(_shuffled(self._ranks[index], self._spec.num_pairs), num_values**2)
        first, second = divmod(pair, num_values)
        op = self._spec.operators[kind]
        a, b = self._spec.min_value + first, self._spec.min_value + second
        # A sum is named by its numbers alone, as it always was: ids in stored files stay what they are.
        fields = {"a": a, "b": b} if op == "+" else {"a": a, "op": op, "b": b}
        return make_example("arithmetic", fields, str(_OPERATORS[op](a, b)))

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
