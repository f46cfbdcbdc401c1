"""One training step: the terms of its loss, and the optimizer steps of its batch.

Terms are a policy gradient, demonstrations, preference pairs and distillation. All go through the same
packed forward, head and optimizer step; each is normalised over its own complete batch, and only then
multiplied by its weight. `StepTerms` is the one place that knows every kind of term. The loop hands over a
step's rollouts and offline rows; further log-probabilities (of the weights that ratios start from, a
reference or a teacher) are computed here, once for all optimizer steps of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from strop.algorithm import Aggregation, Algorithm, build_algorithm
from strop.algorithm.advantages import Float64Array
from strop.algorithm.corrections import CORRECTIONS
from strop.algorithm.losses import IS_PG
from strop.algorithm.offline import (
    Divergence,
    Preference,
    cross_entropy_terms,
    weigh_demonstrations,
)
from strop.cluster import LearnerRole, Roles
from strop.errors import ConfigError, LearnerError
from strop.policy.distilling import DistillTerm
from strop.policy.learner import Learner, LossTerm, Term
from strop.policy.objective import Scope, ScoredTokens, TokenTerms
from strop.policy.optimizer import StepPlan, StepReport
from strop.policy.packing import PackedGroup, PackedReply, with_logprobs
from strop.rollout import Example, Group, IntArray, Message
from strop.spec.algorithm import AlgorithmSpec
from strop.spec.model import TeacherSpec
from strop.spec.offline import DpoSpec
from strop.spec.run import RunSpec
from strop.spec.template import fill, list_names
from strop.spec.train import TrainSpec
from strop.tasks import Task
from strop.tasks.prompt import PromptFormat, render_prompt, resolve_prompt_format
from strop.tokenizer import Tokenizer
from strop.train.batch import (
    ExampleSchedule,
    TrainBatch,
    TurnAdvantages,
    build_batch,
    cut_batch,
    list_advantages,
    pack_reply,
    penalize_rewards,
    schedule_demonstrations,
    share_prompts,
)
from strop.train.data.offline import Demonstration, Demonstrations
from strop.train.data.preferences import REFERENCE_NAME, Preferences, with_reference

_STREAM = 7
"""Names the random stream of GKD's choices among those of the run's seed."""


def takes_own_replies(spec: TeacherSpec, seed: int, step: int) -> bool:
    """Whether the step that follows `step` completed ones is on the policy's own replies.

    Drawn from seed and step alone, so a resumed run draws the same. Source: arXiv:2306.13649, algorithm 1.
    """
    if spec.student_frac in (0.0, 1.0):
        return spec.student_frac == 1.0
    draw = np.random.Generator(np.random.Philox(key=[seed, _STREAM])).random(step + 1)[step]
    return bool(draw < spec.student_frac)


def distill_term(spec: TeacherSpec, groups: Sequence[PackedGroup], temperature: float) -> DistillTerm:
    """Return the term that compares the distributions of teacher and policy at every reply token."""
    return DistillTerm(
        name="distill",
        groups=groups,
        temperature=temperature,
        divergence=Divergence(name=spec.divergence),
        weight=spec.weight,
        is_own_teacher=spec.source == "current",
    )


def sampled_distillation(spec: TeacherSpec, chosen: AlgorithmSpec) -> Algorithm:
    """Return the algorithm whose advantage is log p(teacher) - log p(policy) alone, without rewards.

    It takes the correction of `chosen`: replies may come from earlier weights here too.
    """
    correction = CORRECTIONS[chosen.correction]
    return Algorithm(
        name="opd",
        advantage=ignore_rewards,
        loss=IS_PG,
        aggregation=Aggregation.TOKEN_MEAN,
        clip_low=0.2,
        clip_high=0.2,
        zero_variance="keep",
        correction=correction,
        correction_cap=correction.cap if chosen.correction_cap is None else chosen.correction_cap,
        max_sequence_tokens=chosen.max_sequence_tokens,
        teacher_weight=spec.weight,
    )


def ignore_rewards(rewards_G: Float64Array) -> Float64Array:
    """Return an advantage of 0 for every rollout. Shapes: G in and out."""
    return np.zeros(len(rewards_G), dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPrompts:
    """Renders the prompts of a teacher that reads more than the policy (`teacher.context`)."""

    context: str
    task: Task
    tokenizer: Tokenizer
    prompt_format: PromptFormat

    def ids(self, example: Example) -> IntArray:
        """Return the ids of the example's prompt with the context behind its last message.

        Raises: ConfigError if the context names what the example does not have.
        """
        *before, last = self.task.render(example)
        known = {**example.fields, **({} if example.answer is None else {"answer": example.answer})}
        missing = sorted(set(list_names(self.context)) - known.keys())
        if missing:
            raise ConfigError(
                f"teacher.context names {{{missing[0]}}}, and an example of {self.task.name} has"
                f" {', '.join(sorted(known)) or 'no fields'}",
                allowed="{answer}, where the task has one, and the names of an example's fields",
                next_step="correct teacher.context",
            )
        content = f"{last.text}\n\n{fill(self.context, known)}"
        messages = (*before, Message(role=last.role, content=content))
        return render_prompt(self.tokenizer, messages, self.prompt_format)[1]


def pack_for_teacher(
    spec: TeacherSpec, groups: Sequence[Group], prompts: TeacherPrompts | None, max_positions: int
) -> list[PackedGroup]:
    """Pack the replies that the teacher scores, every token with the same weight; rewards are ignored.

    A reply that does not fit behind the teacher's longer prompt is left out.
    """
    packed: list[PackedGroup] = []
    for group in groups:
        teacher_ids = None if prompts is None else prompts.ids(group.example)
        replies = [
            (turns[0].token_ids, pack_reply(turns, 0.0, 1.0))
            for rollout in group.rollouts
            if spec.rows == "all" or rollout.outcome.is_correct is not True
            for turns in rollout.samples
            if any(turn.is_sampled and len(turn.token_ids) for turn in turns)
        ]
        if teacher_ids is not None:
            room = max_positions - len(teacher_ids)
            replies = [(ids, reply) for ids, reply in replies if len(reply.token_ids) <= room]
        packed += [replace(shared, teacher_prompt_ids=teacher_ids) for shared in share_prompts(replies)]
    num_tokens = sum(int(reply.is_scored.sum()) for group in packed for reply in group.replies)
    return _weigh_replies(packed, 1.0 / max(num_tokens, 1))


def _weigh_replies(groups: Sequence[PackedGroup], weight: float) -> list[PackedGroup]:
    return [
        replace(group, replies=tuple(replace(reply, weight=weight) for reply in group.replies))
        for group in groups
    ]


SFT_TEMPERATURE = 1.0
"""Demonstrations were not sampled by this run: their logits are not scaled."""


def rl_term(
    algorithm: Algorithm, groups: Sequence[PackedGroup], temperature: float, *, name: str = "rl"
) -> LossTerm:
    """Return the policy-gradient term of credited groups.

    Raises: ConfigError if a reply is longer than a correction by whole replies accepts.
    """
    limit = algorithm.max_sequence_tokens
    if algorithm.correction.level == "sum" and limit is not None:
        longest = max((int(reply.is_scored.sum()) for group in groups for reply in group.replies), default=0)
        if longest > limit:
            raise ConfigError(
                f"a reply of {longest} tokens under algorithm.correction={algorithm.correction.name},"
                " whose ratio is a product over all of them",
                allowed=f"replies of at most algorithm.max_sequence_tokens={limit}",
                next_step="choose a correction by token, or raise that limit knowingly",
            )
    return LossTerm(
        name=name,
        groups=groups,
        temperature=temperature,
        token_terms=algorithm,
        scope=algorithm.scope,
        entropy_weight=algorithm.entropy_weight,
    )


def cross_entropy(tokens: ScoredTokens, /) -> TokenTerms:
    """Return the cross-entropy of demonstrated tokens."""
    loss, grad = cross_entropy_terms(tokens.logprob_M)
    return TokenTerms(loss_N=loss, grad_N=grad)


def sft_term(members: Sequence[Demonstration], weight: float) -> LossTerm:
    """Return the mean cross-entropy of demonstrations, `weight` times."""
    return LossTerm(
        name="sft",
        groups=pack_demonstrations(members),
        temperature=SFT_TEMPERATURE,
        token_terms=cross_entropy,
        weight=weight,
    )


def dpo_term(spec: DpoSpec, pairs: Sequence[PackedGroup], temperature: float) -> LossTerm:
    """Return the mean loss of preference pairs; both replies of a pair go into one micro-batch."""
    return LossTerm(
        name="dpo",
        groups=_weigh_replies(pairs, 1.0 / max(len(pairs), 1)),
        temperature=temperature,
        token_terms=Preference(name=spec.loss, beta=spec.beta),
        scope=Scope.GROUP,
    )


def pack_demonstrations(members: Sequence[Demonstration]) -> list[PackedGroup]:
    """Pack the demonstrations of one step; those that share a prompt hold it once."""
    weights = weigh_demonstrations(
        [member.weight for member in members], [int(member.is_trained.sum()) for member in members]
    )
    replies = [
        PackedReply(
            token_ids=member.reply_ids,
            is_scored=member.is_trained,
            engine_logprobs=np.full(int(member.is_trained.sum()), np.nan, dtype=np.float32),
            advantage=0.0,
            weight=float(weight),
        )
        for member, weight in zip(members, weights, strict=True)
    ]
    prompts = [member.prompt_ids for member in members]
    return share_prompts(list(zip(prompts, replies, strict=True)))


@dataclass(kw_only=True)
class StepTerms:
    """Builds the terms of every step of a run."""

    spec: RunSpec
    roles: Roles
    task: Task
    demonstrations: Demonstrations | None = None
    preferences: Preferences | None = None

    def __post_init__(self) -> None:
        self.algorithm = choose_algorithm(self.spec)
        self._demonstrations = schedule_demonstrations(self.spec, self.demonstrations)
        self._pairs: ExampleSchedule[PackedGroup] | None = None
        self._prompts: TeacherPrompts | None = None
        context, tokenizer = self.spec.teacher.context, self.roles.tokenizer
        if context is not None and self.spec.has_teacher:
            self._prompts = TeacherPrompts(
                context=context,
                task=self.task,
                tokenizer=tokenizer,
                prompt_format=resolve_prompt_format(tokenizer, self.spec.model.prompt_format),
            )

    def digest_offline_data(self) -> dict[str, str]:
        """Return the digests of the run's offline data. See `strop.record.parts`."""
        offline = {"demonstrations": self.demonstrations, "preferences": self.preferences}
        return {name: data.digest for name, data in offline.items() if data is not None}

    async def prepare(self, run_path: Path) -> None:
        """Attach the reference's log-probabilities to the preference pairs, once, before the first step.

        Raises: CorruptRecord if their file is gone or damaged, and they cannot be computed again.
        """
        if self.preferences is None:
            return
        # Without `reference.model` the reference is the weights that the run starts from.
        learner, role = self.roles.learner, "reference" if "reference" in self.roles.frozen_dirs else None
        score = partial(learner.score, role=role) if role or learner.version == 0 else None
        temperature = self.spec.sampling.temperature
        self.preferences = await with_reference(
            self.preferences, score, run_path / REFERENCE_NAME, temperature
        )
        self._pairs = ExampleSchedule(
            self.preferences.members, seed=self.spec.seed, prompts_per_step=self.spec.dpo.pairs_per_step
        )

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

    async def credit(self, groups: Sequence[Group]) -> TrainBatch:
        """Assign credit over a step's groups, and attach the log-probabilities that its terms ask for."""
        task = self.task
        limit_P = [task.attempt_tokens(task.limits_of(group.example)) for group in groups]
        batch = build_batch(self.algorithm, groups, task.attempt_tokens(task.limits), limit_P)
        if self.spec.train.terms == "distill" or not batch.credit.num_counted_tokens:
            return batch
        return replace(batch, groups=await self._attach_logprobs(batch.groups))

    def list_advantages(self, batch: TrainBatch, groups: Sequence[Group]) -> list[list[TurnAdvantages]]:
        """Return the advantages of each rollout's tokens; none in distillation."""
        if self.spec.train.terms == "distill":
            return [[()] * len(group.rollouts) for group in groups]
        return list_advantages(batch, groups)

    async def build(
        self,
        step: int,
        batch: TrainBatch,
        groups: Sequence[Group],
        demonstrations: Sequence[Demonstration],
    ) -> list[list[Term]]:
        """Return the terms of every optimizer step of a batch, without terms that have no token to count."""
        spec, temperature = self.spec, self.spec.sampling.temperature
        if self._pairs is not None:
            return [[dpo_term(spec.dpo, self._pairs.examples(step), temperature)]]
        if spec.train.terms == "distill":
            terms = await self._distill(step, groups, demonstrations)
            return [terms] if terms else []
        sft: list[Term] = [sft_term(demonstrations, spec.sft.weight)] if demonstrations else []
        if not batch.credit.num_counted_tokens:
            return [sft] if sft else []
        parts = cut_batch(self.algorithm, batch, spec.train, seed=spec.seed, step=step)
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
        return [rl_term(self.algorithm, scored, temperature, name="distill")]

    async def _attach_logprobs(self, groups: Sequence[PackedGroup]) -> tuple[PackedGroup, ...]:
        """Attach the log-probabilities that the algorithm asks for, each computed once."""
        algorithm, temperature = self.algorithm, self.spec.sampling.temperature
        groups = tuple(groups)
        if algorithm.mode == "decoupled" or algorithm.reward_kl_beta:
            scores = await self.roles.learner.score(groups, temperature)
            groups = with_logprobs(groups, "old", scores)
        if algorithm.needs_reference:
            scores = await self.roles.learner.score(groups, temperature, "reference")
            groups = with_logprobs(groups, "reference", scores)
        if algorithm.reward_kl_beta:
            groups = penalize_rewards(algorithm, groups)
        if algorithm.teacher_weight != 0.0:
            teacher = "teacher" if "teacher" in self.roles.frozen_dirs else None
            # The teacher may read another prompt than the policy.
            shown = [
                group
                if group.teacher_prompt_ids is None
                else replace(group, prompt_ids=group.teacher_prompt_ids)
                for group in groups
            ]
            scores = await self.roles.learner.score(shown, temperature, teacher)
            groups = with_logprobs(groups, "teacher", scores)
        return groups


def choose_algorithm(spec: RunSpec) -> Algorithm:
    """Return the algorithm of a run; with a teacher, its log-probabilities are part of the advantage."""
    if spec.train.terms == "distill":
        return sampled_distillation(spec.teacher, spec.algorithm)
    algorithm = build_algorithm(spec.algorithm, spec.reference, spec.train)
    if spec.has_teacher:
        return replace(algorithm, teacher_weight=spec.teacher.weight, zero_variance="keep")
    return algorithm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update:
    """The optimizer steps of a batch."""

    steps: tuple[StepReport, ...] = ()
    """Steps whose gradient was finite, in order."""
    num_refused: int = 0
    """Steps whose loss or gradient was not finite."""


async def take_steps(
    learner: LearnerRole,
    steps: Sequence[Sequence[Term]],
    train: TrainSpec,
    step: int,
    on_refused: Callable[[LearnerError], None],
) -> Update:
    """Take the optimizer steps of the batch that follows `step` completed ones: together one version.

    A step that is not finite is refused and reported, and the others go on.
    """
    version, first = learner.version + 1, step * train.steps_per_batch
    reports: list[StepReport] = []
    num_refused = 0
    for index, terms in enumerate(steps):
        plan = StepPlan(version=version, place=first + index)
        try:
            reports.append(await learner.call(Learner.step_terms, terms, plan))
        except LearnerError as error:
            num_refused += 1
            on_refused(error)
    return Update(steps=tuple(reports), num_refused=num_refused)
