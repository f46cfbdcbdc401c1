"""What an optimizer moves: fp32 masters with gradient buffers, and how a forward sees them.

`LocalMasters` are those of one process; `sharded.masters` has those of one rank of many. Every tensor
in `by_name` is a plain one: the part of a parameter that this rank moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from strop.policy.gradients import add_into
from strop.policy.head import HeadGradients
from strop.policy.joint_file import Rows
from strop.policy.language_model import LanguageModel


class Masters(Protocol):
    """The trained weights of a model, as far as this rank moves them."""

    by_name: dict[str, torch.Tensor]
    """fp32, each with its gradient buffer in `grad`."""

    def head_gradients(self) -> HeadGradients:
        """Return the buffers to which the gradients of the LM head are added, the whole of it."""
        ...

    def collect_gradients(self) -> None:
        """See that every rank's gradients are summed in `grad`. Every rank must call it."""
        ...

    def refresh(self) -> None:
        """Let the next forward read the masters as they are now."""
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

    def compute_rows(self) -> Iterator[Rows]:
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

    def compute_rows(self) -> Iterator[Rows]:
        """Yield the module's parameters."""
        for name, copy in self._model.named_parameters():
            yield Rows(name=name, part=copy, first=0, shape=tuple(copy.shape))

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
