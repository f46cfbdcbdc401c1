"""Requests that meet everything a batch can meet, for comparing engines with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from strop.engine import Completion, Engine, GenerationRequest
from strop.rollout import Sampling
from strop.tokenizer import Tokenizer

PROMPTS = ("1 + 2 =", "Say the letters of the alphabet, one by one, please:", "x")
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=7),
    Sampling(top_p=0.5),
)


def ask(
    tokenizer: Tokenizer,
    prompt: str = "1 + 2 =",
    *,
    seed: int = 11,
    sampling: Sampling | None = None,
    max_tokens: int = 12,
    stop_strings: tuple[str, ...] = (),
) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=tokenizer.encode(prompt),
        seed=seed,
        sampling=sampling or Sampling(),
        max_tokens=max_tokens,
        stop_token_ids=tokenizer.stop_token_ids,
        stop_strings=stop_strings,
    )


def mixed_requests(tokenizer: Tokenizer) -> list[GenerationRequest]:
    """Build 45 requests: groups that share prompts, every kind of sampling, ragged lengths, stops."""
    return [
        ask(
            tokenizer,
            prompt,
            seed=100 * index + sample,
            sampling=sampling,
            max_tokens=3 + 5 * sample + 2 * index,
            stop_strings=("e", "zz") if sample == 1 else (),
        )
        for prompt in PROMPTS
        for index, sampling in enumerate(SAMPLINGS)
        for sample in range(3)
    ]


async def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def assert_same_bits(left: Sequence[Completion], right: Sequence[Completion]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
