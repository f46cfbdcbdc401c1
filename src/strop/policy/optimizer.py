"""The optimizer: fp32 masters with gradient buffers, AdamW, the ranks that share a step, and its report.

`Masters` are those of one process; `sharded` has those of one rank of many. Every tensor in `by_name` is a
plain one: the part of a parameter that this rank moves. Everything but gradients and weights crosses ranks as
a plain value, and every rank computes the same result from the same list of values; so all ranks report,
refuse and go on alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from strop.errors import StropError
from strop.policy.head import HeadGradients, add_into
from strop.policy.language_model import LanguageModel
from strop.policy.objective import TokenTerms
from strop.spec.train import OptimizerSpec

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")


class Ranks:
    """The ranks of a learner, of which this process is one: the only one, or one of torch's default group."""

    def __init__(self, *, is_group: bool = False) -> None:
        self.index = dist.get_rank() if is_group else 0
        self.num_ranks = dist.get_world_size() if is_group else 1

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of rank. Every rank must call it."""
        values = [value] * self.num_ranks
        if self.num_ranks > 1:
            dist.all_gather_object(values, value)
        return values

    def collect(self, value: T) -> list[T]:
        """Return every rank's value on the first rank, nothing on the others. Every rank must call it."""
        values = [value] * self.num_ranks if self.index == 0 else []
        if self.num_ranks > 1:
            dist.gather_object(value, values or None)
        return values


def run_alike(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run a function on every rank, and return all results.

    Raises: on every rank, the error of the first rank that failed.
    """
    result: T | StropError
    try:
        result = work()
    except StropError as error:
        result = error
    results: list[T] = []
    for value in ranks.gather(result):
        if isinstance(value, StropError):
            raise value
        results.append(value)
    return results


def run_on_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run a function on the first rank while the others wait, and return its result on all of them.

    Raises: on every rank, the StropError of the function.
    """
    return run_alike(ranks, lambda: [work()] if ranks.index == 0 else [])[0][0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorShard:
    """A rank's rows of a tensor."""

    name: str
    part: Tensor
    """Consecutive rows, in the type to be written; empty on a rank without a share."""
    first: int
    """Index of the first row."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


_BLOCKS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Entries moved at once: on a CPU 4 MiB of masters, and their old values, fit in the cache."""
MOMENTS = ("exp_avg", "exp_avg_sq")
BETA1 = 0.9
"""Decay rate of the first moment."""
EPS = 1e-8
"""Added to the root of the second moment."""


def find_head(model: LanguageModel) -> tuple[str | None, str | None]:
    """Return the names of the LM head's matrix and bias among the trained parameters."""
    names = {id(parameter): name for name, parameter in model.trained_parameters()}
    return names.get(id(model.head.weight)), names.get(id(model.head.bias))


class Masters:
    """The part of a model's trained weights that this rank moves: here all of them.

    Compute copies are the module's parameters.
    """

    by_name: dict[str, torch.Tensor]
    """fp32, each with its gradient buffer in `grad`."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._copies = dict(model.trained_parameters())
        self.by_name = {name: self._make_master(copy) for name, copy in self._copies.items()}
        masters = [self.by_name[name] if name else None for name in find_head(model)]
        self._head = HeadGradients(*(None if master is None else master.grad for master in masters))

    def head_gradients(self) -> HeadGradients:
        """Return the buffers to which the gradients of the whole LM head are added."""
        return self._head

    def collect_gradients(self) -> None:
        """Sum every rank's gradients in `grad`. Every rank must call it."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the next forward read the current masters: round them into the compute copies."""
        for name, copy in self._copies.items():
            if self.by_name[name] is not copy:
                copy.copy_(self.by_name[name])

    def release(self) -> None:
        """Free the weights that a forward without backward gathered."""

    def as_stored(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return a part of a tensor shaped like a master in a checkpoint's form, which knows its place."""
        return part

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Gather the whole of a tensor shaped like a master. Every rank must call it."""
        return part

    def compute_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the model, frozen ones too, whole and in the compute type.

        Every rank must take all of them.
        """
        yield from self._model.named_parameters()

    def compute_shards(self) -> Iterator[TensorShard]:
        """Yield this rank's rows of every tensor, in the compute type."""
        for name, copy in self._model.named_parameters():
            yield TensorShard(name=name, part=copy, first=0, shape=tuple(copy.shape))

    def _make_master(self, copy: torch.nn.Parameter) -> torch.Tensor:
        """Return the fp32 master of a compute copy, with a gradient buffer."""
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


class AdamW:
    """Owns both moments of every master, which keeps its gradient in `grad`.

    PyTorch's fused kernel moves masters block by block. A block just moved is still in the cache, so
    measuring how far it moved costs no second pass through memory.
    """

    def __init__(self, masters: Mapping[str, torch.Tensor], spec: OptimizerSpec) -> None:
        self._masters = masters
        self._spec = spec
        self.num_steps = 0
        """Optimizer steps taken, for the bias correction of the moments."""
        self.moments = {
            name: {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
            for name, master in masters.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> tuple[float, float]:
        """Move every master along its gradient. Weight decay acts on matrices only, as usual.

        Returns the squared L2 norms of the change and of the weights before it, which add up over ranks.
        """
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
        # One read for all blocks: a GPU would idle between them otherwise.
        change, weights = torch.stack(sums).sum(dim=0).tolist() if sums else (0.0, 0.0)
        return change, weights

    def _move(
        self, block: tuple[torch.Tensor, ...], count: torch.Tensor, lr: float, decay: float
    ) -> torch.Tensor:
        """Move one block; return the squared norms of its change and of its old values. Shapes: (2), fp64."""
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
            beta1=BETA1,
            beta2=self._spec.beta2,
            weight_decay=decay,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )
        weights = torch.linalg.vector_norm(before).double().square()
        change = torch.linalg.vector_norm(before.sub_(master)).double().square()
        return torch.stack((change, weights))


_EDGES = torch.tensor([2.0 ** (power / 8) for power in range(-27 * 8, 5 * 8 + 1)])
_EDGES = torch.cat((-_EDGES.flip(0), _EDGES))
"""Bounds of the bins: eight for each factor of 2 from 7e-9 to 32, on both sides of 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Histogram:
    """Values of tokens, of any number of micro-batches and ranks: exact but for their order within a bin."""

    counts: NDArray[np.int64]
    """Values in each bin; the first and last one are open. Shapes: one more than `_EDGES`."""
    sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> Histogram:
        """Sort values into bins, on their device. Shapes: each (M,), any M."""
        values_M = torch.cat(list(parts)).float() if parts else torch.zeros(0)
        if not len(values_M):
            return NO_VALUES
        bins_M = torch.bucketize(values_M, _EDGES.to(values_M.device))
        facts = torch.stack((values_M.sum(dtype=torch.float64), *values_M.aminmax()))
        total, least, most = facts.tolist()
        counts = torch.bincount(bins_M, minlength=len(_EDGES) + 1).cpu().numpy()
        return cls(counts=counts, sum=total, min=least, max=most)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            counts=self.counts + other.counts,
            sum=self.sum + other.sum,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
        )

    @property
    def num_values(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """The mean; there must be a value."""
        return self.sum / self.num_values

    def quantile(self, share: float) -> float:
        """Return the value below which a share in [0, 1] of the values lies; there must be a value.

        It is off by at most a bin, 9 % of a value between 1e-8 and 32. Ends are exact.
        """
        place = share * (self.num_values - 1)
        lower, upper = self._value(math.floor(place)), self._value(math.ceil(place))
        return lower + (place - math.floor(place)) * (upper - lower)

    def _value(self, place: int) -> float:
        """Estimate the value at a place in order, as if a bin's values were spread evenly."""
        if place in (0, self.num_values - 1):
            return self.max if place else self.min
        ends = np.cumsum(self.counts)
        index = int(np.searchsorted(ends, place, side="right"))
        bounds = [self.min, *_EDGES.tolist(), self.max]
        low, high = max(bounds[index], self.min), min(bounds[index + 1], self.max)
        share = (place - ends[index] + self.counts[index] + 0.5) / self.counts[index]
        return float(low + (high - low) * share)


NO_VALUES = Histogram(counts=np.zeros(len(_EDGES) + 1, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The place of an optimizer step in a run."""

    version: int | None = None
    """Version of the weights after the step; None: the next. The steps of one batch make one version."""
    place: int | None = None
    """Optimizer steps that the run plans before it, for the learning rate; None: those that were taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermReport:
    """One term of a step, its weight included."""

    name: str
    loss: float
    grad_norm: float
    """L2 norm of this term's gradient alone, before clipping."""
    cosine: float | None
    """Cosine of this gradient with the sum of the earlier terms'; None for the first term, and where either
    is 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReport:
    """The result of one optimizer step."""

    loss: float
    """Sum of the weighted terms."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    lr: float
    changed_frac: float
    """Share of compute copies that the step changed. Small steps change few bf16 copies at a time."""
    master_changed_frac: float | None
    """Share of masters with a gradient that the step changed: near 1, unless updates vanish in the
    rounding of the masters. None if no sampled master has a gradient."""
    drift: Histogram
    """abs(trainer - engine) log-probability (nats) of the trained tokens that an engine sampled."""
    num_positions: int
    """Forwarded positions: each prompt once per micro-batch, or where sequences are computed by themselves,
    once per reply, padding included."""
    num_micro_batches: int
    terms: tuple[TermReport, ...] = ()
    sums: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the losses, by name: `TokenTerms.shares`."""
    totals: Mapping[str, Total] = field(default_factory=dict)
    """Further metrics that are means over tokens, by name: `TokenTerms.means`."""
    log_ratio: Histogram = NO_VALUES
    """Logarithms of the probability ratios of the tokens whose loss has one that is not 1 by construction."""
    update_ratio: float = 0.0
    """L2 norm of the step's change of the trained weights over that of the weights."""
    compute_s: float = 0.0
    """Wall time of the step on the slowest rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Sum and count of a mean, so that the means of parts can be joined."""

    sum: float = 0.0
    count: int = 0

    def __add__(self, other: Total) -> Total:
        return Total(sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def mean(self) -> float:
        """The mean; `count` must not be 0."""
        return self.sum / self.count


def join_totals(parts: Iterable[Mapping[str, Total]]) -> dict[str, Total]:
    """Add up totals by name, without names whose count is 0."""
    joined: dict[str, Total] = {}
    for part in parts:
        for name, total in part.items():
            joined[name] = joined.get(name, Total()) + total
    return {name: joined[name] for name in sorted(joined) if joined[name].count}


@dataclass(kw_only=True, slots=True)
class Accumulator:
    """Sums of a step over the micro-batches of all terms, read from the device at its end."""

    loss: float = 0.0
    num_positions: int = 0
    num_micro_batches: int = 0
    drift: Histogram = NO_VALUES
    log_ratio: Histogram = NO_VALUES
    sums: dict[str, float] = field(default_factory=dict)
    """Of `TokenTerms.shares`, weighted like the loss."""
    totals: dict[str, Total] = field(default_factory=dict)
    """Of `TokenTerms.means`."""

    unread_drifts: list[torch.Tensor] = field(default_factory=list)
    """Still on the device, like all that is unread."""
    unread_ratios: list[torch.Tensor] = field(default_factory=list)
    unread_sums: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    unread_totals: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)

    def add_terms(self, terms: TokenTerms, weight_N: torch.Tensor) -> None:
        """Keep the ratios of some tokens, and sum up their further metrics."""
        if terms.ratio_N is not None:
            self.unread_ratios.append(terms.ratio_N.log())
        self.unread_sums += [(name, (weight_N * share_N).sum()) for name, share_N in terms.shares.items()]
        for name, values_N in terms.means.items():
            self.add_values(name, values_N)

    def add_values(self, name: str, values_N: torch.Tensor) -> None:
        """Sum up a metric that is a mean over tokens or positions."""
        self.unread_totals.append((name, values_N.sum(dtype=torch.float64), len(values_N)))

    def read_terms(self) -> None:
        """Read all kept values from the device, after the work is launched."""
        self.drift += Histogram.of(self.unread_drifts)
        self.log_ratio += Histogram.of(self.unread_ratios)
        for name, value in self.unread_sums:
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value, count in self.unread_totals:
            self.totals[name] = self.totals.get(name, Total()) + Total(sum=float(value), count=count)
        self.unread_drifts, self.unread_ratios, self.unread_sums, self.unread_totals = [], [], [], []


def add_up(parts: Sequence[Accumulator]) -> Accumulator:
    """Return the sums over all ranks."""
    return Accumulator(
        loss=sum(part.loss for part in parts),
        num_positions=sum(part.num_positions for part in parts),
        num_micro_batches=sum(part.num_micro_batches for part in parts),
        drift=sum((part.drift for part in parts), NO_VALUES),
        log_ratio=sum((part.log_ratio for part in parts), NO_VALUES),
        totals=join_totals(part.totals for part in parts),
        sums={
            name: sum(part.sums.get(name, 0.0) for part in parts)
            for name in sorted({name for part in parts for name in part.sums})
        },
    )
