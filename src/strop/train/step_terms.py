"""Which terms the loss of each optimizer step has: the one place that knows every kind.

The loop hands over what a step sampled and what it imitates; what else a term needs (log-probabilities of
the weights that ratios start from, of a reference or a teacher) is asked for here, once for all optimizer
steps that the batch takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop.algorithm import Algorithm, build_algorithm
from strop.cluster import Roles
from strop.policy.learner import Term
from strop.policy.packing import PackedGroup, with_logprobs
from strop.rollout import Group
from strop.spec.run import RunSpec
from strop.tasks import Task, limits_of
from strop.tasks.prompt import resolve_prompt_format
from strop.train.batch import TrainBatch, build_batch, cut_batch, penalize_rewards
from strop.train.demonstrations import Demonstration, Demonstrations
from strop.train.distillation import (
    TeacherPrompts,
    distill_term,
    pack_taught,
    sampled_distillation,
    takes_own_replies,
)
from strop.train.preferences import REFERENCE_NAME, Preferences, with_reference
from strop.train.schedule import ExampleSchedule
from strop.train.terms import dpo_term, pack_demonstrations, policy_term, rl_term, sft_term


@dataclass(kw_only=True)
class StepTerms:
    """Builds the terms of every step of a run."""

    spec: RunSpec
    roles: Roles
    task: Task
    preferences: Preferences | None = None
    """None: nothing is preferred."""

    def __post_init__(self) -> None:
        self.algorithm = choose_algorithm(self.spec)
        self._prompts = self._build_prompts()
        self._pairs: ExampleSchedule[PackedGroup] | None = None

    def parts_of(self, demonstrations: Demonstrations | None) -> dict[str, str]:
        """Return the digests of what a run learns from beside its rollouts. See `strop.record.parts`."""
        given = {"demonstrations": demonstrations, "preferences": self.preferences}
        return {name: data.digest for name, data in given.items() if data is not None}

    async def prepare(self, run_path: Path) -> None:
        """Compute what is computed once per run, before its first step; read it where that was before.

        Raises: CorruptRecord if what was computed is gone, and cannot be computed again.
        """
        if self.preferences is None:
            return
        # Without a model of its own the reference is the weights that the run starts from.
        untrained = self.roles.learner if self.roles.learner.version == 0 else None
        scorer = self.roles.reference or untrained
        temperature = self.spec.sampling.temperature
        self.preferences = await with_reference(
            self.preferences, scorer, run_path / REFERENCE_NAME, temperature
        )
        self._pairs = ExampleSchedule(
            self.preferences.members, seed=self.spec.seed, prompts_per_step=self.spec.dpo.pairs_per_step
        )

    async def begin_window(self) -> None:
        """Take note that the engine was given the weights: what it samples from now on comes from them."""
        if self._asks_held:
            await self.roles.learner.hold()

    @property
    def _asks_held(self) -> bool:
        """Whether ratios start from weights that a later step of the run has left behind."""
        return self.algorithm.mode == "decoupled" and self.spec.train.sync_every > 1

    def samples(self, step: int) -> bool:
        """Whether the step that follows `step` completed ones has rollouts."""
        if self.spec.train.terms != "distill":
            return self.spec.train.has_rl
        return takes_own_replies(self.spec.teacher, self.spec.seed, step)

    def imitates(self, step: int) -> bool:
        """Whether the step that follows `step` completed ones is shown demonstrations."""
        return self.spec.train.terms != "distill" or not self.samples(step)

    def credit(self, groups: Sequence[Group]) -> TrainBatch:
        """Assign credit over what a step sampled."""
        limit_P = [limits_of(self.task, group.example).max_reply_tokens for group in groups]
        return build_batch(self.algorithm, groups, self.task.limits.max_reply_tokens, limit_P)

    async def build(
        self,
        step: int,
        batch: TrainBatch,
        groups: Sequence[Group],
        imitated: Sequence[Demonstration],
    ) -> list[list[Term]]:
        """Return the terms of every optimizer step, those that have something to count; none without any."""
        spec, temperature = self.spec, self.spec.sampling.temperature
        if self._pairs is not None:
            return [[dpo_term(spec.dpo, self._pairs.examples(step), temperature)]]
        if spec.train.terms == "distill":
            terms = await self._distill(step, groups, imitated)
            return [terms] if terms else []
        also: list[Term] = [sft_term(imitated, spec.sft.weight)] if imitated else []
        if not batch.credit.num_counted_tokens:
            return [also] if also else []
        sided = replace(batch, groups=await self._with_sides(batch.groups))
        parts = cut_batch(self.algorithm, sided, spec.train, seed=spec.seed, step=step)
        return [[rl_term(self.algorithm, part, temperature), *also] for part in parts]

    async def _distill(
        self, step: int, groups: Sequence[Group], imitated: Sequence[Demonstration]
    ) -> list[Term]:
        teacher, temperature = self.spec.teacher, self.spec.sampling.temperature
        if not self.samples(step):
            return [distill_term(teacher, pack_demonstrations(imitated), temperature)] if imitated else []
        taught = pack_taught(teacher, groups, self._prompts, self.roles.learner.shape.max_positions)
        if not taught:
            return []
        if teacher.form == "exact":
            return [distill_term(teacher, taught, temperature)]
        sided = await self._with_sides(taught)
        return [policy_term(self.algorithm, sided, temperature, name="distill")]

    async def _with_sides(self, groups: Sequence[PackedGroup]) -> tuple[PackedGroup, ...]:
        """Attach the log-probabilities that the algorithm asks for, each computed once."""
        temperature, sided = self.spec.sampling.temperature, tuple(groups)
        algorithm = self.algorithm
        if algorithm.mode == "decoupled" or algorithm.reward_kl_beta:
            scores = await self.roles.learner.score(sided, temperature, is_held=self._asks_held)
            sided = with_logprobs(sided, "proximal", scores)
        if algorithm.needs_reference:
            assert self.roles.reference is not None
            scores = await self.roles.reference.score(sided, temperature)
            sided = with_logprobs(sided, "reference", scores)
        if algorithm.reward_kl_beta:
            sided = penalize_rewards(algorithm, sided)
        if algorithm.teacher_weight != 0.0:
            teacher = self.roles.teacher or self.roles.learner
            scores = await teacher.score([_as_taught(group) for group in sided], temperature)
            sided = with_logprobs(sided, "teacher", scores)
        return sided

    def _build_prompts(self) -> TeacherPrompts | None:
        context, tokenizer = self.spec.teacher.context, self.roles.tokenizer
        if context is None or not self.spec.has_teacher:
            return None
        return TeacherPrompts(
            context=context,
            task=self.task,
            tokenizer=tokenizer,
            prompt_format=resolve_prompt_format(tokenizer, self.spec.model.prompt_format),
        )


def choose_algorithm(spec: RunSpec) -> Algorithm:
    """Return what turns a run's rewards, and its teacher's sampled judgements, into gradients."""
    if spec.train.terms == "distill":
        return sampled_distillation(spec.teacher, spec.algorithm)
    built = build_algorithm(spec.algorithm, spec.reference, spec.train)
    return (
        replace(built, teacher_weight=spec.teacher.weight, zero_variance="keep")
        if spec.has_teacher
        else built
    )


def _as_taught(group: PackedGroup) -> PackedGroup:
    """Return the group as its teacher reads it."""
    return group if group.teacher_prompt_ids is None else replace(group, prompt_ids=group.teacher_prompt_ids)
