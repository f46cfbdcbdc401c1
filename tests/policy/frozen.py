"""Models that never learn, for tests: in one process, and as one of several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from strop.policy.language_model import LanguageModel
from strop.policy.packing import PackedReply
from strop.policy.scoring import FrozenModel
from strop.policy.sharded import shard_frozen


def weigh(reply: PackedReply, advantage: float) -> PackedReply:
    """Return one half of a pair, of five in a batch."""
    return replace(reply, advantage=advantage, weight=0.2)


def frozen_alone(model_dir: Path, max_positions: int) -> FrozenModel:
    """Load a model whole."""
    return FrozenModel(_load(model_dir, may_fuse=True), max_positions=max_positions)


def frozen_rank(model_dir: Path, max_positions: int) -> FrozenModel:
    """Load this rank's rows of a model."""
    return shard_frozen(_load(model_dir, may_fuse=False), max_positions=max_positions)


def _load(model_dir: Path, *, may_fuse: bool) -> LanguageModel:
    model = LanguageModel.load(model_dir, dtype=torch.float32, may_fuse=may_fuse)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)
    return model
