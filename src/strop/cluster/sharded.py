"""A learner on several ranks: weights are sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`).

A rank keeps a slice of the rows of every parameter: fp32 masters, moments and gradient buffers. A
layer's forward gathers its compute copies and drops them again; its backward reduces gradients in fp32,
by SUM, not by mean: token weights were fixed for the whole batch.

The LM head works outside of autograd, in chunks. Embedding, last norm and head are FSDP's outermost
group, which stays gathered from the start of a forward to the end of its backward, so the head reads it
in between. Its gradient is added up in fp32 on each rank and reduced once per term of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strop.policy.head import HeadGradients
from strop.policy.language_model import LanguageModel, decoder_layers, find_trunk, load_module, read_shape
from strop.policy.optimizer import Masters, Ranks, TensorShard, find_head, run_on_first
from strop.policy.proof import judge
from strop.policy.weights import listed_shards, read_names


def load_empty(path: Path, dtype: torch.dtype) -> LanguageModel:
    """Return a model without memory, for `ShardedMasters`. Every rank must call it.

    The first rank proves strop's forwards on a small model of the same config. Raises: like
    `LanguageModel.load`.
    """
    shape, form, implementation = run_on_first(Ranks(is_group=True), lambda: judge(path, dtype))
    module = load_module(path, dtype, is_empty=True)
    own = read_shape(module)
    module.set_attn_implementation(implementation)
    shape = replace(shape, num_layers=own.num_layers, vocab_size=own.vocab_size)
    return LanguageModel(module, shape=shape, form=form)


class ShardedMasters(Masters):
    """This rank's rows of a model's weights; trained ones have masters."""

    def __init__(self, model: LanguageModel, path: Path, device: str = "cpu") -> None:
        """Shard a model in place, and read this rank's rows from a model directory. Every rank must call it.

        The model is that of `load_empty`, and has its adapters and `recompute_activations` already. `device`
        is where it is computed, "cpu" or "cuda". The default process group must be initialised: gloo for
        "cpu", "cpu:gloo,cuda:nccl" for "cuda".
        """
        self._model = model
        self._mesh = mesh = init_device_mesh(device, (dist.get_world_size(),))
        self._dtype = model.dtype
        names = dict(model.trained_parameters())
        types = {name: tensor.dtype for name, tensor in self._tensors()}
        self._head_names = find_head(model)
        # Sums over micro-batches in fp32, reduced once.
        totals = [
            None
            if name is None
            else torch.zeros(names[name].shape, dtype=torch.float32, device=mesh.device_type)
            for name in self._head_names
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
        self.fill(path, types)
        self._parameters: dict[str, DTensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in names and isinstance(parameter, DTensor)
        }
        self.by_name = {}
        for name, parameter in self._parameters.items():
            self.by_name[name] = master = parameter.to_local().detach()
            master.grad = torch.zeros_like(master)
            # FSDP adds to it.
            parameter.grad = self._placed(parameter, master.grad)

    def head_gradients(self) -> HeadGradients:
        """Return the buffers that are reduced by `collect_gradients`."""
        return self._head_totals

    def collect_gradients(self) -> None:
        """Reduce the gradients of the head; FSDP has reduced the others."""
        for name, part in zip(
            self._head_names, (self._head_totals.weight, self._head_totals.bias), strict=True
        ):
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
        for name, parameter in self._rows():
            yield name, parameter.full_tensor()

    def compute_shards(self) -> Iterator[TensorShard]:
        """Yield this rank's rows: equally many on all ranks but the last ones."""
        for name, rows in self._rows():
            first, shape = self._find_first(rows), tuple(rows.shape)
            yield TensorShard(name=name, part=rows.to_local(), first=first, shape=shape)

    @torch.no_grad()
    def fill(self, path: Path, types: Mapping[str, torch.dtype]) -> None:
        """Give every tensor memory, and read it: this rank's rows of parameters, and buffers as they are.

        `types` are those of the model before it was widened. Where files have other tensors than the module,
        such as single experts, the first rank loads all and sends them.
        """
        module = self._model.module
        # Adapters, and buffers that no file holds.
        made = {name: tensor.clone() for name, tensor in self._tensors() if tensor.device.type != "meta"}
        self._trunk.to_empty(device=self._mesh.device_type)
        tensors = dict(self._tensors())
        for name, values in made.items():
            tensors[name].copy_(values)
        # All that files hold: parameters but adapters, and some buffers.
        buffers = {name for name, _ in module.named_buffers()}
        wanted = tensors.keys() - (made.keys() - (module.state_dict().keys() & buffers))
        stored = {name for file in listed_shards(path) for name in read_names(path / file)}
        if wanted <= stored <= module.state_dict().keys():
            load({name: tensors[name] for name in wanted}, storage_reader=HuggingFaceStorageReader(str(path)))
        else:
            whole: dict[str, torch.Tensor] = {}
            if self._mesh.get_local_rank() == 0:
                loaded = load_module(path, self._dtype)
                whole = dict(chain(loaded.named_parameters(), loaded.named_buffers()))
            for name in sorted(wanted):
                own = tensors[name]
                values = whole[name].detach() if whole else torch.empty(own.shape, dtype=types[name])
                # Bytes: gloo supports fewer types than torch.
                dist.broadcast(values.contiguous().view(-1).view(torch.uint8), 0)
                if isinstance(own, DTensor):
                    values = distribute_tensor(values, self._mesh, own.placements, src_data_rank=None)
                own.copy_(values)
        for name in wanted:
            # Files may hold another type, from which a whole model would be rounded.
            tensors[name].copy_(tensors[name].to(types[name]))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.module.named_buffers()

    def _find_first(self, parameter: DTensor) -> int:
        """Return the index of this rank's first row."""
        placed = compute_local_shape_and_global_offset(parameter.shape, self._mesh, parameter.placements)
        return placed[1][0]

    def _rows(self) -> Iterator[tuple[str, DTensor]]:
        """Yield every parameter in the compute type."""
        for name, parameter in self._model.named_parameters():
            rows = parameter.detach().to(self._dtype)
            assert isinstance(rows, DTensor)
            yield name, rows

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
