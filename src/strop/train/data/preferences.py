"""Preference pairs, packed for training, with the reference's log-probabilities of both replies.

A pair is a packed group whose preferred reply has advantage 1 and the other one -1. The reference's
log-probabilities are computed once, before the first step, and kept in the run's folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from strop.cluster import Scorer
from strop.errors import CorruptRecord
from strop.io.atomic import write_bytes_atomically
from strop.policy.packing import PackedGroup, with_logprobs
from strop.rollout import FloatArray, Rollout
from strop.train.batch import pack_reply
from strop.train.data.offline import Pairs

REFERENCE_NAME = "reference.safetensors"
"""File in a run's folder: the reference's log-probabilities of all pairs."""
_STREAM = "logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preferences:
    """All pairs of a run, in the order of the source."""

    members: tuple[PackedGroup, ...]
    lengths: tuple[int, ...]
    num_scored: int
    words: str
    """These three are copied from `Pairs`, whose rollouts are not kept."""

    @property
    def digest(self) -> str:
        """Hash over all that is trained, in order."""
        total = hashlib.sha256()
        for pair in self.members:
            for ids in (pair.prompt_ids, *(reply.token_ids for reply in pair.replies)):
                total.update(np.int64(len(ids)).tobytes() + ids.tobytes())
        return total.hexdigest()

    def describe(self) -> str:
        """Return how many there are, and what became of the others."""
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
        # Sampled long ago by other weights: no value to measure drift from.
        unknown = np.full(len(packed.engine_logprobs), np.nan, dtype=np.float32)
        replies.append(replace(packed, engine_logprobs=unknown))
    return PackedGroup(prompt_ids=pair[0].turns[0].token_ids, replies=tuple(replies))


async def with_reference(
    found: Preferences, scorer: Scorer | None, path: Path, temperature: float
) -> Preferences:
    """Attach the reference's log-probabilities: those in `path`, else computed and kept there.

    `scorer` is None where the reference's weights are gone, as in a run that has already trained.

    Raises: CorruptRecord if the file is damaged, of other pairs, or missing without a scorer.
    """
    from safetensors.numpy import save

    scores = _read_scores(path, found)
    if scores is None:
        if scorer is None:
            raise _unusable(path, "it is missing, and the weights that it was computed with are gone")
        scores = await scorer.score(found.members, temperature)
        joined = np.concatenate([np.asarray(one, dtype=np.float32) for one in scores])
        write_bytes_atomically(path, save({_STREAM: joined}, metadata={"pairs": found.digest}))
    return replace(found, members=with_logprobs(found.members, "reference", scores))


def _read_scores(path: Path, found: Preferences) -> list[FloatArray] | None:
    """Return what was kept, None where nothing was."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            digest, joined = (file.metadata() or {}).get("pairs"), file.get_tensor(_STREAM)
    except (OSError, SafetensorError) as error:
        raise _unusable(path, f"it cannot be read ({error})") from error
    counts = [int(reply.is_scored.sum()) for pair in found.members for reply in pair.replies]
    if digest != found.digest or len(joined) != sum(counts):
        raise _unusable(path, "it belongs to other pairs")
    return np.split(joined, np.cumsum(counts)[:-1])


def _unusable(path: Path, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path} holds the reference's log-probabilities of this run's pairs, and {why}",
        allowed="the file as the run wrote it before its first step",
        next_step="restore it, or start the run again with --new",
    )
