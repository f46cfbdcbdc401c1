"""The terms of a step's loss: policy gradient, demonstrations, preference pairs and distillation.

All go through the same packed forward, head and optimizer step. Each is normalised over its own
complete batch; only then does its weight act.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from strop.algorithm import Aggregation, Algorithm
from strop.algorithm.advantages import Float64Array
from strop.algorithm.corrections import CORRECTIONS
from strop.algorithm.distillation import Divergence, TopDivergence
from strop.algorithm.losses import IS_PG
from strop.algorithm.offline import Preference, cross_entropy_terms, weigh_demonstrations
from strop.errors import ConfigError
from strop.policy.distilling import DistillTerm
from strop.policy.learner import LossTerm
from strop.policy.objective import Scope, ScoredTokens, TokenTerms
from strop.policy.packing import PackedGroup, PackedReply
from strop.rollout import Example, Group, IntArray, Message
from strop.spec.algorithm import AlgorithmSpec
from strop.spec.model import TeacherSpec
from strop.spec.offline import DpoSpec
from strop.spec.template import fill, list_names
from strop.tasks import Task
from strop.tasks.prompt import PromptFormat, render_prompt
from strop.tokenizer import Tokenizer
from strop.train.batch import pack_reply, share_prompts
from strop.train.data.demonstrations import Demonstration

# Distillation: which replies a teacher scores, and behind which prompt.

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


def build_divergence(spec: TeacherSpec) -> Divergence | TopDivergence:
    """Return the divergence that a run asks for."""
    divergence = Divergence(name=spec.divergence, beta=spec.jsd_beta)
    if spec.top_k is None:
        return divergence
    return TopDivergence(divergence=divergence, top_k=spec.top_k, rest=spec.rest)


def distill_term(spec: TeacherSpec, groups: Sequence[PackedGroup], temperature: float) -> DistillTerm:
    """Return the term that compares whole distributions on packed replies."""
    return DistillTerm(
        name="distill",
        groups=groups,
        temperature=temperature,
        divergence=build_divergence(spec),
        weight=spec.weight,
        is_own_teacher=spec.source == "current",
    )


def sampled_distillation(spec: TeacherSpec, chosen: AlgorithmSpec) -> Algorithm:
    """Return the algorithm whose advantage is what the teacher finds likelier than the policy, alone.

    Of `chosen` it takes the correction: replies may be of earlier weights, as beside rewards.
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
    """Return 0 for everybody. Shapes: G in and out."""
    return np.zeros(len(rewards_G), dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPrompts:
    """Writes what the teacher reads where it is shown more than the policy."""

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

    A reply that leaves the teacher no room behind its longer prompt is left out.
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
        packed += [replace(one, teacher_prompt_ids=teacher_ids) for one in share_prompts(replies)]
    return weigh_equally(packed)


def weigh_equally(groups: Sequence[PackedGroup]) -> list[PackedGroup]:
    """Give every scored token of the batch the same weight; they add up to 1."""
    counts = [int(reply.is_scored.sum()) for group in groups for reply in group.replies]
    weight = 1.0 / max(sum(counts), 1)
    return [
        replace(group, replies=tuple(replace(reply, weight=weight) for reply in group.replies))
        for group in groups
    ]


SFT_TEMPERATURE = 1.0
"""Demonstrations were drawn from no distribution of this run: logits are taken as they are."""


def rl_term(algorithm: Algorithm, groups: Sequence[PackedGroup], temperature: float) -> LossTerm:
    """Return the policy-gradient term of credited groups.

    Raises: ConfigError if a reply is longer than a correction by whole replies accepts.
    """
    return policy_term(algorithm, groups, temperature, name="rl")


def policy_term(
    algorithm: Algorithm, groups: Sequence[PackedGroup], temperature: float, *, name: str
) -> LossTerm:
    """Return the term of packed replies that an algorithm judges. Raises: like `rl_term`."""
    _refuse_long_sequences(algorithm, groups)
    return LossTerm(
        name=name,
        groups=groups,
        temperature=temperature,
        token_terms=algorithm,
        scope=algorithm.scope,
        entropy_weight=algorithm.entropy_weight,
    )


def _refuse_long_sequences(algorithm: Algorithm, groups: Sequence[PackedGroup]) -> None:
    limit = algorithm.max_sequence_tokens
    if algorithm.correction.level != "sum" or limit is None:
        return
    counts = [int(reply.is_scored.sum()) for group in groups for reply in group.replies]
    if max(counts, default=0) > limit:
        raise ConfigError(
            f"a reply of {max(counts)} tokens under algorithm.correction={algorithm.correction.name},"
            " whose ratio is a product over all of them",
            allowed=f"replies of at most algorithm.max_sequence_tokens={limit}",
            next_step="choose a correction by token, or raise that limit knowingly",
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
    """Return the mean loss of preference pairs, which stay together."""
    preference = Preference(
        name=spec.loss,
        beta=spec.beta,
        label_noise_frac=spec.label_noise_frac,
        is_per_token=spec.loss == "pref_ipo" if spec.margin is None else spec.margin == "mean",
    )
    weight = 1.0 / max(len(pairs), 1)
    weighed = [
        replace(pair, replies=tuple(replace(reply, weight=weight) for reply in pair.replies))
        for pair in pairs
    ]
    return LossTerm(
        name="dpo", groups=weighed, temperature=temperature, token_terms=preference, scope=Scope.GROUP
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
