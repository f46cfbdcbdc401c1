"""Sums of two whole numbers: the canary that every machine can train on.

The examples are the ordered pairs of a range. The two orders, 3 + 5 and 5 + 3, are two examples of one
problem, which is either held out or trained on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Literal

from pydantic import Field, model_validator

from strop.rollout import Example, Message, Outcome, make_example
from strop.spec.base import SpecConflict, expert
from strop.spec.task import TaskSection
from strop.tasks.answers import ends_with_number, judged_text, last_number
from strop.tasks.generated.drawn import DrawnTask
from strop.tasks.prompt import pose
from strop.tasks.task import TaskLimits, right_or_wrong
from strop.tasks.version import hash_version

_PROMPT = "What is {a} + {b}?"
_BASE_PROMPT = f"{_PROMPT}\nA:"
_VERIFIER = "last-number-2"
_MOST = 300
_NUM_ROUNDS = 4


class ArithmeticSpec(TaskSection):
    """Sums of two whole numbers: What is a + b?"""

    name: Literal["arithmetic"] = "arithmetic"
    min_value: int = Field(
        default=1,
        ge=0,
        le=_MOST,
        description="Smallest number, included; 10 with 99: two digits each.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    max_value: int = Field(
        default=20,
        ge=0,
        le=_MOST,
        description="Largest number, included.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    num_held_out: int = Field(
        default=100,
        ge=1,
        description="Pairs kept out of training for evaluation, in both orders of their numbers. Which ones"
        " is fixed by their content, not by the run's seed.",
    )

    @property
    def num_train(self) -> int:
        """Pairs to train on; the mirror of the last one of an odd number that is held out is in no split."""
        return (self.max_value - self.min_value + 1) ** 2 - self.num_held_out - self.num_held_out % 2

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


class Arithmetic(DrawnTask):
    """What is a + b? Right if the last number of the reply is the sum.

    `format_ok`: the reply ends with a number, as defined in `answers`.
    """

    name = "arithmetic"

    def __init__(self, spec: ArithmeticSpec) -> None:
        self._spec = spec
        # Where there is a zero, so many questions end in their answer: What is 0 + 7?
        chance = 0.0 if spec.min_value else 1.0 / (spec.max_value + 1)
        limits = TaskLimits(max_reply_tokens=32, base_stop_strings=("\n",), chance=chance)
        super().__init__(spec, limits)

    @property
    def version(self) -> str:
        """Hash over the settings and limits: they decide every example."""
        return hash_version(self.name, _BASE_PROMPT, _VERIFIER, self.limits, self._spec)

    def draws(self) -> Iterator[Example]:
        """Yield all pairs, those of held-out problems first, in an order that the settings alone decide."""
        spec = self._spec
        equal = [(value, value) for value in range(spec.min_value, spec.max_value + 1)]
        problems = [((a, b), (b, a)) for b, _ in equal for a in range(spec.min_value, b)]
        # Two pairs of equal numbers form a problem, so that every problem has two pairs.
        problems += zip(equal[::2], equal[1::2], strict=False)
        num_held_out = math.ceil(spec.num_held_out / 2)
        pairs = _shuffle(problems, range(num_held_out))
        pairs += _shuffle(problems, range(num_held_out, len(problems)))
        # Of an odd number of pairs one has no partner.
        pairs += equal[-1:] if len(equal) % 2 else []
        return (make_example(self.name, {"a": a, "b": b}, str(a + b)) for a, b in pairs)

    def problem_of(self, example: Example) -> str:
        """Return the numbers with the smaller one first: both orders are one problem."""
        low, high = sorted((example.fields["a"], example.fields["b"]))
        return f"{low} + {high}"

    def render(self, example: Example) -> tuple[Message, ...]:
        """Ask for the sum in one sentence."""
        return pose(
            _PROMPT.format(**example.fields),
            base=_BASE_PROMPT.format(**example.fields),
            thinking=self._spec.thinking,
        )

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last number of the reply with the sum."""
        judged = judged_text(text) or ""
        is_correct = last_number(judged) == Decimal(example.fields["a"] + example.fields["b"])
        return right_or_wrong(is_correct, format_ok=ends_with_number(judged))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the sum alone, in a sentence, with thousands commas and with a decimal part."""
        a, b = example.fields["a"], example.fields["b"]
        return str(a + b), f"{a} + {b} = {a + b}.", f"The answer is {a + b:,}", f"**{a + b}.0**"


_Pair = tuple[int, int]


def _shuffle(problems: Sequence[tuple[_Pair, _Pair]], ranks: range) -> list[_Pair]:
    """Return one pair of each problem at these ranks of a fixed permutation, then the other ones."""
    chosen = [problems[_place_of(rank, len(problems))] for rank in ranks]
    # The rank is independent of the numbers, and so is the order of the two pairs.
    return [
        problem[(rank + other) % 2] for other in (0, 1) for rank, problem in zip(ranks, chosen, strict=True)
    ]


def _place_of(rank: int, size: int) -> int:
    """Return the place of `rank` in a fixed permutation of range(size).

    A Feistel network permutes the next larger square power of two; a result beyond `size` is permuted again.
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
