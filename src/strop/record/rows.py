"""A step's rollouts as rows: summary columns for a list, and one whole rollout on request.

Texts are searched and cut in Arrow: a list of 512 rollouts takes milliseconds, while decoding them takes
hundreds. All functions take the bytes of a rollouts' file, which may come from a directory or a store.

Importing this module imports pyarrow, so `strop.record` does not import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strop.errors import StoreError
from strop.record.rollouts import StoredRollout, opened, to_stored

SHOWN_CHARACTERS = 200

_PLAIN = (
    "task",
    "example_id",
    "sample_index",
    "reward",
    "is_correct",
    "format_ok",
    "truncated",
    "timed_out",
    "num_sampled_tokens",
    "status",
    "staleness",
)
_LISTED = (*_PLAIN, "failure.owner", "failure.kind", "turns.list.element.text", "reply_text")
_SEARCHED = ("turns.list.element.text", "extracted")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """The summary of one rollout in a list."""

    index: int
    """Its row in the file, from 0."""
    task: str
    example_id: str
    sample_index: int
    reward: float | None
    is_correct: bool | None
    format_ok: bool | None
    truncated: bool
    timed_out: bool
    failure: str | None
    """Owner and kind: 'infra: timeout'."""
    num_sampled_tokens: int
    num_turns: int
    """Prompts and observations included."""
    status: str | None
    """As in `StoredRollout`."""
    staleness: int | None
    """As in `StoredRollout`."""
    prompt: str
    """The first 200 characters of the first turn."""
    prompt_end: str
    """Its last 200: after a long system prompt they hold the question."""
    reply: str
    """The first 200 characters of the policy's last turn; empty if it has none."""


def list_rows(data: bytes, name: str) -> list[RolloutRow]:
    """Return the summaries of all rollouts of a file's bytes.

    Raises: CorruptRecord, naming the file, if strop did not write these bytes.
    """
    with opened(data, name) as file:
        table = file.read(columns=list(_LISTED), use_threads=False).combine_chunks()
        offsets, texts = _split_turns(table)
        num_turns = np.diff(offsets)
        # A rollout without turns has no first one.
        firsts = pa.array(offsets[:-1], mask=num_turns == 0)
        failures = table["failure"].to_pylist()
        columns = {column: table[column].to_pylist() for column in _PLAIN}
        columns |= {
            "failure": [failure and f"{failure['owner']}: {failure['kind']}" for failure in failures],
            "num_turns": num_turns.tolist(),
            "prompt": _cut(texts.take(firsts)),
            "prompt_end": _cut(texts.take(firsts), start=-SHOWN_CHARACTERS),
            "reply": _cut(table["reply_text"]),
        }
    names = tuple(columns)
    return [
        RolloutRow(index=index, **dict(zip(names, row, strict=True)))
        for index, row in enumerate(zip(*columns.values(), strict=True))
    ]


def find_rows(data: bytes, name: str, text: str) -> list[int]:
    """Return the rows with a text in a turn (prompts too) or in the extracted answer, ignoring case.

    Raises: like `list_rows`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a character: no stored text holds it.
        return []
    with opened(data, name) as file:
        table = file.read(columns=list(_SEARCHED), use_threads=False).combine_chunks()
        offsets, texts = _split_turns(table)
        # Number of matching turns before each turn; a row's number is the difference at its offsets.
        num_before = np.concatenate([[0], np.cumsum(_holds(texts, text))])
        is_found = np.diff(num_before[offsets]) > 0
        return np.flatnonzero(is_found | _holds(table["extracted"], text)).tolist()


def read_row(data: bytes, name: str, index: int) -> StoredRollout:
    """Return one rollout whole.

    Raises: like `list_rows`; StoreError if there is no such row.
    """
    with opened(data, name) as file:
        if 0 <= index < file.metadata.num_rows:
            (row,) = file.read().slice(index, 1).to_pylist(maps_as_pydicts="strict")
            return to_stored(row)
    raise StoreError(
        f"{name} has no row {index}",
        allowed="the index of a row that `list_rows` shows",
        next_step="list the file's rows anew",
    )


def _split_turns(table: pa.Table) -> tuple[Any, Any]:
    """Return the offsets of each row's turns, and the texts of all turns."""
    turns = table["turns"].combine_chunks()
    turns = turns.chunk(0) if isinstance(turns, pa.ChunkedArray) else turns
    return turns.offsets.to_numpy(), turns.values.field("text")


def _cut(texts: Any, *, start: int = 0) -> list[str]:
    cut = pc.utf8_slice_codeunits(texts, start=start, stop=None if start else SHOWN_CHARACTERS)
    return pc.fill_null(cut, "").to_pylist()  # type: ignore[no-any-return]


def _holds(texts: Any, text: str) -> Any:
    # Not `ignore_case`: that compiles a regular expression, which a long text makes too large.
    wanted = pc.utf8_lower(pa.scalar(text)).as_py()
    found = pc.match_substring(pc.utf8_lower(texts), pattern=wanted)
    return pc.fill_null(found, False).to_numpy(zero_copy_only=False)
