"""Pairs of recorded replies to one prompt, of which one earned more: what `dpo.source` gives.

Nothing here imports torch, so a plan can read them; `preferences` packs them for training.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strop.errors import DataError, explain_refusal
from strop.rollout import Rollout
from strop.spec.dpo import DpoSpec
from strop.spec.run import RunSpec
from strop.tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """All pairs of a run, in the order of the source."""

    source: str
    members: tuple[tuple[Rollout, Rollout], ...]
    """The better one first."""
    counts: Mapping[str, int]
    """What became of the rollouts that were read, in words."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each pair: the prompt once, and both replies."""
        return tuple(map(_count_tokens, self.members))

    @property
    def num_scored(self) -> int:
        """Tokens of all replies that were sampled."""
        turns = (turn for pair in self.members for one in pair for turn in one.turns)
        return sum(len(turn.token_ids) for turn in turns if turn.is_sampled)

    def describe(self) -> str:
        """Return how many there are, and what became of the others."""
        found = "; ".join(f"{number} {what}" for what, number in self.counts.items() if number)
        return f"{len(self.members)} pairs from {self.source}" + (f" ({found})" if found else "")


def read_pairs(spec: RunSpec, task: Task, model_dir: Path) -> Pairs | None:
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
    pairs = Pairs(source=dpo.source, members=tuple(found), counts=counts)
    if len(found) < dpo.pairs_per_step:
        raise DataError(
            explain_refusal(
                f"a step takes dpo.pairs_per_step={dpo.pairs_per_step} and there are {pairs.describe()}",
                allowed="at least as many pairs as a step takes",
                next_step="lower dpo.pairs_per_step, or name a run whose rollouts differ more in reward",
            )
        )
    return pairs


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


def _count_tokens(pair: tuple[Rollout, Rollout]) -> int:
    replies = (turn for one in pair for turn in one.turns[1:])
    return len(pair[0].turns[0].token_ids) + sum(len(turn.token_ids) for turn in replies)
