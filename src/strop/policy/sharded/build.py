"""From a loaded model to this rank's part of a learner."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from strop.policy.frozen import FrozenModel
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.sharded.masters import ShardedMasters
from strop.policy.sharded.ranks import GroupRanks
from strop.spec.optimizer import OptimizerSpec


def shard_frozen(model: LanguageModel, *, device: str = "cpu", max_positions: int) -> FrozenModel:
    """Keep this rank's rows of a model of which nothing is trained, in the type that it is computed with.

    Loaded and called like that of `shard_learner`.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    weights = ShardedMasters(model, mesh)
    return FrozenModel(model, max_positions=max_positions, weights=weights, ranks=GroupRanks())


def shard_learner(
    model: LanguageModel,
    spec: OptimizerSpec,
    *,
    device: str = "cpu",
    micro_batch_positions: int | None = None,
    num_steps: int | None = None,
) -> Learner:
    """Keep this rank's rows of a model, and drop the others. Every rank must call it, with equal weights.

    The model was loaded on the CPU without fused layers; whether it has adapters or computes activations
    again is decided before. `device` is where it is trained, "cpu" or "cuda". The default process group
    must be initialised: gloo for "cpu", "cpu:gloo,cuda:nccl" for "cuda".
    """
    return Learner(
        model,
        spec,
        micro_batch_positions=micro_batch_positions,
        masters=ShardedMasters(model, init_device_mesh(device, (dist.get_world_size(),))),
        ranks=GroupRanks(),
        num_steps=num_steps,
    )
