"""The policy's optimizer: fp32 masters and moments, and one exact step per batch.

Forward and backward run on the compute copies (bf16, or the masters themselves in fp32). Gradients
of micro-batches are summed in fp32; token weights were fixed for the whole batch before it was
split, so nothing is divided here. A non-finite gradient never reaches the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from strop.errors import CorruptRecord, LearnerError, explain_refusal
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS
from strop.policy.gradients import add_into
from strop.policy.head import HeadResult, TokenGradient, loss_and_gradients
from strop.policy.language_model import LanguageModel
from strop.policy.packing import PackedBatch, PackedGroup, split_by_budget
from strop.policy.prefix_attention import PrefixSharedAttention
from strop.rollout import FloatArray
from strop.spec.optimizer import OptimizerSpec

_CHANGED_STRIDE = 997
"""Every so many parameters are compared to tell which share a step has changed."""

_MOMENTS = ("exp_avg", "exp_avg_sq")

TokenTermsFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps (logprob, engine logprob, advantage) of m tokens to their (loss, d loss / d logprob)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossTerm:
    """One term of a step's loss: the sum of what it says about each of its tokens."""

    name: str
    groups: Sequence[PackedGroup]
    temperature: float
    token_terms: TokenTermsFn
    weight: float = 1.0
    """Factor of the whole term."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermReport:
    """What one term gave to a step, its weight included."""

    name: str
    loss: float
    grad_norm: float
    """L2 norm of this term's gradient alone, before clipping."""
    cosine: float | None
    """Between this gradient and the sum of those of the terms before; None for the first, and where
    either is 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReport:
    """What one optimizer step did."""

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
    drift_M: FloatArray
    """abs(trainer - engine) log-probability (nats) of every trained token that an engine sampled."""
    num_positions: int
    """Positions that were forwarded, each prompt counted once per micro-batch."""
    num_micro_batches: int
    terms: tuple[TermReport, ...] = ()


@dataclass(kw_only=True, slots=True)
class _Tally:
    """Sums over the micro-batches of all terms."""

    loss: float = 0.0
    num_positions: int = 0
    num_micro_batches: int = 0
    drifts: list[FloatArray] = field(default_factory=lambda: [np.zeros(0, dtype=np.float32)])


class Learner:
    """Owns the masters and moments of a model and moves them."""

    def __init__(
        self, model: LanguageModel, spec: OptimizerSpec, *, micro_batch_positions: int | None = None
    ) -> None:
        self.model = model
        self.version = 0
        """Optimizer steps taken."""
        self._spec = spec
        self._max_positions = micro_batch_positions or DEFAULT_MICRO_BATCH_POSITIONS
        self._copies = dict(model.named_parameters())
        self._masters = {name: self._make_master(copy) for name, copy in self._copies.items()}
        self._optimizer = self._build_optimizer()

    def step(
        self, groups: Sequence[PackedGroup], *, temperature: float, token_terms: TokenTermsFn
    ) -> StepReport:
        """Take one optimizer step over a complete batch of one term.

        Raises: like `step_terms`.
        """
        term = LossTerm(name="loss", groups=groups, temperature=temperature, token_terms=token_terms)
        return self.step_terms([term])

    def step_terms(self, terms: Sequence[LossTerm]) -> StepReport:
        """Take one optimizer step over the complete batches of all terms.

        The gradients of several terms are measured apart and then added up, which takes one more buffer
        of the gradient's size. An empty batch still moves: moments decay and the version advances, as for
        any batch whose gradient is zero.

        Raises: LearnerError if the loss or gradient is not finite; weights and moments stay.
        """
        tally = _Tally()
        reports = self._accumulate_apart(terms, tally)
        grad_norm = self._clip(tally.loss)
        if len(terms) == 1:
            reports = [TermReport(name=terms[0].name, loss=tally.loss, grad_norm=grad_norm, cosine=None)]
        master_changed_frac, changed_frac = self._apply()
        return StepReport(
            loss=tally.loss,
            grad_norm=grad_norm,
            lr=float(self._optimizer.param_groups[0]["lr"]),
            changed_frac=changed_frac,
            master_changed_frac=master_changed_frac,
            drift_M=np.concatenate(tally.drifts),
            num_positions=tally.num_positions,
            num_micro_batches=tally.num_micro_batches,
            terms=tuple(reports),
        )

    def gradients(
        self, groups: Sequence[PackedGroup], *, temperature: float, token_terms: TokenTermsFn
    ) -> dict[str, torch.Tensor]:
        """Return the gradient of a batch by parameter name, and change nothing."""
        term = LossTerm(name="loss", groups=groups, temperature=temperature, token_terms=token_terms)
        self._accumulate_term(term, _Tally())
        copies = {name: self._grad(name).clone() for name in self._masters}
        self._zero_gradients()
        return copies

    def save_state(self, target: Path) -> None:
        """Write masters, moments and counters into an existing directory."""
        tensors: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            state = self._optimizer.state[master]
            tensors[f"master/{name}"] = master.detach()
            for key in _MOMENTS:
                tensors[f"{key}/{name}"] = state[key] if state else torch.zeros_like(master)
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(stored, target / "optimizer.safetensors")
        (target / "learner.json").write_text(json.dumps({"version": self.version}))

    def load_state(self, source: Path) -> None:
        """Restore what `save_state` wrote, all of it or nothing.

        Raises: CorruptRecord if a part is missing or does not fit the model.
        """
        try:
            version = int(json.loads((source / "learner.json").read_text())["version"])
            tensors = load_file(source / "optimizer.safetensors")
            self._check_state(tensors)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CorruptRecord(
                explain_refusal(
                    f"the optimizer state in {source} cannot be restored ({type(error).__name__}: {error})",
                    allowed="masters and both moments of every parameter, as a checkpoint holds them",
                    next_step="remove this checkpoint; the run then resumes from the one before",
                )
            ) from error
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors[f"master/{name}"])
                if master is not self._copies[name]:
                    self._copies[name].copy_(master)
                state = self._optimizer.state[master]
                # On the master's device: the fused step reads it there.
                state["step"] = torch.tensor(float(version), device=master.device)
                for key in _MOMENTS:
                    # Copied: what safetensors returns is a view of the checkpoint's file.
                    state[key] = torch.empty_like(master).copy_(tensors[f"{key}/{name}"])
        self.version = version

    def _check_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Compare stored tensors with the masters. Raises: KeyError, ValueError naming the tensor."""
        for name, master in self._masters.items():
            for key in ("master", *_MOMENTS):
                stored = tensors[f"{key}/{name}"]
                # Compared, because `copy_` would broadcast a smaller tensor without a word.
                if stored.shape != master.shape or stored.dtype != torch.float32:
                    raise ValueError(f"{key} of {name} is {stored.dtype} {tuple(stored.shape)}")

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

    def _build_optimizer(self) -> torch.optim.AdamW:
        """Build AdamW; weight decay acts on matrices only, as is usual for norms and biases."""
        spec = self._spec
        matrices = [master for master in self._masters.values() if master.dim() >= 2]
        vectors = [master for master in self._masters.values() if master.dim() < 2]
        parts: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": spec.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [part for part in parts if part["params"]],
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            fused=True,
        )

    def _grad(self, name: str) -> torch.Tensor:
        grad = self._masters[name].grad
        assert grad is not None
        return grad

    def _accumulate_apart(self, terms: Sequence[LossTerm], tally: _Tally) -> list[TermReport]:
        """Add the gradients of all terms to the buffers; report each where there are several."""
        if len(terms) <= 1:
            for term in terms:
                self._accumulate_term(term, tally)
            return []
        grads = [self._grad(name) for name in self._masters]
        # Holds the sum of the terms before while the buffers hold one term alone.
        aside = [torch.zeros_like(grad) for grad in grads]
        reports = []
        for term in terms:
            loss = self._accumulate_term(term, tally)
            norm, norm_aside = _norm(grads), _norm(aside)
            cosine = _dot(grads, aside) / (norm * norm_aside) if norm * norm_aside > 0.0 else None
            reports.append(TermReport(name=term.name, loss=loss, grad_norm=norm, cosine=cosine))
            torch._foreach_add_(aside, grads)
            torch._foreach_zero_(grads)
        torch._foreach_copy_(grads, aside)
        return reports

    def _accumulate_term(self, term: LossTerm, tally: _Tally) -> float:
        """Add one term's gradient to the buffers. Returns its loss."""
        loss = 0.0
        for micro_batch in split_by_budget(term.groups, self._max_positions):
            batch = PackedBatch.of_groups(micro_batch, self.model.device)
            result = self._accumulate(batch, term)
            loss += term.weight * result.loss
            tally.num_positions += batch.layout.num_positions
            tally.num_micro_batches += 1
            gap_M = (result.logprob_M - batch.engine_logprob_M).abs()
            # Selected by the engine's part alone: a trainer that is not finite must be seen.
            tally.drifts.append(gap_M[~batch.engine_logprob_M.isnan()].cpu().numpy())
        tally.loss += loss
        return loss

    def _accumulate(self, batch: PackedBatch, term: LossTerm) -> HeadResult:
        """Add one micro-batch's gradient to the buffers."""
        attention = PrefixSharedAttention(batch.layout, self.model.device)
        hidden = self.model.trunk(batch.token_ids_N, batch.position_ids_N, attention)
        scored = hidden.index_select(0, batch.scored_positions_U)

        def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
            loss, grad = term.token_terms(logprob, batch.engine_logprob_M[tokens], batch.advantage_M[tokens])
            weight = batch.weight_M[tokens]
            return TokenGradient(loss_M=weight * loss, grad_M=term.weight * weight * grad)

        result = loss_and_gradients(
            scored.detach(),
            self.model.head_weight,
            batch,
            temperature=term.temperature,
            rule=rule,
            grad_weight=self._grad(self._head_name()),
        )
        scored.backward(result.grad_hidden_U_D)  # type: ignore[no-untyped-call]
        return result

    def _head_name(self) -> str:
        head = self.model.head_weight
        return next(name for name, copy in self._copies.items() if copy is head)

    def _clip(self, loss: float) -> float:
        """Scale the summed gradient to at most `max_grad_norm`. Returns its norm before."""
        grads = [self._grad(name) for name in self._masters]
        norm = torch.nn.utils.get_total_norm(grads)
        if not (np.isfinite(loss) and bool(torch.isfinite(norm))):
            self._zero_gradients()
            raise LearnerError(
                explain_refusal(
                    f"step {self.version + 1} has loss {loss} and gradient norm {float(norm)}",
                    allowed="finite values; the weights and moments were not touched",
                    next_step="lower optimizer.lr or look at the step's rollouts",
                )
            )
        if self._spec.max_grad_norm is not None and float(norm) > self._spec.max_grad_norm:
            torch._foreach_mul_(grads, self._spec.max_grad_norm / (float(norm) + 1e-6))
        return float(norm)

    def _apply(self) -> tuple[float | None, float]:
        """Move masters, refresh compute copies, clear gradients. Returns the shares that changed."""
        self._set_lr()
        masters, copies = _sample(self._masters.values()), _sample(self._copies.values())
        has_gradient = _sample(map(self._grad, self._masters)) != 0.0
        self._optimizer.step()
        with torch.no_grad():
            for name, copy in self._copies.items():
                if self._masters[name] is not copy:
                    copy.copy_(self._masters[name])
        self._zero_gradients()
        self.version += 1
        is_moved = (_sample(self._masters.values()) != masters)[has_gradient]
        is_changed = _sample(self._copies.values()) != copies
        return float(is_moved.float().mean()) if len(is_moved) else None, float(is_changed.float().mean())

    def _set_lr(self) -> None:
        """Warm up linearly over the first steps, then stay."""
        share = min(1.0, (self.version + 1) / (self._spec.warmup_steps + 1))
        for part in self._optimizer.param_groups:
            part["lr"] = self._spec.lr * share

    def _zero_gradients(self) -> None:
        torch._foreach_zero_([self._grad(name) for name in self._masters])


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors))


def _dot(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the inner product of two gradients, tensor by tensor."""
    pairs = zip(tensors, others, strict=True)
    products = [torch.dot(one.reshape(-1), other.reshape(-1)) for one, other in pairs]
    return float(torch.stack(products).sum(dtype=torch.float64))


def _sample(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Copy every so many entries of all tensors into one row."""
    return torch.cat([tensor.detach().view(-1)[::_CHANGED_STRIDE] for tensor in tensors])
