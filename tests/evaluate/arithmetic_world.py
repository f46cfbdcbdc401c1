"""A task, a tokenizer and a scripted engine to evaluate with; no model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from strop.engine import GenerationRequest
from strop.rollout import Example, Outcome
from strop.tasks.generated import Arithmetic, ArithmeticSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

NUM_HELD_OUT = 10
Answer = Callable[[int, int, GenerationRequest], str | ScriptedReply]


def make_spec(**changes: int) -> ArithmeticSpec:
    return ArithmeticSpec.model_validate({"max_value": 5, "num_held_out": NUM_HELD_OUT} | changes)


def make_task(**changes: int) -> Arithmetic:
    return Arithmetic(make_spec(**changes))


def make_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path / "tokenizer"))


def make_engine(tokenizer: Tokenizer, answer: Answer) -> DummyEngine:
    """Build an engine whose reply is a function of the two summands and the request."""

    def reply(request: GenerationRequest) -> str | ScriptedReply:
        found = re.search(r"What is (\d+) \+ (\d+)\?", tokenizer.decode(request.prompt_ids))
        assert found is not None
        return answer(int(found[1]), int(found[2]), request)

    return DummyEngine(tokenizer, reply)


def add(a: int, b: int, request: GenerationRequest) -> str:
    return f"{a} + {b} = {a + b}"


class BrittleArithmetic(Arithmetic):
    """Arithmetic whose verifier fails on sums of one summand."""

    async def verify(self, example: Example, text: str) -> Outcome:
        if example.fields["a"] == 1:
            raise TypeError("no verdict")
        return await super().verify(example, text)


class PartialArithmetic(Arithmetic):
    """Arithmetic that pays 0.3 for any reply, right or wrong."""

    async def verify(self, example: Example, text: str) -> Outcome:
        judged = await super().verify(example, text)
        return Outcome(parts={"effort": 0.3}, is_correct=judged.is_correct)
