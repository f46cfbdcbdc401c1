"""Demonstrations from a data file: one JSON table a line, or a row of Parquet.

    prompt or messages   what is asked: a text, or a list of {role, content}
    completion           the reply; may be absent where messages end in one
    prompt_id            name of the prompt; default: a hash of what is asked
    problem              the problem behind the prompt; never one that the run evaluates on
    source               where the row is from; sft.subset chooses by it
    weight               weight of each of its tokens in the loss, above 0; default 1
    train_on             assistant, last or all; default: sft.train_on

Conversations are extended turn by turn as rollouts are: replies keep their ids, and where the chat
template rewrites what was said, a new demonstration begins. Every reply is followed by the terminator,
exactly once, whether or not the row has it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strop.environments.conversation import encode_next_messages
from strop.errors import ConfigError, DataError, explain_refusal
from strop.rollout import FinishReason, IntArray, Message
from strop.spec.sft import SftSpec
from strop.tasks.prompt import render_prompt
from strop.tasks.rows.layout import Row, read_rows
from strop.tokenizer import Tokenizer
from strop.train.demonstrations import Candidate, Demonstration, Demonstrations, Framing, Sieve, require_some

KEYS = ("prompt", "messages", "completion", "prompt_id", "problem", "source", "weight", "train_on")
_MAX_SHOWN = 5
_TRAIN_ON = ("assistant", "last", "all")
_SPEAKER = "assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRow:
    """One row in its checked form."""

    messages: tuple[Message, ...]
    """The last one is a reply."""
    prompt_id: str
    problem: str | None
    source: str | None
    weight: float
    train_on: str
    place: str


def read_file_demonstrations(spec: SftSpec, path: Path, framing: Framing) -> Demonstrations:
    """Read the demonstrations of a data file.

    Raises: DataError naming the row, for one that is malformed; or if none is left, or too many do not fit.
    """
    assert spec.source is not None
    rows = [read_row(row, spec.train_on) for row in read_rows(path)]
    _refuse_double_names(rows)
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


def read_row(row: Row, train_on: str) -> SftRow:
    """Check one row; `train_on` holds where the row does not say.

    Raises: DataError naming the row and what is wrong.
    """
    # Parquet has every column in every row.
    values = {key: value for key, value in row.values.items() if value is not None}
    unknown = sorted(values.keys() - set(KEYS))
    if unknown:
        raise _malformed(row, f"has the unknown keys {unknown}", ", ".join(KEYS))
    messages = _read_messages(row, values)
    texts = {key: _read_text(row, values, key) for key in ("prompt_id", "problem", "source")}
    asked = json.dumps([(message.role, message.content) for message in messages[:-1]])
    chosen = values.get("train_on", train_on)
    if chosen not in _TRAIN_ON:
        raise _malformed(row, f"has train_on={chosen!r}", ", ".join(_TRAIN_ON))
    return SftRow(
        messages=messages,
        prompt_id=texts["prompt_id"] or hashlib.sha256(asked.encode()).hexdigest()[:16],
        problem=texts["problem"],
        source=texts["source"],
        weight=_read_weight(row, values),
        train_on=chosen,
        place=row.place,
    )


def _read_messages(row: Row, values: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return what is asked and answered; a reply is the last of it."""
    if ("prompt" in values) == ("messages" in values):
        raise _malformed(row, "has both prompt and messages, or neither", "one of the two")
    if "prompt" in values:
        prompt, completion = (_read_text(row, values, key) for key in ("prompt", "completion"))
        if prompt is None or completion is None:
            raise _malformed(row, "has a prompt and no completion", "a completion with every prompt")
        return Message(role="user", content=prompt), Message(role=_SPEAKER, content=completion)
    listed = values["messages"]
    if not isinstance(listed, list) or not listed:
        raise _malformed(row, "has messages that are no list, or an empty one", "a list of {role, content}")
    messages = tuple(_read_message(row, one) for one in listed)
    completion = _read_text(row, values, "completion")
    if completion is not None:
        messages = (*messages, Message(role=_SPEAKER, content=completion))
    roles = [message.role for message in messages]
    if roles[-1] != _SPEAKER or roles[0] == _SPEAKER:
        raise _malformed(row, f"has roles {roles}", "a question first and a reply of the assistant last")
    if any(one == other == _SPEAKER for one, other in itertools.pairwise(roles)):
        raise _malformed(row, f"has roles {roles}", "something between two replies of the assistant")
    return messages


def _read_message(row: Row, value: Any) -> Message:
    is_table = isinstance(value, dict) and value.keys() == {"role", "content"}
    if not is_table or not all(isinstance(part, str) and part.strip() for part in value.values()):
        allowed = "tables of role and content, texts that are not empty, and nothing else"
        raise _malformed(row, f"has the message {str(value)[:80]}", allowed)
    return Message(role=value["role"], content=value["content"])


def _read_text(row: Row, values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise _malformed(row, f"has {key}={str(value)[:80]!r}", f"{key} as a text that is not empty")


def _read_weight(row: Row, values: Mapping[str, Any]) -> float:
    weight = values.get("weight", 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight <= 0.0:
        raise _malformed(row, f"has weight={weight!r}", "a number above 0; leave a row out to give it none")
    return float(weight)


def _refuse_double_names(rows: Sequence[SftRow]) -> None:
    """Raises: DataError if one prompt_id names two different prompts."""
    first: dict[str, SftRow] = {}
    for row in rows:
        known = first.setdefault(row.prompt_id, row)
        if known.messages[:-1] != row.messages[:-1]:
            raise DataError(
                explain_refusal(
                    f"prompt_id={row.prompt_id!r} names different prompts in {known.place} and {row.place}",
                    allowed="one prompt for a prompt_id; several replies to it are fine",
                    next_step="give each prompt its own prompt_id, or leave the key out",
                )
            )


def _malformed(row: Row | SftRow, given: str, allowed: str) -> DataError:
    return DataError(
        explain_refusal(f"{row.place} {given}", allowed=allowed, next_step="mend or remove the row")
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
        raise _malformed(
            row, f"cannot be rendered: {error}", "messages that the model's chat template takes"
        ) from error
    if row.train_on == "all" and len(pieces) > 1:
        allowed = "train_on = assistant or last with this model, or a conversation with one reply"
        raise _malformed(row, "is trained on in full, and the chat template rewrites what was said", allowed)
    if row.train_on == "last":
        pieces = pieces[-1:]
        pieces[0].texts[:-1] = [None] * (len(pieces[0].texts) - 1)
    return [_to_candidate(piece, row) for piece in pieces]


def _walk(row: SftRow, framing: Framing) -> Iterator[_Piece]:
    """Extend a conversation reply by reply; begin a new piece where it cannot be extended."""
    tokenizer, messages, chosen = framing.tokenizer, row.messages, framing.prompt_format
    places = [index for index, message in enumerate(messages) if message.role == _SPEAKER]
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
        raise _malformed(
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
