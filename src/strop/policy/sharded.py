"""A learner on several ranks: weights are sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`).

A rank keeps a slice of the rows of every parameter: fp32 masters, moments and gradient buffers. A
layer's forward gathers its compute copies and drops them again; its backward reduces gradients in fp32,
by SUM, not by mean: token weights were fixed for the whole batch.

The LM head works outside of autograd, in chunks. Embedding, last norm and head are FSDP's outermost
group, which stays gathered from the start of a forward to the end of its backward, so the head reads it
in between. Its gradient is added up in fp32 on each rank and reduced once per term of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from strop.policy.head import HeadGradients
from strop.policy.language_model import LanguageModel, decoder_layers, find_trunk
from strop.policy.learner import Learner
from strop.policy.optimizer import TensorShard, find_head
from strop.policy.scoring import FrozenModel
from strop.spec.train import OptimizerSpec

T = TypeVar("T")


def shard_frozen(model: LanguageModel, *, device: str = "cpu", max_positions: int) -> FrozenModel:
    """Keep this rank's rows of a frozen model, in the compute type. Requirements as for `shard_learner`."""
    weights = ShardedMasters(model, init_device_mesh(device, (dist.get_world_size(),)))
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

    The model was loaded on the CPU without fused layers, and has its adapters and `recompute_activations`
    already. `device` is where it is trained, "cpu" or "cuda". The default process group must be initialised:
    gloo for "cpu", "cpu:gloo,cuda:nccl" for "cuda".
    """
    return Learner(
        model,
        spec,
        micro_batch_positions=micro_batch_positions,
        masters=ShardedMasters(model, init_device_mesh(device, (dist.get_world_size(),))),
        ranks=GroupRanks(),
        num_steps=num_steps,
    )


class GroupRanks:
    """All ranks of the default process group, which must be initialised."""

    def __init__(self) -> None:
        self.index = dist.get_rank()
        self.num_ranks = dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of rank. Every rank must call it."""
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]


class ShardedMasters:
    """This rank's rows of a model's weights; trained ones have masters."""

    def __init__(self, model: LanguageModel, mesh: DeviceMesh) -> None:
        """Shard a model in place; it must have been loaded without fused layers.

        Every rank must have loaded the same weights.
        """
        assert model.fused is None, "fused layers read weights past FSDP's hooks"
        self._model = model
        self._mesh = mesh
        self._dtype = model.dtype
        names = dict(model.trained_parameters())
        self._head = find_head(model)
        # Sums over micro-batches in fp32, reduced once.
        totals = [
            None
            if name is None
            else torch.zeros(names[name].shape, dtype=torch.float32, device=mesh.device_type)
            for name in self._head
        ]
        self._head_totals = HeadGradients(*totals)
        trunk = _Trunk(model.module)
        # Layer by layer: at most one is whole in fp32.
        policy = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
        for layer in decoder_layers(model.module):
            _widen(layer)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        _widen(model.module)
        # Not resharded after the forward: the head is read before the backward begins.
        fully_shard(trunk, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for part in trunk.modules():
            if isinstance(part, FSDPModule):
                # Both: gloo supports plain sums only, and a factor alone would request a scaled one.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        assert isinstance(trunk, FSDPModule)
        self._trunk = trunk
        model.route(trunk)
        self._parameters: dict[str, DTensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in names and isinstance(parameter, DTensor)
        }
        self.by_name = {name: self._open(parameter) for name, parameter in self._parameters.items()}

    def head_gradients(self) -> HeadGradients:
        """Return the buffers that are reduced by `collect_gradients`."""
        return self._head_totals

    def collect_gradients(self) -> None:
        """Reduce the gradients of the head; FSDP has reduced the others."""
        for name, part in zip(self._head, (self._head_totals.weight, self._head_totals.bias), strict=True):
            if name is None or part is None:
                continue
            total = DTensor.from_local(part, self._mesh, [Partial()], run_check=False)
            grad = self.by_name[name].grad
            assert grad is not None
            grad.add_(total.redistribute(self._mesh, [Shard(0)]).to_local())
            part.zero_()

    def refresh(self) -> None:
        """Do nothing: the next forward gathers the masters again."""

    def release(self) -> None:
        """Reshard the outermost group, which otherwise only a backward does."""
        self._trunk.reshard()

    def as_stored(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return a part as a DTensor."""
        return self._placed(self._parameters[name], part)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Gather all parts."""
        return self._placed(self._parameters[name], part).full_tensor()

    def compute_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, gathered in the compute type."""
        for name, parameter, part in self._compute_parts():
            yield name, self._placed(parameter, part).full_tensor()

    def compute_shards(self) -> Iterator[TensorShard]:
        """Yield this rank's rows: equally many on all ranks but the last ones."""
        rank, num_ranks = self._mesh.get_local_rank(), self._mesh.size()
        for name, parameter, part in self._compute_parts():
            most = -(-len(parameter) // num_ranks)
            first = min(rank * most, len(parameter))
            assert len(part) == min(most, len(parameter) - first), "rows are not where FSDP2 puts them"
            yield TensorShard(name=name, part=part, first=first, shape=tuple(parameter.shape))

    def _compute_parts(self) -> Iterator[tuple[str, DTensor, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            yield name, parameter, parameter.to_local().detach().to(self._dtype)

    def _open(self, parameter: DTensor) -> torch.Tensor:
        """Return the local tensor of a parameter; FSDP adds to its gradient buffer."""
        master = parameter.to_local().detach()
        master.grad = torch.zeros_like(master)
        parameter.grad = self._placed(parameter, master.grad)
        return master

    def _placed(self, like: DTensor, part: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            part, self._mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


class _Trunk(torch.nn.Module):
    """The outermost group: a forward of the trunk that also gathers the head."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        """Run the trunk."""
        return find_trunk(self.module)(**inputs)


def _widen(module: torch.nn.Module) -> None:
    """Convert trained weights to fp32; frozen ones keep their type."""
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()
