"""A row that holds a demonstration: one JSON table per line, or a row of Parquet.

prompt or messages   the prompt: a text, or a list of {role, content}
completion           the reply; may be absent if messages end in one
prompt_id            name of the prompt; default: a hash of the prompt
problem              the problem behind the prompt; never one that the run evaluates on
gold                 the right answer to it; only the task sft-jsonl reads it
source               origin of the row; sft.subset selects by it
weight               weight of each of its tokens in the loss, above 0; default 1
train_on             assistant, last or all; default: sft.train_on
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.errors import DataError
from strop.rollout import Message
from strop.tasks.answers import show_answer
from strop.tasks.rows.layout import Row, bad_row

KEYS = ("prompt", "messages", "completion", "prompt_id", "problem", "gold", "source", "weight", "train_on")
_TRAIN_ON = ("assistant", "last", "all")
SPEAKER = "assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRow:
    """One row in its checked form."""

    messages: tuple[Message, ...]
    """The last one is a reply."""
    prompt_id: str
    problem: str | None
    gold: str | None
    source: str | None
    weight: float
    train_on: str
    place: str


def read_sft_row(row: Row, train_on: str = _TRAIN_ON[0]) -> SftRow:
    """Check one row; `train_on` is the default of the row's key.

    Raises: DataError naming the row and the fault.
    """
    # Parquet has every column in every row.
    values = {key: value for key, value in row.values.items() if value is not None}
    if unknown := sorted(values.keys() - set(KEYS)):
        raise malformed(row, f"has the unknown keys {unknown}", ", ".join(KEYS))
    messages = _read_messages(row, values)
    texts = {key: _read_text(row, values, key) for key in ("prompt_id", "problem", "gold", "source")}
    prompt = json.dumps([(message.role, message.text) for message in messages[:-1]])
    train_on = values.get("train_on", train_on)
    if train_on not in _TRAIN_ON:
        raise malformed(row, f"has train_on={train_on!r}", ", ".join(_TRAIN_ON))
    weight = values.get("weight", 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight <= 0.0:
        raise malformed(row, f"has weight={weight!r}", "a number above 0; leave a row out to give it none")
    return SftRow(
        messages=messages,
        prompt_id=texts["prompt_id"] or hashlib.sha256(prompt.encode()).hexdigest()[:16],
        problem=texts["problem"],
        gold=texts["gold"],
        source=texts["source"],
        weight=float(weight),
        train_on=train_on,
        place=row.place,
    )


def _read_messages(row: Row, values: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the prompt and the reply, which is the last message."""
    if ("prompt" in values) == ("messages" in values):
        raise malformed(row, "has both prompt and messages, or neither", "one of the two")
    if "prompt" in values:
        prompt, completion = (_read_text(row, values, key) for key in ("prompt", "completion"))
        if prompt is None or completion is None:
            raise malformed(row, "has a prompt and no completion", "a completion with every prompt")
        return Message(role="user", content=prompt), Message(role=SPEAKER, content=completion)
    tables = values["messages"]
    if not isinstance(tables, list) or not tables:
        raise malformed(row, "has messages that are no list, or an empty one", "a list of {role, content}")
    messages = tuple(_read_message(row, table) for table in tables)
    completion = _read_text(row, values, "completion")
    if completion is not None:
        messages = (*messages, Message(role=SPEAKER, content=completion))
    roles = [message.role for message in messages]
    if roles[-1] != SPEAKER or roles[0] == SPEAKER:
        raise malformed(row, f"has roles {roles}", "a question first and a reply of the assistant last")
    if any(role == following == SPEAKER for role, following in itertools.pairwise(roles)):
        raise malformed(row, f"has roles {roles}", "something between two replies of the assistant")
    return messages


def _read_message(row: Row, value: Any) -> Message:
    # Parquet has the keys of all messages in every one.
    parts = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    is_whole = all(isinstance(part, str) and part.strip() for part in parts.values())
    if parts.keys() != {"role", "content"} or not is_whole:
        allowed = "tables of role and content, texts that are not empty, and nothing else"
        raise malformed(row, f"has the message {str(value)[:80]}", allowed)
    return Message(role=value["role"], content=value["content"])


def _read_text(row: Row, values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    if key == "gold" and isinstance(value, bool | int | float):
        return show_answer(value)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise malformed(row, f"has {key}={str(value)[:80]!r}", f"{key} as a text that is not empty")


def refuse_double_names(rows: Sequence[SftRow]) -> None:
    """Refuse one prompt_id for two prompts. Raises: DataError naming both rows."""
    first_by_id: dict[str, SftRow] = {}
    for row in rows:
        first = first_by_id.setdefault(row.prompt_id, row)
        if first.messages[:-1] != row.messages[:-1]:
            raise DataError(
                f"prompt_id={row.prompt_id!r} names different prompts in {first.place} and {row.place}",
                allowed="one prompt for a prompt_id; several replies to it are fine",
                next_step="give each prompt its own prompt_id, or leave the key out",
            )


def malformed(row: Row | SftRow, fault: str, allowed: str) -> DataError:
    """Return the error for a malformed row."""
    return bad_row(f"{row.place} {fault}", allowed=allowed)
