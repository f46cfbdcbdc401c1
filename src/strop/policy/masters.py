"""The optimizer: fp32 masters with gradient buffers, how a forward sees them, and AdamW.

`LocalMasters` are those of one process; `sharded.ShardedMasters` those of one rank of many. Every tensor
in `by_name` is a plain one: the part of a parameter that this rank moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from strop.policy.head import HeadGradients, add_into
from strop.policy.language_model import LanguageModel
from strop.policy.ranks import TensorShard
from strop.spec.train import OptimizerSpec

_BLOCKS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Entries moved at once: on a CPU 4 MiB of masters, and as much of what they were, lie in the cache."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Masters(Protocol):
    """The trained weights of a model, as far as this rank moves them."""

    by_name: dict[str, torch.Tensor]
    """fp32, each with its gradient buffer in `grad`."""

    def head_gradients(self) -> HeadGradients:
        """Return the buffers to which the gradients of the LM head are added, the whole of it."""
        ...

    def collect_gradients(self) -> None:
        """Sum every rank's gradients in `grad`. Every rank must call it."""
        ...

    def refresh(self) -> None:
        """Make the next forward read the current masters."""
        ...

    def release(self) -> None:
        """Give back what a forward without backward gathered."""
        ...

    def as_stored(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return a part of a tensor like a master, as a checkpoint takes it: knowing its place."""
        ...

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Put a tensor like a master together. Every rank must call it."""
        ...

    def compute_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the model, frozen ones too, whole and in the type computed with.

        Every rank must take all of them.
        """
        ...

    def compute_shards(self) -> Iterator[TensorShard]:
        """Yield what this rank keeps of every tensor, in the type computed with."""
        ...


def find_head(model: LanguageModel) -> tuple[str | None, str | None]:
    """Return the names of the LM head's matrix and bias among the trained parameters."""
    names = {id(parameter): name for name, parameter in model.trained_parameters()}
    return names.get(id(model.head.weight)), names.get(id(model.head.bias))


class LocalMasters:
    """All weights in this process. Compute copies are the module's parameters."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._copies = dict(model.trained_parameters())
        self.by_name = {name: self._make_master(copy) for name, copy in self._copies.items()}
        masters = [self.by_name[name] if name else None for name in find_head(model)]
        self._head = HeadGradients(*(None if master is None else master.grad for master in masters))

    def head_gradients(self) -> HeadGradients:
        """Return the head's own buffers."""
        return self._head

    def collect_gradients(self) -> None:
        """Nothing to sum: backward added to the buffers."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the compute copies."""
        for name, copy in self._copies.items():
            if self.by_name[name] is not copy:
                copy.copy_(self.by_name[name])

    def release(self) -> None:
        """Nothing was gathered."""

    def as_stored(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor: it is whole."""
        return part

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor: it is whole."""
        return part

    def compute_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's parameters."""
        yield from self._model.named_parameters()

    def compute_shards(self) -> Iterator[TensorShard]:
        """Yield the module's parameters."""
        for name, copy in self._model.named_parameters():
            yield TensorShard(name=name, part=copy, first=0, shape=tuple(copy.shape))

    def _make_master(self, copy: torch.nn.Parameter) -> torch.Tensor:
        """Return the fp32 master of a compute copy, with a gradient buffer of its own."""
        if copy.dtype == torch.float32:
            copy.grad = torch.zeros_like(copy)
            return copy
        master = copy.detach().float()
        grad = torch.zeros_like(master)
        master.grad = grad

        def add_in_fp32(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            add_into(grad, parameter.grad)
            parameter.grad = None

        copy.register_post_accumulate_grad_hook(add_in_fp32)  # type: ignore[no-untyped-call]
        return master


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """How far one step has moved the weights of one rank: squares of L2 norms, which add up over ranks."""

    change: float
    weights: float
    """Of the weights before the step."""


class AdamW:
    """Owns both moments of every master, which keeps its gradient in `grad`.

    PyTorch's own fused kernel moves masters block by block. Between two blocks the masters of one lie in the
    cache, so that telling how far a step has moved them costs no second way through memory and no copy.
    """

    def __init__(self, masters: Mapping[str, torch.Tensor], spec: OptimizerSpec) -> None:
        self._masters = masters
        self._spec = spec
        self.num_steps = 0
        """Optimizer steps taken, which the moments' bias follows from."""
        self.moments = {
            name: {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
            for name, master in masters.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> Moved:
        """Move every master along its gradient. Weight decay acts on matrices only, as is usual."""
        self.num_steps += 1
        sums: list[torch.Tensor] = []
        for name, master in self._masters.items():
            assert master.grad is not None
            count = torch.tensor(float(self.num_steps), device=master.device)
            decay = self._spec.weight_decay if master.dim() >= 2 else 0.0
            tensors = (master, master.grad, *(self.moments[name][key] for key in MOMENTS))
            size = _BLOCKS[master.device.type]
            blocks = zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)
            sums += [self._move(block, count, lr, decay) for block in blocks if len(block[0])]
        # Read at once: a GPU would idle between blocks otherwise.
        change, weights = torch.stack(sums).sum(dim=0).tolist() if sums else (0.0, 0.0)
        return Moved(change=change, weights=weights)

    def _move(
        self, block: tuple[torch.Tensor, ...], count: torch.Tensor, lr: float, decay: float
    ) -> torch.Tensor:
        """Move one block; return the squares of what it moved by and of what it was. Shapes: (2), fp64."""
        master, grad, first, second = block
        before = master.clone()
        torch._fused_adamw_(
            [master],
            [grad],
            [first],
            [second],
            [],
            [count],
            lr=lr,
            beta1=self._spec.beta1,
            beta2=self._spec.beta2,
            weight_decay=decay,
            eps=self._spec.eps,
            amsgrad=False,
            maximize=False,
        )
        weights = torch.linalg.vector_norm(before).double().square()
        change = torch.linalg.vector_norm(before.sub_(master)).double().square()
        return torch.stack((change, weights))
