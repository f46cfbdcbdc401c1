"""Sums, differences and products of two whole numbers: the canary that every machine can train on.

The examples are the ordered pairs of a range under each operator. The two orders, 3 + 5 and 5 + 3, are two
examples of one problem, which is either held out or trained on.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator

from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import SpecConflict, expert
from strop.spec.task import TaskSection
from strop.tasks.answers import ends_with_number, judged_text, last_number
from strop.tasks.prompt import pose
from strop.tasks.task import Task, TaskLimits, right_or_wrong
from strop.tasks.version import fit_limits, hash_version

_MAX_REPLY_TOKENS = 32
_PROMPT = "What is {a} {op} {b}?"
_BASE_PROMPT = f"{_PROMPT}\nA:"
_BASE_STOP_STRINGS = ("\n",)
_VERIFIER = "last-number-2"
_SPLITS = "by-problem-1"
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_MOST_PAIRS = 100_000
_NUM_ROUNDS = 4


class ArithmeticSpec(TaskSection):
    """Sums, differences and products of two whole numbers: What is a + b?"""

    name: Literal["arithmetic"] = "arithmetic"
    min_value: int = Field(
        default=1,
        ge=0,
        le=10**9,
        description="Smallest number, included; 10 with 99: two digits each.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    max_value: int = Field(
        default=20,
        ge=0,
        le=10**9,
        description="Largest number, included.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    operators: Literal["+", "-", "*", "+-", "+*", "-*", "+-*"] = Field(
        default="+",
        description="What is done with the two numbers; each of the signs equally often.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    num_held_out: int = Field(
        default=100,
        ge=1,
        le=_MOST_PAIRS,
        description="Pairs kept out of training for evaluation, in both orders of their numbers. Which ones"
        " is fixed by their content, not by the run's seed.",
    )

    @property
    def num_pairs(self) -> int:
        """All ordered pairs of numbers under each operator, training and held-out together."""
        return (self.max_value - self.min_value + 1) ** 2 * len(self.operators)

    @property
    def num_train(self) -> int:
        """Pairs to train on. If an odd number of an even total is held out, one mirror is in no split."""
        is_odd_of_even = self.num_held_out % 2 == 1 and self.num_pairs % 2 == 0
        return self.num_pairs - self.num_held_out - is_odd_of_even

    @property
    def num_held_out_problems(self) -> int:
        """Held-out problems of two pairs. If the total number of pairs is odd, one is a problem alone."""
        return (self.num_held_out + (1 - self.num_pairs % 2)) // 2

    @model_validator(mode="after")
    def _check_range(self) -> ArithmeticSpec:
        if self.min_value > self.max_value or self.num_train < 1:
            given = {key: getattr(self, key) for key in ("num_held_out", "min_value", "max_value")}
            raise SpecConflict(
                {f"task.{key}": value for key, value in given.items()},
                "no pair is left to train on",
                allowed="a range of more pairs than are held out; of two numbers both orders are, or none",
                next_step="lower task.num_held_out or raise task.max_value",
            )
        return self


class Arithmetic(Task):
    """What is a + b, a - b, or a * b? Right if the last number of the reply is the result.

    `format_ok`: the reply ends with a number, as defined in `answers`.
    """

    name = "arithmetic"

    def __init__(self, spec: ArithmeticSpec) -> None:
        self._spec = spec
        # How many questions end in their answer: 0 + b, 1 * b, a * 0, and 2b - b.
        low, high = spec.min_value, spec.max_value
        num_values = high - low + 1
        has_zero, has_one = low == 0, low <= 1 <= high
        counts = {
            "+": num_values * has_zero,
            "-": max(0, high // 2 - low + 1),
            "*": num_values * (has_zero + has_one) - (has_zero and has_one),
        }
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS,
            base_stop_strings=_BASE_STOP_STRINGS,
            chance=sum(counts[op] for op in spec.operators) / spec.num_pairs,
        )
        self.limits = fit_limits(limits, spec)

    @property
    def version(self) -> str:
        """Hash over the settings and limits: they decide every example."""
        return hash_version(self.name, _BASE_PROMPT, _VERIFIER, self.limits, self._spec, _SPLITS)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the pairs of a split, which depends on the range and not on a run's seed.

        The first pairs all pose different problems. Of a large range they are the first 100,000.
        """
        return self._pairs[split]

    @cached_property
    def _pairs(self) -> Mapping[Split, list[Example]]:
        spec, num_held_out, size = self._spec, self._spec.num_held_out_problems, self._spec.num_pairs // 2
        found: dict[Split, list[Example]] = {split: [] for split in Split}
        for split, first, last, number in (
            (Split.HELD_OUT, 0, num_held_out, spec.num_held_out),
            (Split.TRAIN, num_held_out, size, min(spec.num_train, _MOST_PAIRS)),
        ):
            ranks = range(first, min(last, first + number))
            problems = [_pairs_of(_shuffled(rank, size), spec) for rank in ranks]
            # The rank is independent of the numbers, and so is the order of the two pairs.
            orders = ((rank + other) % 2 for other in (0, 1) for rank in ranks)
            pairs = [problem[order] for problem, order in zip(problems * 2, orders, strict=True)]
            # If the number of pairs is odd, this one has no partner.
            pairs.append((spec.operators[-1], spec.max_value, spec.max_value))
            for op, a, b in pairs[:number]:
                # A sum has no field `op`.
                fields = {"a": a, "b": b} if op == "+" else {"a": a, "op": op, "b": b}
                found[split].append(make_example(self.name, fields, str(_OPERATORS[op](a, b))))
        return found

    def problem_of(self, example: Example) -> str:
        """Return the numbers with the smaller one first: both orders are one problem."""
        low, high = sorted((example.fields["a"], example.fields["b"]))
        return f"{low} {example.fields.get('op', '+')} {high}"

    def render(self, example: Example) -> tuple[Message, ...]:
        """Ask for the result in one sentence."""
        fields = self.prompt_fields(example)
        return pose(
            _PROMPT.format(**fields), base=_BASE_PROMPT.format(**fields), thinking=self._spec.thinking
        )

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return both numbers and the operator, which a sum's fields leave out."""
        return {"op": "+", **example.fields}

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last number of the reply with the result."""
        judged = judged_text(text) or ""
        is_correct = last_number(judged) == Decimal(_solve(example))
        return right_or_wrong(is_correct, format_ok=ends_with_number(judged))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the result alone, in a sentence, with thousands commas and with a decimal part."""
        total = _solve(example)
        question = f"{example.fields['a']} {example.fields.get('op', '+')} {example.fields['b']}"
        return str(total), f"{question} = {total}.", f"The answer is {total:,}", f"**{total}.0**"


def _solve(example: Example) -> int:
    fields = example.fields
    return _OPERATORS[fields.get("op", "+")](fields["a"], fields["b"])


def _pairs_of(number: int, spec: ArithmeticSpec) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    """Return both pairs of a problem, each with its operator.

    First come pairs of two different numbers, in both orders. Then the pairs of equal numbers, which have no
    other order: two of these form one problem, so that every problem has two pairs.
    """
    num_values, low = spec.max_value - spec.min_value + 1, spec.min_value
    num_unequal = num_values * (num_values - 1) // 2
    if number < num_unequal * len(spec.operators):
        kind, place = divmod(number, num_unequal)
        larger = (1 + math.isqrt(1 + 8 * place)) // 2
        smaller = place - larger * (larger - 1) // 2
        op, a, b = spec.operators[kind], low + smaller, low + larger
        return (op, a, b), (op, b, a)
    first = 2 * (number - num_unequal * len(spec.operators))
    (kind, place), (next_kind, next_place) = divmod(first, num_values), divmod(first + 1, num_values)
    a, b = low + place, low + next_place
    return (spec.operators[kind], a, a), (spec.operators[next_kind], b, b)


def _shuffled(rank: int, size: int) -> int:
    """Return the place of `rank` in a fixed permutation of range(size), without a table.

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
