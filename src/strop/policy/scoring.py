"""Log-probabilities of known tokens, without gradients, under the policy or a frozen model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from strop.policy.balancing import PositionCost, plan_micro_batches, restore_order
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, gpu_positions, size_of_config
from strop.policy.head import token_logprobs
from strop.policy.language_model import LanguageModel
from strop.policy.optimizer import Masters, Ranks
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply, cut_groups, split_by_budget
from strop.policy.publication import digest_each
from strop.rollout import FloatArray, IntArray


@torch.no_grad()
def score_batch(model: LanguageModel, batch: PackedBatch, temperature: float) -> torch.Tensor:
    """Return the log-probability (nats) of every scored token of a batch. Shapes: (M,), fp32."""
    return token_logprobs(model.read(batch), model.head, batch, temperature)


def score_groups(
    model: LanguageModel,
    groups: Sequence[PackedGroup],
    temperature: float,
    *,
    max_positions: int | None = None,
) -> list[FloatArray]:
    """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups.

    Groups are fed together up to `max_positions`, all at once without it. A temperature of 0 is scored
    at 1, as engines report it.
    """
    return score_parts(model, cut_groups(groups, max_positions, is_alone=model.is_alone), temperature)


def score_on_ranks(
    model: LanguageModel,
    groups: Sequence[PackedGroup],
    temperature: float,
    max_positions: int,
    ranks: Ranks,
) -> list[FloatArray]:
    """Score like `score_groups`, each rank a part. Every rank must call it; the first one returns the scores.

    Other ranks return an empty list.
    """
    if ranks.num_ranks == 1:
        return score_groups(model, groups, temperature, max_positions=max_positions)
    plan = plan_on_ranks(model, groups, max_positions, ranks)
    scores = ranks.collect(score_parts(model, plan[ranks.index], temperature))
    return restore_order(groups, plan, scores) if scores else []


def plan_on_ranks(
    model: LanguageModel,
    groups: Sequence[PackedGroup],
    max_positions: int,
    ranks: Ranks,
    *,
    keeps_groups: bool = False,
) -> list[list[list[PackedGroup]]]:
    """Return the micro-batches of each rank, equal on all ranks; see `plan_micro_batches`."""
    is_alone = model.is_alone
    if ranks.num_ranks == 1:
        return [list(split_by_budget(groups, max_positions, keeps_groups=keeps_groups, is_alone=is_alone))]
    cost = PositionCost.of_model(size_of_config(model.module.config.to_dict()))
    return plan_micro_batches(
        groups,
        ranks.num_ranks,
        max_positions=max_positions,
        cost=cost,
        keeps_groups=keeps_groups,
        is_alone=is_alone,
    )


def score_parts(
    model: LanguageModel,
    parts: Iterable[Sequence[PackedGroup]],
    temperature: float,
) -> list[FloatArray]:
    """Score groups like `score_groups`, each part in one forward."""
    by_reply: list[FloatArray] = []
    for part in parts:
        batch = PackedBatch.of_groups(part, model.device)
        scores: FloatArray = score_batch(model, batch, temperature or 1.0).cpu().numpy()
        # Scored tokens are ordered by the positions that predict them, so replies are interleaved.
        by_reply += [scores[batch.reply_M == index] for index in range(sum(len(g.replies) for g in part))]
    return by_reply


def pack_given(prompt_ids: IntArray, replies: Sequence[IntArray]) -> PackedGroup:
    """Pack known replies to one prompt, every token scored."""
    packed = tuple(
        PackedReply(
            token_ids=reply_ids,
            is_scored=np.ones(len(reply_ids), dtype=np.bool_),
            engine_logprobs=np.zeros(len(reply_ids), dtype=np.float32),
            advantage=0.0,
            weight=0.0,
        )
        for reply_ids in replies
    )
    return PackedGroup(prompt_ids=prompt_ids, replies=packed)


def score_replies(
    model: LanguageModel, prompt_ids: IntArray, replies: Sequence[IntArray], temperature: float
) -> list[FloatArray]:
    """Score several replies to one prompt, which is fed once. Shapes: (T,) each, like the replies."""
    return score_groups(model, [pack_given(prompt_ids, replies)], temperature)


class FrozenModel:
    """The reference or the teacher: a model that never learns, or one rank's rows of it."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_positions: int | None = None,
        weights: Masters | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Hold the whole model, or with `weights` and `ranks` this rank's rows of it."""
        self.model = model
        self._max_positions = max_positions or default_positions(model)
        self._weights = weights or Masters(model)
        self._ranks = ranks or Ranks()

    def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups.

        See `score_on_ranks`.
        """
        scores = score_on_ranks(self.model, groups, temperature, self._max_positions, self._ranks)
        self.release()
        return scores

    def digest_tensors(self) -> dict[str, str]:
        """Return the digest of each tensor; on the first rank only. Every rank must call it."""
        return digest_each(self._weights.compute_copies(), is_kept=self._ranks.index == 0)

    def release(self) -> None:
        """Drop the rows of other ranks that a forward gathered."""
        self._weights.release()


def default_positions(model: LanguageModel, *, num_ranks: int = 1) -> int:
    """Return the default number of positions that a learner forwards at once.

    With `num_ranks`, each of them keeps a share of the model. On a GPU it follows from the sizes of device
    and model, not from the free memory, so that a resumed run is cut the same way.
    """
    if model.device.type != "cuda":
        return DEFAULT_MICRO_BATCH_POSITIONS
    adapters = None
    if model.adapters is not None:
        adapters = sum(parameter.numel() for _, parameter in model.trained_parameters())
    return gpu_positions(
        torch.cuda.get_device_properties(model.device).total_memory,
        size_of_config(model.module.config.to_dict()),
        str(model.dtype).removeprefix("torch."),
        num_ranks=num_ranks,
        num_trained=adapters,
        is_recomputed=model.recomputes,
    )
