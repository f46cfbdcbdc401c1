"""The examples of each step, and the packed batch of its judged groups.

If the task has no order, an epoch is a seeded permutation. The order follows from the seed and the number of
examples alone, so a resumed run needs only its step count. Every example is used once per epoch; none is
dropped where the number of examples is not a multiple of the step's. A step that spans two epochs never gets
the same example twice.

Credit is assigned once, rows are built once. A batch may take several optimizer steps. Advantages are those
of the whole batch; a mini-batch is weighed as a batch of its groups alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from strop.algorithm import Algorithm, Credit, assign_credit
from strop.algorithm.advantages import whiten
from strop.algorithm.credit import weigh_part
from strop.algorithm.losses import MAX_LOG_RATIO_NATS
from strop.errors import DataError
from strop.policy.packing import PackedGroup, PackedReply
from strop.rollout import Example, FloatArray, Group, IntArray, Rollout, Split, Turn
from strop.spec.run import RunSpec
from strop.spec.train import TrainSpec
from strop.tasks import Task
from strop.train.data.offline import Demonstration, Demonstrations, require_enough

Item = TypeVar("Item")
TurnAdvantages = tuple[FloatArray | None, ...]
"""Advantages of each token, by turn of a rollout; None for a turn that is not trained."""


class ExampleSchedule(Generic[Item]):
    """Serves the examples of any step, or other rows that are drawn in the same way."""

    def __init__(
        self,
        examples: Sequence[Item],
        *,
        seed: int,
        prompts_per_step: int,
        epoch_order: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        if len(examples) < prompts_per_step:
            raise DataError(
                f"the task has {len(examples)} training examples and a step asks for {prompts_per_step}",
                allowed=f"train.prompts_per_step from 1 to {len(examples)}",
                next_step="lower train.prompts_per_step or give the task more data",
            )
        self._examples = examples
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._epoch_order = epoch_order or self._permute
        self._steps: list[list[int]] = []
        self._waiting: deque[int] = deque()
        self._num_epochs = 0

    def examples(self, step: int) -> list[Item]:
        """Return the examples of the step that follows `step` completed ones.

        Raises: DataError if the task's own order names too few different examples to fill a step.
        """
        return [self._examples[index] for index in self._places(step)]

    def numbered(self, number: int) -> Item:
        """Return the example of the group with a number, counted over all steps from 0."""
        step, place = divmod(number, self._prompts_per_step)
        return self._examples[self._places(step)[place]]

    def _places(self, step: int) -> list[int]:
        while len(self._steps) <= step:
            chosen: dict[int, None] = {}
            # A repeated example waits for the next step.
            deferred: list[int] = []
            while len(chosen) < self._prompts_per_step:
                if not self._waiting:
                    order = list(self._epoch_order(self._seed, self._num_epochs))
                    self._num_epochs += 1
                    num_different = len(set(order))
                    if num_different < self._prompts_per_step:
                        raise DataError(
                            f"an epoch of the task's own order has {num_different} different examples"
                            f" and a step asks for {self._prompts_per_step}",
                            allowed=f"train.prompts_per_step from 1 to {num_different}",
                            next_step="lower train.prompts_per_step or widen the order",
                        )
                    self._waiting.extend(order)
                index = self._waiting.popleft()
                if index in chosen:
                    deferred.append(index)
                else:
                    chosen[index] = None
            self._waiting.extendleft(reversed(deferred))
            self._steps.append(list(chosen))
        return self._steps[step]

    def _permute(self, seed: int, epoch: int) -> list[int]:
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        return [int(index) for index in generator.permutation(len(self._examples))]


def schedule_examples(spec: RunSpec, task: Task) -> ExampleSchedule[Example] | None:
    """Return the schedule of a task's examples, or None in a run without rollouts.

    Raises: DataError if there are fewer examples than a step takes.
    """
    if not spec.train.has_rl:
        return None
    return ExampleSchedule(
        task.examples(Split.TRAIN),
        seed=spec.seed,
        prompts_per_step=spec.train.prompts_per_step,
        epoch_order=task.epoch_order if task.is_ordered else None,
    )


def schedule_demonstrations(
    spec: RunSpec, demonstrations: Demonstrations | None
) -> ExampleSchedule[Demonstration] | None:
    """Return the schedule of demonstrations, or None where there are none.

    Raises: DataError if there are fewer demonstrations than a step takes.
    """
    if demonstrations is None:
        return None
    num_rows = spec.sft.rows_per_step
    require_enough(demonstrations, num_rows)
    return ExampleSchedule(demonstrations.members, seed=spec.seed, prompts_per_step=num_rows)


_ORDER_STREAM = 2**32
"""Names the random streams of mini-batches among those of the run's seed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainBatch:
    """The packed rollouts of one training step, for one optimizer step or several."""

    groups: tuple[PackedGroup, ...]
    """Only rollouts that are forwarded."""
    places: tuple[tuple[int, int], ...]
    """For each reply, in order: the index of its group in `credit`, and of its rollout there."""
    turns: tuple[tuple[Turn, ...], ...]
    """For each reply, in order: the turns with its scored tokens."""
    credit: Credit
    max_reply_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    """The turns of a rollout."""

    reward: float | None
    samples: tuple[tuple[Turn, ...], ...]
    """Each begins with a prompt."""
    is_truncated: bool = False
    earned: Sequence[float] = ()
    """The reward of each turn that the policy sampled."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled in it."""
        return sum(len(turn.token_ids) for turns in self.samples for turn in turns if turn.is_sampled)


def build_batch(
    algorithm: Algorithm,
    groups: Sequence[Group],
    max_reply_tokens: int,
    limit_P: Sequence[int] | None = None,
) -> TrainBatch:
    """Assign credit over the complete batch, then pack what is forwarded. Limits: as `assign_credit`."""
    row_P_G = [[_to_row(rollout) for rollout in group.rollouts] for group in groups]
    credit = assign_credit(
        algorithm,
        [[row.reward for row in row_G] for row_G in row_P_G],
        [[row.num_tokens for row in row_G] for row_G in row_P_G],
        [[row.is_truncated for row in row_G] for row_G in row_P_G],
        max_reply_tokens,
        limit_P,
        [[row.earned for row in row_G] for row_G in row_P_G],
    )
    packed: list[PackedGroup] = []
    origins: dict[int, tuple[tuple[int, int], tuple[Turn, ...]]] = {}
    for index, row_G in enumerate(row_P_G):
        replies = []
        for member, row in enumerate(row_G):
            if not credit.is_forwarded_P_G[index][member]:
                continue
            advantage, weight = credit.advantage_P_G[index][member], credit.weight_P_G[index][member]
            by_turn = credit.turn_advantage_P_G_K
            of_turns = None if by_turn is None else iter(by_turn[index][member].tolist())
            for turns in row.samples:
                spoken = tuple(turn for turn in turns if turn.is_sampled)
                own = None if of_turns is None else list(itertools.islice(of_turns, len(spoken)))
                if any(len(turn.token_ids) for turn in spoken):
                    reply = pack_reply(turns, float(advantage), float(weight), own)
                    replies.append((turns[0].token_ids, reply))
                    origins[id(reply)] = ((index, member), spoken)
        packed += share_prompts(replies)
    in_order = [origins[id(reply)] for group in packed for reply in group.replies]
    return TrainBatch(
        groups=tuple(packed),
        places=tuple(place for place, _ in in_order),
        turns=tuple(spoken for _, spoken in in_order),
        credit=credit,
        max_reply_tokens=max_reply_tokens,
    )


def list_advantages(batch: TrainBatch, groups: Sequence[Group]) -> list[list[TurnAdvantages]]:
    """Return the advantages of each turn's tokens, by group and rollout; None if a turn is not trained."""
    by_turn: dict[int, FloatArray] = {}
    replies = (reply for packed in batch.groups for reply in packed.replies)
    for reply, spoken in zip(replies, batch.turns, strict=True):
        of_tokens = reply.token_advantages
        if of_tokens is None:
            of_tokens = np.full(len(reply.engine_logprobs), reply.advantage, dtype=np.float32)
        ends = np.cumsum([len(turn.token_ids) for turn in spoken])[:-1]
        by_turn |= {id(turn): part for turn, part in zip(spoken, np.split(of_tokens, ends), strict=True)}
    return [
        [tuple(by_turn.get(id(turn)) for turn in rollout.turns) for rollout in group.rollouts]
        for group in groups
    ]


def _to_row(rollout: Rollout) -> _Row:
    earned = rollout.outcome.turn_rewards or [0.0] * sum(turn.is_sampled for turn in rollout.turns)
    return _Row(
        reward=rollout.outcome.reward,
        samples=rollout.samples,
        is_truncated=rollout.outcome.truncated,
        earned=earned,
    )


def cut_batch(
    algorithm: Algorithm, batch: TrainBatch, train: TrainSpec, *, seed: int, step: int
) -> list[tuple[PackedGroup, ...]]:
    """Return the packed groups of each optimizer step of a batch, in order.

    A mini-batch holds whole groups, its share of the counted ones, shuffled in every epoch by seed and step
    alone. A mini-batch of groups without gradient is a step of zero gradient; one without any token that
    counts is left out.
    """
    if train.mini_batches == 1:
        return [batch.groups] * train.epochs
    credit = batch.credit
    num_tokens_P = np.array(
        [
            int(counts[is_counted].sum())
            for counts, is_counted in zip(credit.num_trained_P_G, credit.is_counted_P_G, strict=True)
        ]
    )
    counted = [index for index, is_counted in enumerate(credit.is_counted_P_G) if is_counted.any()]
    steps = []
    for epoch in range(train.epochs):
        stream = np.random.Philox(key=[seed, _ORDER_STREAM], counter=[0, 0, epoch, step])
        order = np.random.Generator(stream).permutation(counted)
        parts = np.array_split(order, train.mini_batches)
        steps += [
            _take_part(algorithm, batch, sorted(part.tolist())) for part in parts if num_tokens_P[part].sum()
        ]
    return steps


def _take_part(algorithm: Algorithm, batch: TrainBatch, chosen: Sequence[int]) -> tuple[PackedGroup, ...]:
    """Return the packed groups of some groups of a batch, weighed as a batch of their own."""
    credit = batch.credit
    weights = weigh_part(
        algorithm,
        [credit.num_trained_P_G[index] for index in chosen],
        [credit.is_counted_P_G[index] for index in chosen],
        batch.max_reply_tokens,
    )
    weight_G_of = dict(zip(chosen, weights, strict=True))
    places, part = iter(batch.places), []
    for group in batch.groups:
        own = [next(places) for _ in group.replies]
        # All replies of a packed group are of one group.
        if own[0][0] in weight_G_of:
            replies = tuple(
                replace(reply, weight=float(weight_G_of[index][member]))
                for reply, (index, member) in zip(group.replies, own, strict=True)
            )
            part.append(replace(group, replies=replies))
    return tuple(part)


def penalize_rewards(algorithm: Algorithm, groups: Sequence[PackedGroup]) -> tuple[PackedGroup, ...]:
    """Set each token's advantage to its reply's reward minus the KL penalty of this and all later tokens.

    A reply's advantage is its reward here. The penalty is beta times the log-ratio of the policy that the
    batch began with to the reference, at scored tokens. Then the tokens of the batch are whitened together.
    Source: arXiv:2501.03262, equations 5 and 6, without discount.
    """
    returns = []
    for reply in (reply for group in groups for reply in group.replies):
        assert reply.old_logprobs is not None
        assert reply.reference_logprobs is not None
        gap_T = reply.old_logprobs.astype(np.float64) - reply.reference_logprobs
        gap_T = np.clip(gap_T, -MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS)
        to_come_T = np.cumsum(gap_T[::-1])[::-1]
        returns.append(reply.advantage - algorithm.reward_kl_beta * to_come_T)
    if not returns:
        return tuple(groups)
    joined_N = np.concatenate(returns)
    if algorithm.whitens_tokens:
        joined_N = whiten(joined_N)
    ends = np.cumsum([len(part) for part in returns])[:-1]
    parts = iter(np.split(joined_N.astype(np.float32), ends))
    return tuple(
        replace(group, replies=tuple(replace(reply, token_advantages=next(parts)) for reply in group.replies))
        for group in groups
    )


def share_prompts(replies: Sequence[tuple[IntArray, PackedReply]]) -> list[PackedGroup]:
    """Hold each distinct prompt once, in order of appearance.

    The rollouts of a group usually share one prompt, but an environment may open differently, so the ids are
    compared.
    """
    by_prompt: dict[bytes, tuple[IntArray, list[PackedReply]]] = {}
    for prompt_ids, reply in replies:
        by_prompt.setdefault(prompt_ids.tobytes(), (prompt_ids, []))[1].append(reply)
    return [PackedGroup(prompt_ids=ids, replies=tuple(members)) for ids, members in by_prompt.values()]


def pack_reply(
    turns: Sequence[Turn], advantage: float, weight: float, of_turns: Sequence[float] | None = None
) -> PackedReply:
    """Join all turns after the opening prompt of a sample; exactly the sampled tokens are scored.

    The end of a reply was sampled too, terminator or stop string. A gradient without the tokens of a stop
    string is not the gradient of the expected reward: the choice to end there would go without credit.
    """
    replies = turns[1:]
    return PackedReply(
        token_ids=np.concatenate([turn.token_ids for turn in replies]),
        is_scored=np.concatenate([np.full(len(turn.token_ids), turn.is_sampled) for turn in replies]),
        engine_logprobs=np.concatenate([turn.logprobs for turn in replies if turn.logprobs is not None]),
        advantage=advantage,
        weight=weight,
        token_advantages=None
        if of_turns is None
        else np.repeat(of_turns, [len(turn.token_ids) for turn in replies if turn.is_sampled]).astype(
            np.float32
        ),
    )
