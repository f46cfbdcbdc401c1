"""The learner: fp32 masters and moments, and one exact optimizer step at a time.

Forward and backward run on the compute copies (bf16, or the masters themselves in fp32). Gradients
of micro-batches are summed in fp32; token weights were fixed for the whole batch before it was
split, so nothing is divided here. A non-finite gradient never reaches the weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch

from strop.errors import ConfigError, LearnerError
from strop.policy.device_wires import DeviceSender
from strop.policy.distilling import DistillTerm, distill_and_gradients, read_teacher
from strop.policy.head import (
    EntropyBonus,
    HeadResult,
    TokenGradient,
    TokenRule,
    loss_and_gradients,
    token_logprobs,
)
from strop.policy.language_model import LanguageModel
from strop.policy.lora import name_for_peft, without_adapters, write_adapter
from strop.policy.objective import Scope, TokenTerms, TokenTermsFn, lr_at
from strop.policy.optimizer import (
    MOMENTS,
    Accumulator,
    AdamW,
    Masters,
    Ranks,
    StepPlan,
    StepReport,
    TermReport,
    add_up,
    run_on_first,
)
from strop.policy.packing import Load, PackedBatch, PackedGroup
from strop.policy.publication import digest_each, tensors_digest
from strop.policy.scoring import FrozenModel, default_positions, plan_on_ranks, score_on_ranks
from strop.policy.weights import (
    export_tensors,
    load_tensors,
    merged_tensors,
    publish_tensors,
    save_tensors,
    write_sharded_file,
)
from strop.rollout import FloatArray
from strop.spec.train import OptimizerSpec

TEACHER = "teacher"
"""The role that terms of distillation compare with."""
_CHANGED_STRIDE = 997
"""Every 997th parameter is sampled to measure which share a step has changed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossTerm:
    """One term of a step's loss, a weighted sum over its tokens. Picklable."""

    name: str
    groups: Sequence[PackedGroup]
    temperature: float
    token_terms: TokenTermsFn
    scope: Scope = Scope.TOKEN
    """How much of a batch `token_terms` must see at once."""
    weight: float = 1.0
    """Factor of the whole term."""
    entropy_weight: float = 0.0
    """Factor of the entropy bonus at every scored position, which is weighed like the position's tokens."""


Term = LossTerm | DistillTerm


class Learner:
    """Owns the masters and moments of a model and moves them."""

    def __init__(
        self,
        model: LanguageModel,
        spec: OptimizerSpec,
        *,
        micro_batch_positions: int | None = None,
        masters: Masters | None = None,
        ranks: Ranks | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Train all weights of `model`, or with `masters` and `ranks` this rank's share of them.

        `num_steps` are the optimizer steps of the whole run; a decaying learning rate needs them.
        """
        self.model = model
        self.version = 0
        """Batches that have moved the weights; names the weights that an engine serves."""
        self.frozen: dict[str, FrozenModel] = {}
        """By role, "reference" or "teacher", of the policy's vocabulary."""
        self.sees_run = True
        """Whether this process sees the disk of the run's process."""
        self.sender: DeviceSender | None = None
        """Sends the weights from device to device, once they were offered."""
        self.ranks = ranks or Ranks()
        self._spec = spec
        self.max_positions = micro_batch_positions or default_positions(model, num_ranks=self.ranks.num_ranks)
        """Positions of a micro-batch."""
        self._weights = masters or Masters(model)
        self._masters = self._weights.by_name
        self._optimizer = AdamW(self._masters, spec)
        self._num_steps = num_steps

    def step(
        self, groups: Sequence[PackedGroup], *, temperature: float, token_terms: TokenTermsFn
    ) -> StepReport:
        """Take one optimizer step over a complete batch of one term.

        Raises: like `step_terms`.
        """
        term = LossTerm(name="loss", groups=groups, temperature=temperature, token_terms=token_terms)
        return self.step_terms([term])

    def step_terms(self, terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
        """Take one optimizer step over the complete (mini-)batches of all terms.

        Every rank gets the same terms, and executes its micro-batches of the plan that all make of them.
        The gradients of several terms are measured separately and then added up, which takes one more buffer
        of the gradient's size. An empty batch is a step of zero gradient: moments decay and the version
        advances.

        Raises: LearnerError if the loss or gradient is not finite; weights and moments stay.
        """
        begun_at, plan = time.perf_counter(), plan or StepPlan()
        place = self._optimizer.num_steps if plan.place is None else plan.place
        own = Accumulator()
        reports = self._accumulate_apart(terms, own)
        accumulator = add_up(self.ranks.gather(own))
        grad_norm = self._clip(accumulator.loss)
        if len(terms) == 1:
            reports = [
                TermReport(name=terms[0].name, loss=accumulator.loss, grad_norm=grad_norm, cosine=None)
            ]
        lr = lr_at(self._spec, place, self._num_steps)
        changed_frac, master_changed_frac, update_ratio = self._apply(lr)
        self.version = self.version + 1 if plan.version is None else plan.version
        self._zero_gradients()
        return StepReport(
            loss=accumulator.loss,
            grad_norm=grad_norm,
            lr=lr,
            changed_frac=changed_frac,
            master_changed_frac=master_changed_frac,
            update_ratio=update_ratio,
            drift=accumulator.drift,
            num_positions=accumulator.num_positions,
            num_micro_batches=accumulator.num_micro_batches,
            terms=tuple(reports),
            sums=accumulator.sums,
            totals=accumulator.totals,
            log_ratio=accumulator.log_ratio,
            compute_s=max(self.ranks.gather(time.perf_counter() - begun_at)),
        )

    def gradients(
        self, groups: Sequence[PackedGroup], *, temperature: float, token_terms: TokenTermsFn
    ) -> dict[str, torch.Tensor]:
        """Return the gradient of a batch by parameter name, and change nothing."""
        term = LossTerm(name="loss", groups=groups, temperature=temperature, token_terms=token_terms)
        return self.term_gradients(term)

    def term_gradients(self, term: Term) -> dict[str, torch.Tensor]:
        """Return the gradient of one term by parameter name, and change nothing."""
        self._accumulate_term(term, Accumulator())
        copies = {name: self._weights.whole(name, self._grad(name)).clone() for name in self._masters}
        self._zero_gradients()
        return copies

    def score(
        self, groups: Sequence[PackedGroup], temperature: float, role: str | None = None
    ) -> list[FloatArray]:
        """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups.

        Under the weights of the policy, or of a role's frozen model. Of several ranks each scores a part, and
        the first one returns all.
        """
        if role is not None:
            return self.frozen[role].score(groups, temperature)
        scores = score_on_ranks(self.model, groups, temperature, self.max_positions, self.ranks)
        self._weights.release()
        return scores

    def digest_tensors(self, role: str | None = None) -> dict[str, str]:
        """Return type, shape and SHA-256 of each tensor by name, without adapters; on the first rank only.

        Of the policy's compute copies, or of a role's frozen model.
        """
        if role is not None:
            return self.frozen[role].digest_tensors()
        return digest_each(without_adapters(self.compute_copies()), is_kept=self.ranks.index == 0)

    def write_weights(self, path: Path) -> str:
        """Write the compute copies to one safetensors file for engines, adapters merged. Returns the digest.

        Raises: StoreError, on every rank, if the file cannot be written.
        """
        model = self.model
        if self.ranks.num_ranks > 1 and model.adapters is None:
            digest = write_sharded_file(list(self._weights.compute_shards()), path, self.ranks)
            if digest is not None:
                return digest
        copies = self._collect_copies()
        return run_on_first(self.ranks, lambda: publish_tensors(merged_tensors(model, copies), path))

    def weights_digest(self) -> str:
        """Return the digest of the compute copies, adapters merged, the same as from `write_weights`."""
        copies = self._collect_copies()
        return run_on_first(self.ranks, lambda: tensors_digest(merged_tensors(self.model, copies).items()))

    def compute_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every compute copy, whole, on this rank's device; every rank must take them all."""
        return self._weights.compute_copies()

    def write_adapter(self, target: Path) -> str:
        """Write the adapters in peft's form into a directory. Returns the digest of its tensors.

        Raises: StoreError, on every rank, if a file cannot be written.
        """
        spec, adapters = self.model.adapters, name_for_peft(self._collect_copies())
        assert spec is not None, "only a model with adapters has any to write"
        run_on_first(self.ranks, lambda: write_adapter(adapters, spec, target))
        return run_on_first(self.ranks, lambda: tensors_digest(adapters.items()))

    def export(self, target: Path, tokenizer_dir: Path) -> str:
        """Write a Hugging Face model directory, adapters merged and, in `adapter/`, in peft's form.

        Returns the digest of its tensors, that of `weights_digest`.
        Raises: StoreError, on every rank, if it is not the live policy.
        """
        copies, model = self._collect_copies(), self.model
        digest = run_on_first(
            self.ranks,
            lambda: export_tensors(model.module, merged_tensors(model, copies), tokenizer_dir, target),
        )
        if model.adapters is not None:
            self.write_adapter(target / "adapter")
        return digest

    def _collect_copies(self) -> dict[str, torch.Tensor]:
        """Return all compute copies, on the first rank only."""
        is_first = self.ranks.index == 0
        # One tensor at a time: no rank but the first ever holds more than one whole tensor.
        return {name: tensor.detach().cpu() for name, tensor in self.compute_copies() if is_first}

    def save_state(self, target: Path) -> None:
        """Write masters, moments and counters into an existing directory. Raises: StoreError."""
        tensors: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            parts = {"master": master.detach(), **self._optimizer.moments[name]}
            for key, part in parts.items():
                tensors[f"{key}/{name}"] = self._weights.as_stored(name, part)
        save_tensors(self.ranks, tensors, target)
        if self.ranks.index == 0:
            counters = {"version": self.version, "num_steps": self._optimizer.num_steps}
            (target / "learner.json").write_text(json.dumps(counters))

    def load_state(self, source: Path) -> None:
        """Restore the files of `save_state`, on any number of ranks: all of them or nothing.

        Raises: CorruptRecord if a part is missing or does not fit the model.
        """
        parts: dict[str, torch.Tensor] = {}
        wanted: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            for key in ("master", *MOMENTS):
                parts[f"{key}/{name}"] = torch.empty_like(master)
                wanted[f"{key}/{name}"] = self._weights.as_stored(name, parts[f"{key}/{name}"])
        counters = load_tensors(self.ranks, wanted, source)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(parts[f"master/{name}"])
                self._optimizer.moments[name] = {key: parts[f"{key}/{name}"] for key in MOMENTS}
        self._weights.refresh()
        self.version, self._optimizer.num_steps = counters["version"], counters["num_steps"]

    def _grad(self, name: str) -> torch.Tensor:
        grad = self._masters[name].grad
        assert grad is not None
        return grad

    def _accumulate_apart(self, terms: Sequence[Term], accumulator: Accumulator) -> list[TermReport]:
        """Add the gradients of all terms to the buffers; report each where there are several."""
        if len(terms) <= 1:
            for term in terms:
                self._accumulate_term(term, accumulator)
            return []
        grads = [self._grad(name) for name in self._masters]
        # The sum of the earlier terms, while the buffers hold one term alone.
        aside = [torch.zeros_like(grad) for grad in grads]
        reports = []
        for term in terms:
            loss = sum(self.ranks.gather(self._accumulate_term(term, accumulator)))
            norm, norm_aside = self._norm(grads), self._norm(aside)
            pairs = zip(grads, aside, strict=True)
            products = [torch.dot(grad.reshape(-1), earlier.reshape(-1)) for grad, earlier in pairs]
            dot = sum(self.ranks.gather(float(torch.stack(products).sum(dtype=torch.float64))))
            cosine = dot / (norm * norm_aside) if norm * norm_aside > 0.0 else None
            reports.append(TermReport(name=term.name, loss=loss, grad_norm=norm, cosine=cosine))
            torch._foreach_add_(aside, grads)
            torch._foreach_zero_(grads)
        torch._foreach_copy_(grads, aside)
        return reports

    def _accumulate_term(self, term: Term, accumulator: Accumulator) -> float:
        """Add one term's gradient, of all ranks, to the buffers. Returns this rank's share of its loss."""
        # Read after all micro-batches are launched: a GPU would idle between them otherwise.
        losses: list[torch.Tensor] = []
        gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        keeps = isinstance(term, LossTerm) and term.scope is Scope.GROUP
        nothing = Load(is_alone=self.model.is_alone)
        plan = plan_on_ranks(self.model, term.groups, self.max_positions, self.ranks, keeps_groups=keeps)
        for micro_batch in plan[self.ranks.index]:
            batch = PackedBatch.of_groups(micro_batch, self.model.device)
            result = self._accumulate(batch, micro_batch, term, accumulator)
            losses.append(result.loss)
            accumulator.num_positions += reduce(Load.plus, micro_batch, nothing).num_positions
            accumulator.num_micro_batches += 1
            gap_M = (result.logprob_M - batch.engine_logprob_M).abs()
            # Selected by the engine's value alone: a trainer's NaN must show.
            gaps.append((gap_M, ~batch.engine_logprob_M.isnan()))
        self._weights.collect_gradients()
        for frozen in self.frozen.values():
            frozen.release()
        accumulator.unread_drifts += [gap_M[is_sampled] for gap_M, is_sampled in gaps]
        accumulator.read_terms()
        loss = sum(term.weight * float(value) for value in losses)
        accumulator.loss += loss
        return loss

    def _accumulate(
        self, batch: PackedBatch, groups: Sequence[PackedGroup], term: Term, accumulator: Accumulator
    ) -> HeadResult:
        """Add one micro-batch's gradient to the buffers."""
        # Before the policy's forward, so that only the teacher's hidden states are held beside it.
        teacher = None
        if isinstance(term, DistillTerm):
            model = self.model
            if not term.is_own_teacher:
                if TEACHER not in self.frozen:
                    raise ConfigError(
                        f"the term {term.name} compares with a teacher, and the learner has none",
                        allowed="a teacher loaded beside the learner",
                        next_step="set teacher.source, or choose a placement whose learner holds a teacher",
                    )
                model = self.frozen[TEACHER].model
            teacher = read_teacher(model, groups)
        scored = self.model.read(batch)
        head, into = self.model.head, self._weights.head_gradients()
        if isinstance(term, DistillTerm):
            assert teacher is not None
            result = distill_and_gradients(scored.detach(), head, batch, term, teacher, into=into)
        else:
            eta = term.entropy_weight
            result = loss_and_gradients(
                scored.detach(),
                head,
                batch,
                temperature=term.temperature,
                rule=self._build_rule(scored.detach(), batch, term, accumulator),
                into=into,
                bonus=EntropyBonus(factor=eta, term_weight=term.weight) if eta else None,
            )
            if result.entropy_M is not None:
                accumulator.add_values("policy_entropy_nats", result.entropy_M)
        scored.backward(result.grad_hidden_U_D)  # type: ignore[no-untyped-call]
        return result

    def _build_rule(
        self, scored: torch.Tensor, batch: PackedBatch, term: LossTerm, accumulator: Accumulator
    ) -> TokenRule:
        """Return the rule for the gradient of the head, the weights of tokens and term included."""
        all_terms: TokenTerms | None = None
        # An empty micro-batch, which only the other ranks need, has no tokens.
        if term.scope is not Scope.TOKEN and len(batch.target_M):
            logprob_M = token_logprobs(scored, self.model.head, batch, term.temperature)
            all_terms = term.token_terms(batch.scored_tokens(logprob_M))
            accumulator.add_terms(all_terms, batch.weight_M)
        all_tokens = batch.scored_tokens(batch.engine_logprob_M)

        def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
            weight = batch.weight_M[tokens]
            if all_terms is None:
                terms = term.token_terms(replace(all_tokens.part(tokens), logprob_M=logprob))
                accumulator.add_terms(terms, weight)
                loss, grad = terms.loss_N, terms.grad_N
            else:
                loss, grad = all_terms.loss_N[tokens], all_terms.grad_N[tokens]
            return TokenGradient(loss_M=weight * loss, grad_M=term.weight * weight * grad)

        return rule

    def _clip(self, loss: float) -> float:
        """Scale the summed gradient to at most `max_grad_norm`. Returns its norm before."""
        grads = [self._grad(name) for name in self._masters]
        norm = self._norm(grads)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._zero_gradients()
            raise LearnerError(
                f"optimizer step {self._optimizer.num_steps + 1} has loss {loss} and gradient norm {norm}",
                allowed="finite values; the weights and moments were not touched",
                next_step="lower optimizer.lr or look at the step's rollouts",
            )
        if self._spec.max_grad_norm is not None and norm > self._spec.max_grad_norm:
            torch._foreach_mul_(grads, self._spec.max_grad_norm / (norm + 1e-6))
        return norm

    def _norm(self, parts: Sequence[torch.Tensor]) -> float:
        """Return the L2 norm over the parts of all ranks."""
        return math.hypot(*self.ranks.gather(float(torch.nn.utils.get_total_norm(parts))))

    def _apply(self, lr: float) -> tuple[float, float | None, float]:
        """Move masters and refresh compute copies. Returns how far they moved, as in `StepReport`."""
        before = _sample(self._masters.values())
        has_gradient = _sample(map(self._grad, self._masters)) != 0.0
        moved = self._optimizer.step(lr)
        self._weights.refresh()
        after = _sample(self._masters.values())
        is_moved = (after != before)[has_gradient]
        # Compute copies are the rounded masters.
        is_changed = after.to(self.model.dtype) != before.to(self.model.dtype)
        counts = [int(is_moved.sum()), len(is_moved), int(is_changed.sum()), len(is_changed)]
        sums = map(sum, zip(*self.ranks.gather((*counts, *moved)), strict=True))
        num_moved, num_movable, num_changed, num, change, weights = sums
        master_changed_frac = num_moved / num_movable if num_movable else None
        return num_changed / num, master_changed_frac, math.sqrt(change / weights) if weights else 0.0

    def _zero_gradients(self) -> None:
        torch._foreach_zero_([self._grad(name) for name in self._masters])


def _sample(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Copy every `_CHANGED_STRIDE`-th entry of all tensors into one row."""
    return torch.cat([tensor.detach().view(-1)[::_CHANGED_STRIDE] for tensor in tensors])
