"""One training step: the terms of its loss, and the optimizer steps of its batch.

`StepTerms` is the one place that knows every kind of term. The loop hands over what a step sampled and its
offline rows; further log-probabilities (of the weights that ratios start from, a reference or a teacher) are
computed here, once for all optimizer steps of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop.algorithm import Algorithm, build_algorithm
from strop.cluster import LearnerRole, Roles
from strop.errors import LearnerError
from strop.policy.learner import Term
from strop.policy.packing import PackedGroup, with_logprobs
from strop.policy.step_report import StepPlan, StepReport
from strop.rollout import Group
from strop.spec.run import RunSpec
from strop.spec.train import TrainSpec
from strop.tasks import Task, limits_of
from strop.tasks.prompt import resolve_prompt_format
from strop.train.batch import TrainBatch, build_batch, cut_batch, penalize_rewards
from strop.train.data.demonstrations import Demonstration, Demonstrations
from strop.train.data.preferences import REFERENCE_NAME, Preferences, with_reference
from strop.train.data.schedule import ExampleSchedule, schedule_demonstrations
from strop.train.terms import (
    TeacherPrompts,
    distill_term,
    dpo_term,
    pack_demonstrations,
    pack_for_teacher,
    policy_term,
    rl_term,
    sampled_distillation,
    sft_term,
    takes_own_replies,
)


@dataclass(kw_only=True)
class StepTerms:
    """Builds the terms of every step of a run."""

    spec: RunSpec
    roles: Roles
    task: Task
    demonstrations: Demonstrations | None = None
    """None: no SFT data."""
    preferences: Preferences | None = None
    """None: no preference pairs."""

    def __post_init__(self) -> None:
        self.algorithm = choose_algorithm(self.spec)
        self._demonstrations = schedule_demonstrations(self.spec, self.demonstrations)
        self._prompts = self._build_prompts()
        self._pairs: ExampleSchedule[PackedGroup] | None = None

    def digest_offline_data(self) -> dict[str, str]:
        """Return the digests of the run's offline data. See `strop.record.parts`."""
        offline = {"demonstrations": self.demonstrations, "preferences": self.preferences}
        return {name: data.digest for name, data in offline.items() if data is not None}

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
        """Note that the weights were published: the engine samples with them from now on."""
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

    def list_demonstrations(self, step: int) -> list[Demonstration]:
        """Return the demonstrations of the step that follows `step` completed ones."""
        if self._demonstrations is None or (self.spec.train.terms == "distill" and self.samples(step)):
            return []
        return self._demonstrations.examples(step)

    def credit(self, groups: Sequence[Group]) -> TrainBatch:
        """Assign credit over what a step sampled."""
        limit_P = [limits_of(self.task, group.example).max_reply_tokens for group in groups]
        return build_batch(self.algorithm, groups, self.task.limits.max_reply_tokens, limit_P)

    async def build(
        self,
        step: int,
        batch: TrainBatch,
        groups: Sequence[Group],
        demonstrations: Sequence[Demonstration],
    ) -> list[list[Term]]:
        """Return the terms of every optimizer step, those that have something to count; none without any."""
        spec, temperature = self.spec, self.spec.sampling.temperature
        if self._pairs is not None:
            return [[dpo_term(spec.dpo, self._pairs.examples(step), temperature)]]
        if spec.train.terms == "distill":
            terms = await self._distill(step, groups, demonstrations)
            return [terms] if terms else []
        sft: list[Term] = [sft_term(demonstrations, spec.sft.weight)] if demonstrations else []
        if not batch.credit.num_counted_tokens:
            return [sft] if sft else []
        scored = replace(batch, groups=await self._attach_logprobs(batch.groups))
        parts = cut_batch(self.algorithm, scored, spec.train, seed=spec.seed, step=step)
        return [[rl_term(self.algorithm, part, temperature), *sft] for part in parts]

    async def _distill(
        self, step: int, groups: Sequence[Group], demonstrations: Sequence[Demonstration]
    ) -> list[Term]:
        teacher, temperature = self.spec.teacher, self.spec.sampling.temperature
        if not self.samples(step):
            if not demonstrations:
                return []
            return [distill_term(teacher, pack_demonstrations(demonstrations), temperature)]
        replies = pack_for_teacher(teacher, groups, self._prompts, self.roles.learner.shape.max_positions)
        if not replies:
            return []
        if teacher.form == "exact":
            return [distill_term(teacher, replies, temperature)]
        scored = await self._attach_logprobs(replies)
        return [policy_term(self.algorithm, scored, temperature, name="distill")]

    async def _attach_logprobs(self, groups: Sequence[PackedGroup]) -> tuple[PackedGroup, ...]:
        """Attach the log-probabilities that the algorithm asks for, each computed once."""
        algorithm, temperature = self.algorithm, self.spec.sampling.temperature
        groups = tuple(groups)
        if algorithm.mode == "decoupled" or algorithm.reward_kl_beta:
            scores = await self.roles.learner.score(groups, temperature, is_held=self._asks_held)
            groups = with_logprobs(groups, "old", scores)
        if algorithm.needs_reference:
            assert self.roles.reference is not None
            scores = await self.roles.reference.score(groups, temperature)
            groups = with_logprobs(groups, "reference", scores)
        if algorithm.reward_kl_beta:
            groups = penalize_rewards(algorithm, groups)
        if algorithm.teacher_weight != 0.0:
            teacher = self.roles.teacher or self.roles.learner
            # With the prompt that the teacher reads, where that is another one.
            read = [
                group
                if group.teacher_prompt_ids is None
                else replace(group, prompt_ids=group.teacher_prompt_ids)
                for group in groups
            ]
            scores = await teacher.score(read, temperature)
            groups = with_logprobs(groups, "teacher", scores)
        return groups

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update:
    """What became of the optimizer steps of a batch."""

    steps: tuple[StepReport, ...] = ()
    """Those whose gradient was computed and finite, in order; the last one may not have been taken."""
    num_refused: int = 0
    """Steps whose loss or gradient was not finite."""
    num_left_out: int = 0
    """Steps that the bound on the divergence left out."""

    @property
    def num_taken(self) -> int:
        """Steps that have moved the weights."""
        return sum(step.is_taken for step in self.steps)


async def take_steps(
    learner: LearnerRole,
    steps: Sequence[Sequence[Term]],
    train: TrainSpec,
    step: int,
    on_refused: Callable[[LearnerError], None],
) -> Update:
    """Take the optimizer steps of the batch that follows `step` completed ones, for one version together.

    One that is not finite is refused and reported, and the others go on. Where the policy is farther than
    `train.max_kl` from where its ratios start, the rest of the batch is left out.
    """
    version, first = learner.version + 1, step * train.steps_per_batch
    reports: list[StepReport] = []
    num_refused = num_left_out = 0
    for index, terms in enumerate(steps):
        plan = StepPlan(version=version, place=first + index, max_kl=train.max_kl)
        try:
            reports.append(await learner.step_terms(terms, plan))
        except LearnerError as error:
            num_refused += 1
            on_refused(error)
            continue
        if not reports[-1].is_taken:
            num_left_out = len(steps) - index
            break
    return Update(steps=tuple(reports), num_refused=num_refused, num_left_out=num_left_out)
