"""Preference pairs: two replies to one prompt of a recorded run, of which one earned more.

A pair is a packed group whose preferred reply has advantage 1 and the other one -1. What the reference
finds likely in them is computed once, before the first step, and kept in the run's folder.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from strop.cluster import Scorer
from strop.errors import CorruptRecord, DataError, explain_refusal
from strop.policy.packing import PackedGroup, with_logprobs
from strop.rollout import FloatArray, Rollout
from strop.spec.dpo import DpoSpec
from strop.spec.run import RunSpec
from strop.store.atomic import write_bytes_atomically
from strop.tasks import Task
from strop.train.batch import pack_reply

REFERENCE_NAME = "reference.safetensors"
"""File in a run's folder: the reference's log-probabilities of all pairs."""
_STREAM = "logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preferences:
    """All pairs of a run, in the order of the source."""

    source: str
    members: tuple[PackedGroup, ...]
    counts: Mapping[str, int]
    """What became of the rollouts that were read, in words."""

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
        found = "; ".join(f"{number} {what}" for what, number in self.counts.items() if number)
        return f"{len(self.members)} pairs from {self.source}" + (f" ({found})" if found else "")


def read_preferences(spec: RunSpec, task: Task, model_dir: Path) -> Preferences | None:
    """Read the pairs that a run learns from, asked as the run asks its model; None where it has none.

    Raises: StoreError if dpo.source is no folder of rollouts; CorruptRecord if a file is damaged;
        DataError if fewer pairs are left than a step takes, they were written with another tokenizer or
        prompt, or they answer what this run holds out.
    """
    dpo = spec.dpo
    if spec.train.terms != "dpo" or dpo.source is None:
        return None
    # Here: pyarrow and the environments, which a run without pairs has no use for.
    from strop.record.rollouts import read_rollouts
    from strop.train.rejection import find_rollouts_files, refuse_held_out, require_same_asking
    from strop.train.sft_source import find_source, read_framing

    framing = read_framing(spec, task, model_dir)
    folder = find_source(dpo.source, setting="dpo.source")
    rollouts = itertools.chain.from_iterable(map(read_rollouts, find_rollouts_files(folder)))
    counts: Counter[str] = Counter()
    found = list(pair_rollouts(dpo, rollouts, framing.max_positions, counts))
    paired = {id(one): one for pair in found for one in pair}.values()
    refuse_held_out("dpo.source", dpo.source, list(paired), framing)
    for rollout in paired:
        require_same_asking("dpo.source", rollout, framing)
    preferences = Preferences(source=dpo.source, members=tuple(map(pack_pair, found)), counts=counts)
    if len(preferences.members) < dpo.pairs_per_step:
        raise DataError(
            explain_refusal(
                f"a step takes dpo.pairs_per_step={dpo.pairs_per_step} and there are"
                f" {preferences.describe()}",
                allowed="at least as many pairs as a step takes",
                next_step="lower dpo.pairs_per_step, or name a run whose rollouts differ more in reward",
            )
        )
    return preferences


def pair_rollouts(
    spec: DpoSpec, rollouts: Iterable[Rollout], max_positions: int, counts: Counter[str]
) -> Iterator[tuple[Rollout, Rollout]]:
    """Yield (better, worse) of every group: rollouts of one example and step, to one prompt.

    Equal rewards give no pair; of equals the earlier one is taken.
    """
    groups: dict[tuple[int, str, bytes], list[Rollout]] = {}
    for rollout in rollouts:
        cause = _find_flaw(rollout, max_positions)
        if cause is not None:
            counts[cause] += 1
            continue
        key = (rollout.step, rollout.example.example_id, rollout.turns[0].token_ids.tobytes())
        groups.setdefault(key, []).append(rollout)
    for members in groups.values():
        ranked = sorted(members, key=lambda one: -_reward(one))
        pairs = list(itertools.combinations(ranked, 2))
        if spec.pairs == "best_worst":
            worst = next(one for one in members if _reward(one) == _reward(ranked[-1]))
            pairs = [(ranked[0], worst)]
        kept = [
            (better, worse)
            for better, worse in pairs
            if _reward(better) - _reward(worse) >= max(spec.min_margin, np.finfo(float).tiny)
        ]
        counts["groups without a pair"] += not kept
        yield from kept


def _reward(rollout: Rollout) -> float:
    return rollout.outcome.reward or 0.0


def _find_flaw(rollout: Rollout, max_positions: int) -> str | None:
    """Say why a rollout cannot be half of a pair."""
    if rollout.outcome.reward is None:
        return "rollouts without a score"
    if not rollout.num_sampled_tokens:
        return "rollouts without a reply"
    if len(rollout.samples) > 1:
        return "rollouts whose prompt was written anew"
    is_long = sum(len(turn.token_ids) for turn in rollout.turns) > max_positions
    return "rollouts longer than the model's positions" if is_long else None


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
    scores = _read_scores(path, found)
    if scores is None:
        if scorer is None:
            why = "it is missing, and the weights that it was computed with are no longer held"
            raise _unusable(path, why)
        scores = await scorer.score(found.members, temperature)
        _write_scores(path, found, scores)
    return replace(found, members=with_logprobs(found.members, "reference", scores))


def _write_scores(path: Path, found: Preferences, scores: Sequence[FloatArray]) -> None:
    from safetensors.numpy import save

    joined = np.concatenate([np.asarray(one, dtype=np.float32) for one in scores])
    write_bytes_atomically(path, save({_STREAM: joined}, metadata={"pairs": found.digest}))


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
        explain_refusal(
            f"{path} holds the reference's log-probabilities of this run's pairs, and {why}",
            allowed="the file as the run wrote it before its first step",
            next_step="restore it, or start the run again with --new",
        )
    )
