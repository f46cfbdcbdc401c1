"""The interface to generation: requests, replies and weight updates of an engine.

A request is one reply to one prompt. Requests that share a prompt are sent separately and at the
same time; the engine prefills the shared prompt once. That keeps one path for
single-turn and multi-turn rollouts, and for engines in this process and in another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from strop.rollout import FinishReason, FloatArray, IntArray, Sampling, VersionSegment

DEFAULT_MAX_ROWS = 64
"""Rows decoded at once. More rows make a CPU decode step no faster per token, and its cache larger."""
DEFAULT_GPU_ROWS = 512
"""On GPUs, where a step takes about the same time up to some two hundred rows."""


def default_rows(*, is_gpu: bool) -> int:
    """Return how many replies an engine decodes at once where `engine.max_num_seqs` does not say it."""
    return DEFAULT_GPU_ROWS if is_gpu else DEFAULT_MAX_ROWS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt, one reply wanted."""

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
    """Of the oldest token."""
    segments: tuple[VersionSegment, ...] = ()
    """Which version sampled which tokens; empty where one version sampled all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplyScore:
    """Log-probabilities of a given reply."""

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
    STORE = "store"
    """The update names an object in a store that both sides reach."""


class UpdateMode(StrEnum):
    """What happens to replies under way when new weights arrive."""

    DRAIN = "drain"
    """They end first, under the weights that they began with."""
    RESTART = "restart"
    """They are sampled again from their start, under the new weights; what was sampled is wasted."""
    CONTINUE = "continue"
    """They go on under the new weights; each token keeps the version that sampled it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One publication of the policy's weights."""

    version: int
    """Steps behind these weights."""
    digest: str
    """`tensors_digest` of the published tensors; the engine checks it and answers with its own."""
    transport: WeightTransport
    path: str | None = None
    """Absolute path of the safetensors file, for FILE; the object's URI, for STORE."""
    mode: UpdateMode = UpdateMode.DRAIN
    is_adapter: bool = False
    """Whether the tensors are those of a LoRA adapter, which is put on the weights that the engine loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReceipt:
    """An engine's acknowledgement of a weight update."""

    version: int
    digest: str


class Engine(Protocol):
    """Generates and scores. All waiting is asynchronous; calls may overlap freely."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply.

        Raises: EngineError if no usable reply was produced. A reply that was cut by the engine
        itself comes back with FinishReason.ABORT and is not a sample.
        """
        ...

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each token of a given reply. A temperature of 0 counts as 1.

        Raises: EngineError if nothing could be scored.
        """
        ...

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights from now on. `update.mode` says what becomes of replies under way.

        Nothing that was computed under other weights is used again: no cached prefix, no score.
        Raises: WeightMismatch if the bytes do not have the promised digest; the old weights stay.
        """
        ...

    async def close(self) -> None:
        """Release everything the engine holds."""
        ...


def stream_seed(run_seed: int, example_id: str, step: int, sample_index: int, turn: int = 0) -> int:
    """Derive the seed of one reply, in [0, 2**64).

    It is a function of what is asked and nothing else, so it does not depend on batch slot, compaction,
    engine or resume, and needs no state in a checkpoint.
    """
    name = f"{run_seed}/{example_id}/{step}/{sample_index}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
