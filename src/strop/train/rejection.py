"""Demonstrations from kept rollouts: those that earned enough, the best of each example first.

The rollouts are those of a run, or those that an evaluation with several samples kept.

Their ids are taken as the engine sampled them, so they are shown to be this model's own: its tokenizer
gives the same prompt ids and reads the same replies, and the task, where it is the run's own, still asks
in the same words. Taught is what was judged, with one terminator behind it: that takes the place of a stop
string. A reply that was cut has no end that could be taught and is never taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from strop.environments import reads_as
from strop.errors import DataError, explain_refusal
from strop.record import RunDir
from strop.record.shards import list_shards
from strop.rollout import FinishReason, IntArray, Rollout, Split, Turn
from strop.spec.sft import SftSpec
from strop.tasks import problem_of
from strop.tasks.prompt import render_prompt
from strop.tasks.traits import list_names
from strop.tokenizer import Tokenizer
from strop.train.demonstrations import Candidate, Demonstration, Demonstrations, Framing, Sieve, require_some

_ENDS = frozenset({FinishReason.EOS, FinishReason.STOP_STRING})


@dataclass(kw_only=True, slots=True)
class Choice:
    """Takes rollouts one by one and keeps the best of each example, different ones only."""

    tokenizer: Tokenizer
    min_reward: float
    max_per_example: int | None
    counts: Counter[str] = field(default_factory=Counter)
    num_seen: int = 0
    _by_example: dict[str, dict[bytes, Rollout]] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> None:
        """Keep a rollout for now, or count why not."""
        self.num_seen += 1
        reward = rollout.outcome.reward
        if reward is None:
            self.counts["rollouts without a score"] += 1
        elif not is_whole(self.tokenizer, rollout):
            self.counts["rollouts without a whole reply"] += 1
        elif reward < self.min_reward:
            self.counts["rollouts below sft.min_reward"] += 1
        else:
            known = self._by_example.setdefault(rollout.example.example_id, {})
            said = b"|".join(turn.token_ids.tobytes() for turn in rollout.turns)
            if said in known:
                self.counts["repeated rollouts"] += 1
            known.setdefault(said, rollout)

    def finish(self) -> list[Rollout]:
        """Return what is left: by example in order of appearance, best first, earliest first among equals."""
        chosen: list[Rollout] = []
        for known in self._by_example.values():
            ranked = sorted(known.values(), key=lambda rollout: -(rollout.outcome.reward or 0.0))
            taken = ranked[: self.max_per_example]
            chosen += taken
            self.counts["rollouts over sft.max_per_example"] += len(ranked) - len(taken)
        return chosen


def is_whole(tokenizer: Tokenizer, rollout: Rollout) -> bool:
    """Whether every reply came to its end, and no stop string begins inside one of its tokens."""
    if rollout.outcome.truncated:
        return False
    replies = [turn for turn in rollout.turns if turn.is_sampled]
    spoken = [_spoken_ids(tokenizer, turn) for turn in replies if turn.finish_reason in _ENDS]
    found = [ids for ids in spoken if ids is not None]
    return len(found) == len(replies) and any(len(ids) for ids in found)


def _spoken_ids(tokenizer: Tokenizer, reply: Turn) -> IntArray | None:
    """Return a reply's ids without those of its stop string, or None where that begins inside a token."""
    if reply.finish_reason is not FinishReason.STOP_STRING or not reads_as(tokenizer, reply):
        return reply.token_ids
    num_tokens = len(reply.token_ids)
    while (said := tokenizer.decode(reply.token_ids[:num_tokens])) != reply.text:
        if not said.startswith(reply.text):
            return None
        num_tokens -= 1
    return reply.token_ids[:num_tokens]


def read_run_demonstrations(spec: SftSpec, folder: Path, framing: Framing) -> Demonstrations:
    """Choose demonstrations among the rollouts in the folder of a run or of an evaluation's replies.

    Raises: StoreError if the folder is neither; CorruptRecord if a file of it is damaged; DataError if none
        is left, too many do not fit, they were written with another tokenizer or prompt, or they answer
        what this run holds out.
    """
    # Here, because pyarrow is heavy.
    from strop.record.rollouts import read_rollouts

    assert spec.source is not None
    choice = Choice(
        tokenizer=framing.tokenizer, min_reward=spec.min_reward, max_per_example=spec.max_per_example
    )
    for path in find_rollouts_files(folder):
        for rollout in read_rollouts(path):
            choice.add(rollout)
    chosen = choice.finish()
    seen = "; ".join(f"{number} {what}" for what, number in choice.counts.items() if number)
    require_some(spec.source, chosen, f"{choice.num_seen} rollouts are recorded{seen and ', '}{seen}")
    refuse_held_out("sft.source", spec.source, chosen, framing)
    sieve = Sieve(framing=framing)
    for rollout in chosen:
        require_same_asking("sft.source", rollout, framing)
        for candidate in _to_candidates(rollout, framing):
            sieve.add(candidate)
    return Demonstrations(
        source=spec.source,
        members=sieve.finish(spec.source, spec.max_dropped_frac),
        problems=frozenset(),
        counts={**choice.counts, **sieve.counts},
    )


def find_rollouts_files(folder: Path) -> list[Path]:
    """Return the files of rollouts in the folder of a run, or of the replies that an evaluation kept.

    Raises: StoreError if the folder is neither.
    """
    return list_shards(folder) or RunDir.open(folder).rollouts_files()


def refuse_held_out(setting: str, source: str, chosen: Sequence[Rollout], framing: Framing) -> None:
    """Refuse replies to problems that this run will be measured on: an evaluation may be of any split."""
    task = framing.task
    held_out = list_names(task, task.examples(Split.HELD_OUT))
    asked = {one.example.example_id: one.example for one in chosen}
    known = sorted(
        example_id
        for example_id, example in asked.items()
        if example_id in held_out or (example.task == task.name and problem_of(task, example) in held_out)
    )
    if known:
        raise DataError(
            explain_refusal(
                f"{len(known)} examples of {setting}={source} are held out here, the first is {known[0]}",
                allowed="replies to training examples",
                next_step="evaluate with --split train, and name the folder of those replies",
            )
        )


def require_same_asking(setting: str, rollout: Rollout, framing: Framing) -> None:
    """Raises: DataError if this run would ask, write or read otherwise than the rollout has it."""
    tokenizer, task, opening = framing.tokenizer, framing.task, rollout.turns[0]
    is_same = np.array_equal(tokenizer.encode(opening.text), opening.token_ids)
    is_same = is_same and all(reads_as(tokenizer, turn) for turn in rollout.turns if turn.is_sampled)
    if is_same and rollout.example.task == task.name:
        messages = task.render(rollout.example)
        _, prompt_ids = render_prompt(tokenizer, messages, framing.prompt_format)
        is_same = np.array_equal(prompt_ids, opening.token_ids)
    if not is_same:
        raise DataError(
            explain_refusal(
                f"a rollout of {setting}, example {rollout.example.example_id} of step {rollout.step}, was"
                f" asked with {opening.text!r}, and this run's tokenizer, prompt format or task writes or"
                " reads it otherwise",
                allowed="rollouts of a model with the same tokenizer, asked as this run asks",
                next_step=f"name a run of this model, task and model.prompt_format in {setting}",
            )
        )


def _to_candidates(rollout: Rollout, framing: Framing) -> Iterator[Candidate]:
    """Make a demonstration of each piece that the policy saw and said."""
    for turns in rollout.samples:
        if any(turn.is_sampled for turn in turns):
            yield _to_candidate(rollout, turns, framing)


def _to_candidate(rollout: Rollout, turns: tuple[Turn, ...], framing: Framing) -> Candidate:
    """Train what was judged, and the terminator behind it, which a stop string kept from being said."""
    tokenizer = framing.tokenizer
    last = max(index for index, turn in enumerate(turns) if turn.is_sampled)
    said = turns[1 : last + 1]
    parts, marks = [], []
    for turn in said:
        ids = _spoken_ids(tokenizer, turn) if turn.is_sampled else turn.token_ids
        assert ids is not None, "only whole rollouts are taken"
        parts.append(ids)
        marks.append(np.full(len(ids), turn.is_sampled))
    if turns[last].finish_reason is FinishReason.STOP_STRING:
        parts.append(np.array([tokenizer.eos_id], dtype=np.int32))
        marks.append(np.ones(1, dtype=np.bool_))
    return Candidate(
        demonstration=Demonstration(
            prompt_ids=turns[0].token_ids,
            num_asked=len(turns[0].token_ids),
            reply_ids=np.concatenate(parts),
            is_trained=np.concatenate(marks),
            weight=1.0,
            prompt_id=rollout.example.example_id,
        ),
        replies=tuple((turn.text, len(turn.token_ids)) for turn in said if turn.is_sampled),
    )
