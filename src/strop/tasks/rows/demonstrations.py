"""A row that holds a demonstration: one JSON table per line, or a row of Parquet."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strop.errors import DataError
from strop.rollout import Message
from strop.tasks.rows.layout import Row, bad_row

SPEAKER = "assistant"
_Text = Annotated[str, Field(pattern=r"\S")]


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: _Text
    content: _Text


class _Columns(BaseModel):
    """The keys of a row."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: _Text | None = None
    messages: list[_Said] | None = Field(default=None, min_length=1)
    """The prompt, one of the two."""
    completion: _Text | None = None
    """The reply; may be absent if messages end in one."""
    problem: _Text | None = None
    """The problem behind the prompt; never one that the run evaluates on."""
    gold: _Text | bool | int | float | None = None
    """The right answer to it, for a task of these rows."""
    source: _Text | None = None
    """Origin of the row; sft.subset selects by it."""
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Weight of each of its tokens in the loss."""
    train_on: Literal["assistant", "last", "all"] | None = None
    """Default: sft.train_on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRow:
    """One row in its checked form."""

    messages: tuple[Message, ...]
    """The last one is a reply."""
    prompt_id: str
    """Hash of the prompt."""
    problem: str | None
    source: str | None
    weight: float
    train_on: str
    place: str


def read_sft_row(row: Row, train_on: str = SPEAKER) -> SftRow:
    """Check one row; `train_on` is the default of the row's key.

    Raises: DataError naming the row and the fault.
    """
    try:
        columns = _Columns.model_validate(_without_none(row.values))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        allowed = f"{fault['msg']}; keys are {', '.join(_Columns.model_fields)}"
        raise malformed(row, f"has {key}={fault['input']!r:.80}", allowed) from error
    if (columns.prompt is None) == (columns.messages is None):
        raise malformed(row, "has both prompt and messages, or neither", "one of the two")
    said = [(one.role, one.content) for one in columns.messages or ()] or [("user", columns.prompt or "")]
    said += [] if columns.completion is None else [(SPEAKER, columns.completion)]
    roles = [role for role, _ in said]
    pairs = itertools.pairwise(roles)
    if roles[-1] != SPEAKER or roles[0] == SPEAKER or any(one == other == SPEAKER for one, other in pairs):
        allowed = "a question first, a reply of the assistant last, and something between two replies"
        raise malformed(row, f"has roles {roles}", allowed)
    return SftRow(
        messages=tuple(Message(role=role, content=content) for role, content in said),
        prompt_id=hashlib.sha256(json.dumps(said[:-1]).encode()).hexdigest()[:16],
        problem=columns.problem,
        source=columns.source,
        weight=columns.weight,
        train_on=columns.train_on or train_on,
        place=row.place,
    )


def _without_none(value: Any) -> Any:
    """Return a value without the keys that Parquet, which has all keys in every row, fills with nothing."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if not hasattr(value, "items"):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}


def malformed(row: Row | SftRow, fault: str, allowed: str) -> DataError:
    """Return the error for a malformed row."""
    return bad_row(f"{row.place} {fault}", allowed=allowed)
