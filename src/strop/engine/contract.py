"""The interface to generation: requests, replies and weight updates of an engine.

A request is one reply to one prompt. Requests that share a prompt are sent separately and at the
same time; the engine prefills the shared prompt once. That keeps one path for
single-turn and multi-turn rollouts, and for engines in this process and in another.

What no engine can serve is refused in the same words by all of them. The engine in this process and the
client of one in another process wait by one rule for requests that belong together (`settle`), so they form
the same batches, and with them every rounded value is the same in each run and in either place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from strop.errors import EngineError, StropError
from strop.hardware.busy_clock import BusyClock
from strop.rollout import FinishReason, FloatArray, IntArray, Sampling, VersionSegment

if TYPE_CHECKING:
    import asyncio

    from strop.tokenizer import Tokenizer

DEFAULT_MAX_ROWS = 64
"""Rows decoded at once. More rows make a CPU decode step no faster per token, and its cache larger."""
DEFAULT_GPU_ROWS = 512
"""On GPUs, where a step takes about the same time up to some two hundred rows."""


def default_rows(*, is_gpu: bool) -> int:
    """Return how many replies an engine decodes at once where `engine.max_num_seqs` does not say it."""
    return DEFAULT_GPU_ROWS if is_gpu else DEFAULT_MAX_ROWS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """A request for one reply to one prompt."""

    prompt_ids: IntArray
    seed: int
    """Names the random stream, in [0, 2**64). Equal request and seed give an equal reply."""
    sampling: Sampling
    max_tokens: int
    """Tokens to sample at most, the terminator included."""
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """A sampled reply, verbatim."""

    token_ids: IntArray
    """Every sampled token, the terminator or the token that completed a stop string included."""
    logprobs: FloatArray
    """Nats, under the distribution sampled from (greedy: at temperature 1)."""
    text: str
    """Decoded reply without its terminator, cut before the stop string."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that sampled the oldest token."""
    segments: tuple[VersionSegment, ...] = ()
    """Tokens by the version that sampled them; empty where one version sampled all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplyScore:
    """Log-probabilities of a reply."""

    logprobs: FloatArray
    """Nats, one for each token, full vocabulary support."""
    policy_version: int


class WeightTransport(StrEnum):
    """How the bytes of a weight update reach an engine."""

    SHARED = "shared"
    """Engine and policy hold the same tensors; the update only names the new version."""
    FILE = "file"
    """The update names a safetensors file that both sides see: on a disk, or in memory (/dev/shm)."""
    BROADCAST = "broadcast"
    """The tensors are sent through a process group (gloo, NCCL) that the update names."""


class UpdateMode(StrEnum):
    """How an engine handles unfinished replies when new weights arrive."""

    DRAIN = "drain"
    """They are finished first, under the weights that they began with."""
    RESTART = "restart"
    """They are sampled again from their start, under the new weights; their tokens are wasted."""
    CONTINUE = "continue"
    """They continue under the new weights; each token keeps the version that sampled it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One publication of the policy's weights."""

    version: int
    """Steps behind these weights."""
    digest: str
    """`tensors_digest` of the published tensors; the engine checks it and answers with its own."""
    transport: WeightTransport
    path: str | None = None
    """Absolute path of the safetensors file, for FILE."""
    mode: UpdateMode = UpdateMode.DRAIN
    is_adapter: bool = False
    """Whether the tensors are a LoRA adapter for the weights that the engine loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReceipt:
    """An engine's acknowledgement of a weight update."""

    version: int
    digest: str


class Engine(Protocol):
    """Generates and scores. All waiting is asynchronous; calls may overlap freely."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply.

        Raises: EngineError if no usable reply was produced. A reply that the engine aborted has
        FinishReason.ABORT and is not a sample.
        """
        ...

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each token of `reply_ids`. A temperature of 0 counts as 1.

        Raises: EngineError if nothing could be scored.
        """
        ...

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights from now on. `update.mode` tells how to handle unfinished replies.

        Values that were computed under other weights are not used again: neither cached prefixes nor scores.
        Raises: WeightMismatch if the bytes do not have the promised digest; the old weights stay.
        """
        ...

    async def close(self) -> None:
        """Release everything the engine holds."""
        ...


class TimedEngine:
    """An engine whose clock runs while it generates or scores."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.busy = BusyClock()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        with self.busy.running():
            return await self._engine.generate(request)

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`."""
        with self.busy.running():
            return await self._engine.score(prompt_ids, reply_ids, temperature)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`."""
        return await self._engine.update(update)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()


def stream_seed(run_seed: int, example_id: str, step: int, sample_index: int, turn: int = 0) -> int:
    """Derive the seed of one reply, in [0, 2**64).

    It is a function of these arguments alone, so it does not depend on batch slot, compaction, engine or
    resume, and needs no state in a checkpoint.
    """
    name = f"{run_seed}/{example_id}/{step}/{sample_index}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


Answer = TypeVar("Answer", Completion, ReplyScore)

_CYCLES = 4
"""Turns of the event loop without a new request, after which a batch is complete."""


def check_room(num_prompt: int, num_reply: int, how: str, max_positions: int) -> None:
    """Raises: EngineError if prompt and reply exceed the model's positions, or one of them is empty."""
    if num_prompt == 0 or num_reply < 1 or num_prompt + num_reply > max_positions:
        raise EngineError(
            f"a request has {num_prompt} prompt tokens and {how} {num_reply}",
            allowed=f"at least one of each, and together at most {max_positions} positions",
            next_step="shorten the prompt or lower task.max_reply_tokens",
        )


def check_ids(token_ids: IntArray, vocab_size: int) -> None:
    """Raises: EngineError if a token id is outside of the vocabulary."""
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise EngineError(
            f"a prompt holds token ids from {lowest} to {highest}",
            allowed=f"ids from 0 to {vocab_size - 1}",
            next_step="check that the tokenizer is the model's own",
        )


def closed() -> EngineError:
    """Return the error of a closed engine."""
    return EngineError("a request to an engine that is closed")


@dataclass(slots=True, eq=False)
class Waiting:
    """A request and the coroutine that waits for it."""

    request: GenerationRequest
    reply: asyncio.Future[Completion]


@dataclass(slots=True, eq=False)
class WaitingScore:
    """A reply to score and the coroutine that waits for it."""

    prompt_ids: IntArray
    reply_ids: IntArray
    score: asyncio.Future[ReplyScore]


async def settle(count_waiting: Callable[[], int]) -> None:
    """Yield to the event loop until the number of waiting requests stays the same."""
    import asyncio  # Here, because light commands import this module.

    previous = -1
    while previous != (current := count_waiting()):
        previous = current
        for _ in range(_CYCLES):
            await asyncio.sleep(0)


def deliver(future: asyncio.Future[Answer], answer: Answer) -> None:
    """Set the result of a future, unless its caller was cancelled."""
    if not future.done():
        future.set_result(answer)


def fail(waiting: Iterable[asyncio.Future[Any]], error: StropError) -> None:
    """Fail all futures that are still pending."""
    for future in waiting:
        if not future.done():
            future.set_exception(error)


class StopStrings:
    """The stop strings of one request: found while a reply grows, and cut off its text."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # Every token of a byte-level vocabulary adds at least one byte, so a stop string lies
        # within the last tokens as many as it has bytes, plus a few for characters cut in half.
        self._window = max(len(string.encode()) for string in self._strings) + 4

    def is_completed(self, token_ids: IntArray) -> bool:
        """Whether the newest token completed a stop string."""
        tail = self._tokenizer.decode(token_ids[-self._window :])
        return any(string in tail for string in self._strings)

    def cut(self, text: str) -> str:
        """Return the text before its first stop string."""
        starts = [start for string in self._strings if (start := text.find(string)) >= 0]
        return text[: min(starts)] if starts else text
