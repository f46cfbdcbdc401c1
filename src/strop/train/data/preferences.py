"""Preference pairs, packed for training, with the reference's log-probabilities of both replies.

A pair is a packed group whose preferred reply has advantage 1 and the other one -1. The reference's
log-probabilities are computed once, before the first step, and kept in the run's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from strop.errors import CorruptRecord
from strop.io.atomic import write_bytes_atomically
from strop.policy.packing import PackedGroup, with_logprobs
from strop.rollout import FloatArray, Rollout
from strop.train.batch import pack_reply
from strop.train.data.offline import Pairs

REFERENCE_NAME = "reference.safetensors"
"""File in a run's folder with the reference's log-probabilities of all pairs."""
_STREAM = "logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preferences:
    """All pairs of a run, in the order of the source."""

    members: tuple[PackedGroup, ...]
    lengths: tuple[int, ...]
    num_scored: int
    words: str
    """The last three are copied from `Pairs`, whose rollouts are not kept."""

    @property
    def digest(self) -> str:
        """Hash over all trained ids, in order."""
        total = hashlib.sha256()
        for pair in self.members:
            for ids in (pair.prompt_ids, *(reply.token_ids for reply in pair.replies)):
                total.update(np.int64(len(ids)).tobytes() + ids.tobytes())
        return total.hexdigest()

    def describe(self) -> str:
        """Return how many pairs there are, and why others were left out."""
        return self.words


def pack_pairs(pairs: Pairs) -> Preferences:
    """Pack pairs for training."""
    return Preferences(
        members=tuple(map(pack_pair, pairs.members)),
        lengths=pairs.lengths,
        num_scored=pairs.num_scored,
        words=pairs.describe(),
    )


def pack_pair(pair: tuple[Rollout, Rollout]) -> PackedGroup:
    """Pack the better and the worse reply behind their prompt. The weight is set with the batch's."""
    replies = []
    for rollout, sign in zip(pair, (1.0, -1.0), strict=True):
        packed = pack_reply(rollout.turns, sign, 1.0)
        # Sampled by other weights, so useless to measure drift.
        unknown = np.full(len(packed.engine_logprobs), np.nan, dtype=np.float32)
        replies.append(replace(packed, engine_logprobs=unknown))
    return PackedGroup(prompt_ids=pair[0].turns[0].token_ids, replies=tuple(replies))


async def with_reference(
    pairs: Preferences,
    score: Callable[..., Awaitable[list[FloatArray]]] | None,
    path: Path,
    temperature: float,
) -> Preferences:
    """Attach the reference's log-probabilities: read from `path`, else computed and written there.

    `score` is None where the reference's weights are gone, as in a run that has already trained.

    Raises: CorruptRecord if the file is damaged, of other pairs, or missing and cannot be computed.
    """
    from safetensors.numpy import save

    scores = _read_scores(path, pairs)
    if scores is None:
        if score is None:
            raise _unusable(path, "it is missing, and the weights that it was computed with are gone")
        scores = await score(pairs.members, temperature)
        joined = np.concatenate([np.asarray(score, dtype=np.float32) for score in scores])
        write_bytes_atomically(path, save({_STREAM: joined}, metadata={"pairs": pairs.digest}))
    return replace(pairs, members=with_logprobs(pairs.members, "reference", scores))


def _read_scores(path: Path, pairs: Preferences) -> list[FloatArray] | None:
    """Return the scores in the file; None where there is no file."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            digest, joined = (file.metadata() or {}).get("pairs"), file.get_tensor(_STREAM)
    except (OSError, SafetensorError) as error:
        raise _unusable(path, f"it cannot be read ({error})") from error
    counts = [int(reply.is_scored.sum()) for pair in pairs.members for reply in pair.replies]
    if digest != pairs.digest or len(joined) != sum(counts):
        raise _unusable(path, "it belongs to other pairs")
    return np.split(joined, np.cumsum(counts)[:-1])


def _unusable(path: Path, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path} holds the reference's log-probabilities of this run's pairs, and {why}",
        allowed="the file as the run wrote it before its first step",
        next_step="restore it, or start the run again with --new",
    )
