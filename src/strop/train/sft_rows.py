"""Demonstrations from a data file; what a row may hold is `tasks.rows.demonstrations`.

Conversations are extended turn by turn as rollouts are: replies keep their ids, and where the chat
template rewrites what was said, a new demonstration begins. Every reply is followed by the terminator,
exactly once, whether or not the row has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from strop.environments.conversation import encode_next_messages
from strop.errors import ConfigError
from strop.rollout import FinishReason, IntArray
from strop.spec.sft import SftSpec
from strop.tasks.prompt import render_prompt
from strop.tasks.rows.demonstrations import SPEAKER, SftRow, malformed, read_sft_row, refuse_double_names
from strop.tasks.rows.layout import read_rows
from strop.tokenizer import Tokenizer
from strop.train.demonstrations import Candidate, Demonstration, Demonstrations, Framing, Sieve, require_some

_MAX_SHOWN = 5


def read_file_demonstrations(spec: SftSpec, path: Path, framing: Framing) -> Demonstrations:
    """Read the demonstrations of a data file.

    Raises: DataError naming the row, for one that is malformed; or if none is left, or too many do not fit.
    """
    assert spec.source is not None
    rows = [read_sft_row(row, spec.train_on) for row in read_rows(path)]
    refuse_double_names(rows)
    chosen = [row for row in rows if spec.subset in (None, row.source)]
    require_some(spec.source, rows, "it has no row")
    names = Counter("none" if row.source is None else repr(row.source) for row in rows)
    seen = ", ".join(f"{number} of source {name}" for name, number in names.most_common(_MAX_SHOWN))
    require_some(spec.source, chosen, f"sft.subset={spec.subset!r} chose none of its rows, {seen}")
    sieve = Sieve(framing=framing)
    for row in chosen:
        for candidate in render_row(row, framing):
            sieve.add(candidate)
    return Demonstrations(
        source=spec.source,
        members=sieve.finish(spec.source, spec.max_dropped_frac),
        problems=frozenset(" ".join(row.problem.split()) for row in chosen if row.problem),
        counts={"rows of other sources": len(rows) - len(chosen), **sieve.counts},
    )


@dataclass(kw_only=True, slots=True)
class _Piece:
    """Ids that the model sees in one piece: a prompt, then replies and what stands between them."""

    prompt_ids: IntArray
    ids: list[IntArray] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    """Of each part of `ids`: what was replied, or None between replies."""


def render_row(row: SftRow, framing: Framing) -> list[Candidate]:
    """Return the demonstrations of a row: one, or more where the template rewrites what was said.

    Raises: DataError naming the row, if the template refuses its messages or a text holds a terminator.
    """
    try:
        pieces = list(_walk(row, framing))
    except ConfigError as error:
        raise malformed(
            row, f"cannot be rendered: {error}", "messages that the model's chat template takes"
        ) from error
    if row.train_on == "all" and len(pieces) > 1:
        allowed = "train_on = assistant or last with this model, or a conversation with one reply"
        raise malformed(row, "is trained on in full, and the chat template rewrites what was said", allowed)
    if row.train_on == "last":
        pieces = pieces[-1:]
        pieces[0].texts[:-1] = [None] * (len(pieces[0].texts) - 1)
    return [_to_candidate(piece, row) for piece in pieces]


def _walk(row: SftRow, framing: Framing) -> Iterator[_Piece]:
    """Extend a conversation reply by reply; begin a new piece where it cannot be extended."""
    tokenizer, messages, chosen = framing.tokenizer, row.messages, framing.prompt_format
    places = [index for index, message in enumerate(messages) if message.role == SPEAKER]
    piece = _Piece(prompt_ids=render_prompt(tokenizer, messages[: places[0]], chosen)[1])
    for index, place in enumerate(places):
        text, reply_ids = _encode_reply(tokenizer, row, messages[place].content)
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


def _encode_reply(tokenizer: Tokenizer, row: SftRow, text: str) -> tuple[str, IntArray]:
    """Return a reply's text without terminators, and its ids with exactly one at the end."""
    ends = [tokenizer.token_text(token_id) for token_id in tokenizer.stop_token_ids]
    while end := next((end for end in ends if text.rstrip().endswith(end)), None):
        text = text.rstrip().removesuffix(end)
    token_ids = tokenizer.encode(text)
    if not len(token_ids) or set(token_ids.tolist()) & tokenizer.stop_token_ids:
        raise malformed(
            row, "has a reply that is only a terminator, or goes on behind one", "one terminator, at the end"
        )
    return text, np.append(token_ids, np.int32(tokenizer.eos_id))


def _to_candidate(piece: _Piece, row: SftRow) -> Candidate:
    prompt_ids, reply_ids = piece.prompt_ids, np.concatenate(piece.ids)
    num_asked = len(prompt_ids)
    marks = [np.full(len(ids), text is not None) for ids, text in zip(piece.ids, piece.texts, strict=True)]
    is_trained = np.concatenate(marks)
    if row.train_on == "all":
        # The first token has nothing before it that could predict it.
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
