"""Choose one of several fixed replies by likelihood.

The reply is the choice with the highest log-probability, summed over its tokens; the first of equals.
Nothing is sampled, so temperature and seed play no part, and nothing ends or cuts the reply.

Prompt and choice are encoded together and split where their ids diverge, as lm-eval 0.4.13 does it. In plain
text a space stands between them, in a chat nothing. Where a choice merges with the last tokens of the prompt,
lm-eval scores ids that no text encodes to; here these tokens move from the prompt to every choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strop.engine import Completion, Engine
from strop.errors import DataError
from strop.rollout import FinishReason, IntArray
from strop.tasks.prompt import PromptFormat
from strop.tokenizer import Tokenizer

_SCORED_AT = 1.0
"""Temperature of the log-probabilities."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedChoices:
    """The choices of one prompt as the engine scores them."""

    context_ids: IntArray
    """The prompt, without the tokens that a choice would merge with."""
    replies: tuple[IntArray, ...]
    texts: tuple[str, ...]

    @property
    def num_reply_tokens(self) -> int:
        """Tokens of the longest choice."""
        return max(map(len, self.replies))


def encode_choices(
    tokenizer: Tokenizer, prompt: str, choices: Sequence[str], prompt_format: PromptFormat
) -> EncodedChoices:
    """Encode a prompt with each choice behind it; `prompt_format` is resolved.

    Raises: DataError if there is only one choice, or one is empty or a prefix of another.
    """
    before = " " if prompt_format is PromptFormat.BASE else ""
    whole = [tokenizer.encode(prompt + before + choice) for choice in choices]
    prompt_ids = tokenizer.encode(prompt)
    num_context = min(_count_shared(prompt_ids, ids) for ids in whole)
    replies = tuple(ids[num_context:] for ids in whole)
    is_apart = all(
        _count_shared(reply, other) < len(reply)
        for index, reply in enumerate(replies)
        for place, other in enumerate(replies)
        if place != index
    )
    if len(choices) < 2 or not all(choices) or not is_apart or not num_context:
        raise DataError(
            f"the choices {[*choices]} behind a prompt of {len(prompt_ids)} tokens",
            allowed="two choices or more behind a prompt, none of them empty or the beginning of another:"
            " that one would always be the likelier",
            next_step="correct the choices that the task gives",
        )
    return EncodedChoices(context_ids=prompt_ids[:num_context], replies=replies, texts=tuple(choices))


async def choose(engine: Engine, encoded: EncodedChoices) -> tuple[Completion, tuple[float, ...]]:
    """Score all choices concurrently; return the likeliest and the summed log-probability of each.

    Raises: as the engine does.
    """
    scores = await asyncio.gather(
        *(engine.score(encoded.context_ids, reply_ids, _SCORED_AT) for reply_ids in encoded.replies)
    )
    nats = tuple(float(score.logprobs.sum(dtype=np.float64)) for score in scores)
    index = int(np.argmax(nats))
    completion = Completion(
        token_ids=encoded.replies[index],
        logprobs=scores[index].logprobs,
        text=encoded.texts[index],
        finish_reason=FinishReason.CHOSEN,
        policy_version=scores[index].policy_version,
    )
    return completion, nats


def _count_shared(left: IntArray, right: IntArray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length
