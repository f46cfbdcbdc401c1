"""What a teacher is shown of a step: the policy's own replies or demonstrations, and under which prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from strop.algorithm import Aggregation, Algorithm
from strop.algorithm.advantages import Float64Array
from strop.algorithm.corrections import CORRECTIONS
from strop.algorithm.distillation import Divergence, TopDivergence
from strop.algorithm.losses import IS_PG
from strop.errors import ConfigError, explain_refusal
from strop.policy.distilling import DistillTerm
from strop.policy.packing import PackedGroup, PackedReply
from strop.rollout import Example, Group, IntArray, Message
from strop.spec.algorithm import AlgorithmSpec
from strop.spec.teacher import TeacherSpec
from strop.spec.template import fill, list_names
from strop.tasks import Task
from strop.tasks.prompt import PromptFormat, render_prompt
from strop.tokenizer import Tokenizer
from strop.train.batch import pack_reply, share_prompts

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
                explain_refusal(
                    f"teacher.context names {{{missing[0]}}}, and an example of {self.task.name} has"
                    f" {', '.join(sorted(known)) or 'no fields'}",
                    allowed="{answer}, where the task has one, and the names of an example's fields",
                    next_step="correct teacher.context",
                )
            )
        content = f"{last.content}\n\n{fill(self.context, known)}"
        messages = (*before, Message(role=last.role, content=content))
        return render_prompt(self.tokenizer, messages, self.prompt_format)[1]


def pack_taught(
    spec: TeacherSpec, groups: Sequence[Group], prompts: TeacherPrompts | None, max_positions: int
) -> list[PackedGroup]:
    """Pack the replies that are taught, every token with the same weight; rewards take no part.

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
        replace(group, replies=tuple(_weigh(reply, weight) for reply in group.replies)) for group in groups
    ]


def _weigh(reply: PackedReply, weight: float) -> PackedReply:
    return replace(reply, weight=weight)
