"""Demonstrations from a data file, or from recorded rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from strop.environments.extending import encode_next_messages, reads_as
from strop.errors import ConfigError, DataError
from strop.record import RunDir
from strop.record.files import list_shards
from strop.rollout import FinishReason, IntArray, Rollout, Split, Turn
from strop.spec.offline import SftSpec
from strop.tasks.prompt import end_id_of, render_prompt
from strop.tasks.rows.layout import bad_row, read_rows
from strop.tasks.rows.row_task import SPEAKER, SftRow
from strop.tasks.task import list_names
from strop.tokenizer import Tokenizer
from strop.train.data.offline import (
    Candidate,
    Demonstration,
    Demonstrations,
    Framing,
    Sieve,
    require_some,
)

# From a data file. Conversations are extended turn by turn as rollouts are: replies keep their ids, and where
# the template rewrites earlier turns, a demonstration ends. Every reply is followed by one terminator.


def read_file_demonstrations(spec: SftSpec, path: Path, framing: Framing) -> Demonstrations:
    """Read the demonstrations of a data file.

    Raises: DataError naming the row, for one that is malformed; or if none is left, or too many do not fit.
    """
    assert spec.source is not None
    rows = [SftRow.read(row) for row in read_rows(path)]
    require_some(spec.source, rows, "it has no row")
    sieve = Sieve(framing=framing)
    for row in rows:
        for candidate in render_row(row, framing, spec.train_on):
            sieve.add(candidate)
    return Demonstrations(
        source=spec.source,
        members=sieve.finish(spec.source, spec.max_dropped_frac),
        problems=frozenset(" ".join(row.problem.split()) for row in rows if row.problem),
        counts=sieve.counts,
    )


@dataclass(kw_only=True, slots=True)
class _Piece:
    """Ids that the model sees in one sequence: a prompt, then replies and the messages between them."""

    prompt_ids: IntArray
    ids: list[IntArray] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    """The reply's text for each part of `ids`; None for messages between replies."""


def render_row(row: SftRow, framing: Framing, train_on: str) -> list[Candidate]:
    """Return the demonstrations of a row: one, or more where the template rewrites earlier turns.

    Raises: DataError naming the row, if the template refuses its messages or a text holds a terminator.
    """
    try:
        pieces = list(_walk(row, framing))
    except ConfigError as error:
        raise bad_row(f"{row.place} cannot be rendered: {error}", "messages for its template") from error
    if train_on == "all" and len(pieces) > 1:
        allowed = "train_on = assistant or last with this model, or a conversation with one reply"
        raise bad_row(f"{row.place} is trained on in full, and its template rewrites what was said", allowed)
    if train_on == "last":
        pieces = pieces[-1:]
        pieces[0].texts[:-1] = [None] * (len(pieces[0].texts) - 1)
    return [_row_to_candidate(piece, row, train_on) for piece in pieces]


def _walk(row: SftRow, framing: Framing) -> Iterator[_Piece]:
    """Extend a conversation reply by reply; begin a new piece where it cannot be extended."""
    tokenizer, messages, chosen = framing.tokenizer, row.turns, framing.prompt_format
    places = [index for index, message in enumerate(messages) if message.role == SPEAKER]
    piece = _Piece(prompt_ids=render_prompt(tokenizer, messages[: places[0]], chosen)[1])
    for index, place in enumerate(places):
        text, reply_ids = _encode_reply(framing, row, messages[place].text)
        piece.ids.append(reply_ids)
        piece.texts.append(text)
        if index + 1 == len(places):
            break
        next_place = places[index + 1]
        between = messages[place + 1 : next_place]
        extension = encode_next_messages(tokenizer, chosen, messages[:place], between, FinishReason.EOS)
        if extension is None:
            yield piece
            piece = _Piece(prompt_ids=render_prompt(tokenizer, messages[:next_place], chosen)[1])
        else:
            piece.ids.append(extension[1])
            piece.texts.append(None)
    yield piece


def _encode_reply(framing: Framing, row: SftRow, text: str) -> tuple[str, IntArray]:
    """Return a reply's text without terminators, and its ids with exactly one at the end."""
    tokenizer = framing.tokenizer
    ends = [tokenizer.token_text(token_id) for token_id in tokenizer.stop_token_ids]
    while end := next((end for end in ends if text.rstrip().endswith(end)), None):
        text = text.rstrip().removesuffix(end)
    token_ids = tokenizer.encode(text)
    if not len(token_ids) or set(token_ids.tolist()) & tokenizer.stop_token_ids:
        raise bad_row(
            f"{row.place} has a reply that goes on behind a terminator, or is one", "one at its end"
        )
    return text, np.append(token_ids, np.int32(end_id_of(tokenizer, framing.prompt_format)))


def _row_to_candidate(piece: _Piece, row: SftRow, train_on: str) -> Candidate:
    prompt_ids, reply_ids = piece.prompt_ids, np.concatenate(piece.ids)
    num_asked = len(prompt_ids)
    marks = [np.full(len(ids), text is not None) for ids, text in zip(piece.ids, piece.texts, strict=True)]
    is_trained = np.concatenate(marks)
    if train_on == "all":
        # The first token has no context to predict it from.
        reply_ids = np.concatenate([prompt_ids[1:], reply_ids])
        prompt_ids, is_trained = prompt_ids[:1], np.ones(len(reply_ids), dtype=np.bool_)
    replies = zip(piece.texts, piece.ids, strict=True)
    return Candidate(
        demonstration=Demonstration(
            prompt_ids=prompt_ids,
            num_asked=num_asked,
            reply_ids=reply_ids,
            is_trained=is_trained,
            weight=row.weight,
            prompt_id=row.prompt_id,
        ),
        replies=tuple((text, len(ids)) for text, ids in replies if text is not None),
    )


# From recorded rollouts (rejection sampling): those with a sufficient reward, the best of each example first.
# Their ids are kept as the engine sampled them, so the run's tokenizer must give the same prompt ids and
# decode the same replies, and its task must still use the same words. The trained text is the judged text
# plus one terminator, which replaces a stop string. A truncated reply has no end to learn and is never taken.

_ENDS = frozenset({FinishReason.EOS, FinishReason.STOP_STRING})


@dataclass(kw_only=True, slots=True)
class Choice:
    """Chooses among rollouts the best different ones of each example."""

    tokenizer: Tokenizer
    min_reward: float
    max_per_example: int | None
    counts: Counter[str] = field(default_factory=Counter)
    num_seen: int = 0
    _by_example: dict[str, dict[bytes, Rollout]] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> None:
        """Keep a rollout for now, or count the reason to drop it."""
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
            content = b"|".join(turn.token_ids.tobytes() for turn in rollout.turns)
            if content in known:
                self.counts["repeated rollouts"] += 1
            known.setdefault(content, rollout)

    def finish(self) -> list[Rollout]:
        """Return the chosen rollouts: by example in order of appearance, best first, then earliest first."""
        chosen: list[Rollout] = []
        for known in self._by_example.values():
            ranked = sorted(known.values(), key=lambda rollout: -(rollout.outcome.reward or 0.0))
            taken = ranked[: self.max_per_example]
            chosen += taken
            self.counts["rollouts over sft.max_per_example"] += len(ranked) - len(taken)
        return chosen


def is_whole(tokenizer: Tokenizer, rollout: Rollout) -> bool:
    """Whether every reply is complete, and no stop string begins inside one of its tokens."""
    if rollout.outcome.truncated:
        return False
    replies = [turn for turn in rollout.turns if turn.is_sampled]
    spoken = [_spoken_ids(tokenizer, turn) for turn in replies if turn.finish_reason in _ENDS]
    whole = [ids for ids in spoken if ids is not None]
    return len(whole) == len(replies) and any(len(ids) for ids in whole)


def _spoken_ids(tokenizer: Tokenizer, reply: Turn) -> IntArray | None:
    """Return a reply's ids without those of its stop string, or None where that begins inside a token."""
    if reply.finish_reason is not FinishReason.STOP_STRING or not reads_as(tokenizer, reply):
        return reply.token_ids
    num_tokens = len(reply.token_ids)
    while (text := tokenizer.decode(reply.token_ids[:num_tokens])) != reply.text:
        if not text.startswith(reply.text):
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
    seen = "; ".join(f"{number} {reason}" for reason, number in choice.counts.items() if number)
    require_some(spec.source, chosen, f"{choice.num_seen} rollouts are recorded{seen and ', '}{seen}")
    refuse_held_out("sft.source", spec.source, chosen, framing)
    sieve = Sieve(framing=framing)
    for rollout in chosen:
        require_same_asking("sft.source", rollout, framing)
        # One demonstration of each sample that the policy answered.
        for turns in rollout.samples:
            if any(turn.is_sampled for turn in turns):
                sieve.add(_turns_to_candidate(rollout, turns, framing))
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
    """Refuse replies to held-out problems of this run: the source may be an evaluation of any split."""
    task = framing.task
    held_out = list_names(task, task.examples(Split.HELD_OUT))
    asked = {rollout.example.example_id: rollout.example for rollout in chosen}
    known = sorted(
        example_id
        for example_id, example in asked.items()
        if example_id in held_out or (example.task == task.name and task.problem_of(example) in held_out)
    )
    if known:
        raise DataError(
            f"{len(known)} examples of {setting}={source} are held out here, the first is {known[0]}",
            allowed="replies to training examples",
            next_step="evaluate with --split train, and name the folder of those replies",
        )


def require_same_asking(setting: str, rollout: Rollout, framing: Framing) -> None:
    """Raises: DataError if this run would render, encode or decode the rollout differently."""
    tokenizer, task, opening = framing.tokenizer, framing.task, rollout.turns[0]
    is_same = tokenizer.decode(opening.token_ids).endswith(opening.text)
    is_same = is_same and all(reads_as(tokenizer, turn) for turn in rollout.turns if turn.is_sampled)
    if is_same and rollout.example.task == task.name:
        messages = task.render(rollout.example)
        _, prompt_ids = render_prompt(tokenizer, messages, framing.prompt_format)
        is_same = np.array_equal(prompt_ids, opening.token_ids)
    if not is_same:
        raise DataError(
            f"a rollout of {setting}, example {rollout.example.example_id} of step {rollout.step}, was"
            f" asked with {opening.text!r}, and this run's tokenizer, prompt format or task writes or"
            " reads it otherwise",
            allowed="rollouts of a model with the same tokenizer, asked as this run asks",
            next_step=f"name a run of this model, task and model.prompt_format in {setting}",
        )


def _turns_to_candidate(rollout: Rollout, turns: tuple[Turn, ...], framing: Framing) -> Candidate:
    """Train the judged text and one terminator, in place of a stop string."""
    tokenizer = framing.tokenizer
    last = max(index for index, turn in enumerate(turns) if turn.is_sampled)
    answered = turns[1 : last + 1]
    parts, marks = [], []
    for turn in answered:
        ids = _spoken_ids(tokenizer, turn) if turn.is_sampled else turn.token_ids
        assert ids is not None, "only whole rollouts are taken"
        parts.append(ids)
        marks.append(np.full(len(ids), turn.is_sampled))
    if turns[last].finish_reason is FinishReason.STOP_STRING:
        parts.append(np.array([end_id_of(tokenizer, framing.prompt_format)], dtype=np.int32))
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
        replies=tuple((turn.text, len(turn.token_ids)) for turn in answered if turn.is_sampled),
    )
