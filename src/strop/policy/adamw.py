"""AdamW on fp32 masters, block by block, which tells how far a step has moved them.

PyTorch's own fused kernel does the arithmetic. Between two blocks the masters of one lie in the cache, so
that comparing them with what they were costs no second way through memory and no copy of all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from strop.spec.optimizer import OptimizerSpec

_BLOCKS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Entries moved at once: on a CPU 4 MiB of masters, and as much of what they were, lie in the cache."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """How far one step has moved the weights of one rank: squares of L2 norms, which add up over ranks."""

    change: float
    weights: float
    """Of the weights before the step."""


class AdamW:
    """Owns both moments of every master, which keeps its gradient in `grad`."""

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
