"""Rollouts as Parquet, one row each: exact enough to replay, plain enough to query for years.

`write_rollouts` and `read_rollouts` are inverse to each other. The columns `reward`, `reply_text` and
`num_sampled_tokens` follow from the others; with them a query needs no arithmetic. `list_rows`, `find_rows`
and `read_row` take a file's bytes, from a directory or a store, and decode only the columns that they show.

Each page has Parquet's own checksum, which is verified when it is read.

Importing this module imports pyarrow, so `strop.record` does not import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from strop.errors import CorruptRecord, StoreError, UnfitRecord
from strop.io.atomic import write_bytes_atomically
from strop.rollout import (
    Example,
    Failure,
    FailureOwner,
    FinishReason,
    FloatArray,
    Outcome,
    Rollout,
    Sampling,
    Turn,
    VersionSegment,
)

FORMAT = b"8"
_FORMAT_KEY = b"strop.rollouts"

_TURN = pa.struct(
    [
        ("role", pa.string()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),  # Null on turns that the policy did not speak.
        ("policy_version", pa.int64()),
        ("finish_reason", pa.string()),
        ("segments", pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int64())]))),
        ("advantages", pa.list_(pa.float32())),  # Null on turns that were not trained on.
    ]
)
_NAMED = pa.map_(pa.string(), pa.float64())
SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("example_id", pa.string()),
        ("fields", pa.string()),  # JSON
        ("answer", pa.string()),
        ("step", pa.int64()),
        ("sample_index", pa.int32()),
        ("turns", pa.list_(_TURN)),
        ("reward", pa.float64()),
        ("reward_parts", _NAMED),
        ("is_correct", pa.bool_()),
        ("format_ok", pa.bool_()),
        ("truncated", pa.bool_()),
        ("timed_out", pa.bool_()),
        ("extracted", pa.string()),
        ("isolation", pa.string()),
        ("metrics", _NAMED),
        ("turn_rewards", pa.list_(pa.float64())),
        ("failure", pa.struct([("owner", pa.string()), ("kind", pa.string()), ("detail", pa.string())])),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("seconds", _NAMED),
        ("reply_text", pa.string()),
        ("num_sampled_tokens", pa.int32()),
        ("status", pa.string()),
        ("staleness", pa.int64()),
    ],
    metadata={_FORMAT_KEY: FORMAT},
)


_REPEATING = [name for name in SCHEMA.names if name not in ("turns", "reply_text")]
_EXAMPLE = ("task", "example_id", "answer")
_JUDGED = ("is_correct", "format_ok", "truncated", "timed_out", "extracted", "isolation")
_SAMPLING = ("temperature", "top_p", "top_k")
_TRAINING_COLUMNS = ("status", "staleness")
_ROLLOUT_COLUMNS = [
    *(name for name in SCHEMA.names if name not in ("turns", *_TRAINING_COLUMNS)),
    *(f"turns.list.element.{field.name}" for field in _TURN if field.name != "advantages"),
]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredRollout:
    """One rollout with its use in training."""

    rollout: Rollout
    advantages: tuple[FloatArray | None, ...] = ()
    """The learner's advantage of each token of each turn; None for a turn that was not trained on. Those of a
    shared turn are in every rollout that has it. Empty: no turn has any."""
    status: str | None = None
    """The `train.generation.GroupStatus` of its group, 'unscored' in a trained one; None if not recorded."""
    staleness: int | None = None
    """Steps by which its oldest token is older than the weights that it trained; None if there is no token,
    or it is not recorded."""


def write_rollouts(
    path: Path, rollouts: Sequence[Rollout | StoredRollout], *, facts: Mapping[str, str] | None = None
) -> None:
    """Write rollouts, with their use in training or without, to a Parquet file atomically.

    `facts` go into the file's metadata, for `read_facts`.

    Raises: UnfitRecord if a text is not valid Unicode or a field is not JSON; StoreError if the disk fails.
    """
    stored = [one if isinstance(one, StoredRollout) else StoredRollout(rollout=one) for one in rollouts]
    try:
        table = pa.Table.from_pylist([_to_row(rollout) for rollout in stored], schema=SCHEMA)
    except (UnicodeEncodeError, TypeError, pa.ArrowException) as error:
        raise UnfitRecord(
            f"rollouts for {path.name} cannot be stored ({error})",
            allowed="valid Unicode texts, JSON fields, numbers in range",
            next_step="mend the task that made this example or judged this reply",
        ) from error
    metadata = {name.encode(): value.encode() for name, value in (facts or {}).items()}
    table = table.replace_schema_metadata({**metadata, _FORMAT_KEY: FORMAT})
    sink = pa.BufferOutputStream()
    # Token ids, log-probabilities and most texts repeat too little for a dictionary.
    pq.write_table(table, sink, compression="zstd", use_dictionary=_REPEATING, write_page_checksum=True)
    write_bytes_atomically(path, sink.getvalue().to_pybytes())


def read_rollouts(path: Path) -> list[Rollout]:
    """Read rollouts back, equal to those written.

    Raises: StoreError if there is no such file; CorruptRecord if strop did not write it.
    """
    with opened(_read_bytes(path), path) as file:
        rows = file.read(columns=_ROLLOUT_COLUMNS).to_pylist(maps_as_pydicts="strict")
        return [to_rollout(row) for row in rows]


def read_examples(path: Path) -> list[Example]:
    """Read the examples that the rollouts answer, each once, without decoding anything else.

    Raises: like `read_rollouts`.
    """
    with opened(_read_bytes(path), path) as file:
        rows = file.read(columns=[*_EXAMPLE, "fields"]).to_pylist()
        return [_to_example(row) for row in {row["example_id"]: row for row in rows}.values()]


def verify_rollouts(path: Path) -> None:
    """Read a whole file, whose pages have checksums, and decode nothing. Raises: like `read_rollouts`."""
    with opened(_read_bytes(path), path) as file:
        file.read()


def read_facts(path: Path) -> dict[str, str]:
    """Read the facts that were written with the rollouts, without decoding these.

    Raises: like `read_rollouts`.
    """
    with opened(_read_bytes(path), path) as file:
        return {name.decode(): value.decode() for name, value in file.schema_arrow.metadata.items()}


@contextmanager
def opened(data: bytes, place: Path | str) -> Iterator[pq.ParquetFile]:
    """Open the bytes of a file of rollouts, and decode them inside the block; `place` names the file.

    Raises: CorruptRecord if they are not the bytes that were written, or cannot be decoded.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        written = (file.schema_arrow.metadata or {}).get(_FORMAT_KEY) or b"none"
        if written != FORMAT:
            shown = written.decode(errors="replace")
            raise ValueError(f"its format is {shown}: another version of strop wrote it, and reads it")
        yield file
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
        raise CorruptRecord(
            f"{place} does not hold rollouts ({error})",
            allowed=f"a Parquet file written by strop, format {FORMAT.decode()}",
            next_step="restore the file from a copy, or remove it: a run goes on without it",
        ) from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror})",
            allowed="a rollouts file of a run",
            next_step="list the run's rollouts/ for the steps that it has",
        ) from error


def _to_row(stored: StoredRollout) -> dict[str, Any]:
    rollout = stored.rollout
    outcome, reply = rollout.outcome, rollout.reply
    advantages = stored.advantages or (None,) * len(rollout.turns)
    failure = outcome.failure
    return {
        **{name: getattr(rollout.example, name) for name in _EXAMPLE},
        "fields": json.dumps(dict(rollout.example.fields)),
        "step": rollout.step,
        "sample_index": rollout.sample_index,
        "turns": [
            {
                "role": turn.role,
                "text": turn.text,
                "token_ids": turn.token_ids,
                "logprobs": turn.logprobs,
                "policy_version": turn.policy_version,
                "finish_reason": turn.finish_reason and turn.finish_reason.value,
                "segments": [{"start": part.start, "version": part.version} for part in turn.segments],
                "advantages": of_tokens,
            }
            for turn, of_tokens in zip(rollout.turns, advantages, strict=True)
        ],
        "reward": outcome.reward,
        "reward_parts": list(outcome.parts.items()),
        **{name: getattr(outcome, name) for name in _JUDGED},
        "metrics": list(outcome.metrics.items()),
        "turn_rewards": list(outcome.turn_rewards),
        "failure": failure and {"owner": failure.owner.value, "kind": failure.kind, "detail": failure.detail},
        **{name: getattr(rollout.sampling, name) for name in _SAMPLING},
        "seconds": list(rollout.seconds.items()),
        "reply_text": reply.text if reply is not None else None,
        "num_sampled_tokens": rollout.num_sampled_tokens,
        "status": stored.status,
        "staleness": stored.staleness,
    }


def _to_array(values: list[float] | None) -> FloatArray | None:
    return None if values is None else np.array(values, dtype=np.float32)


def to_rollout(row: dict[str, Any]) -> Rollout:
    """Return the rollout of a row whose maps are dictionaries."""
    failure = row["failure"]
    outcome = Outcome(
        parts=row["reward_parts"],
        **{name: row[name] for name in _JUDGED},
        metrics=row["metrics"],
        turn_rewards=tuple(row["turn_rewards"]),
        failure=failure and Failure(**{**failure, "owner": FailureOwner(failure["owner"])}),
    )
    turns = tuple(
        Turn(
            role=turn["role"],
            text=turn["text"],
            token_ids=np.array(turn["token_ids"], dtype=np.int32),
            logprobs=_to_array(turn["logprobs"]),
            policy_version=turn["policy_version"],
            finish_reason=None if turn["finish_reason"] is None else FinishReason(turn["finish_reason"]),
            segments=tuple(VersionSegment(**segment) for segment in turn["segments"]),
        )
        for turn in row["turns"]
    )
    return Rollout(
        example=_to_example(row),
        step=row["step"],
        sample_index=row["sample_index"],
        turns=turns,
        outcome=outcome,
        sampling=Sampling(**{name: row[name] for name in _SAMPLING}),
        seconds=row["seconds"],
    )


def _to_example(row: dict[str, Any]) -> Example:
    return Example(fields=json.loads(row["fields"]), **{name: row[name] for name in _EXAMPLE})


SHOWN_CHARACTERS = 200
_SHOWN = (
    *("task", "example_id", "sample_index", "reward", *_JUDGED[:4]),
    *("num_sampled_tokens", "status", "staleness"),
)
_TEXTS = "turns.list.element.text"


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
    rows = _read_columns(data, name, (*_SHOWN, "failure.owner", "failure.kind", _TEXTS, "reply_text"))
    found = []
    for index, row in enumerate(rows):
        failure, texts = row["failure"], [turn["text"] for turn in row["turns"]] or [""]
        found.append(
            RolloutRow(
                index=index,
                failure=failure and f"{failure['owner']}: {failure['kind']}",
                num_turns=len(row["turns"]),
                prompt=texts[0][:SHOWN_CHARACTERS],
                prompt_end=texts[0][-SHOWN_CHARACTERS:],
                reply=(row["reply_text"] or "")[:SHOWN_CHARACTERS],
                **{column: row[column] for column in _SHOWN},
            )
        )
    return found


def find_rows(data: bytes, name: str, text: str) -> list[int]:
    """Return the rows with a text in a turn (prompts too) or in the extracted answer, ignoring case.

    Raises: like `list_rows`.
    """
    rows, wanted = _read_columns(data, name, (_TEXTS, "extracted")), text.lower()
    texts = ([*(turn["text"] for turn in row["turns"]), row["extracted"] or ""] for row in rows)
    return [index for index, of_row in enumerate(texts) if any(wanted in one.lower() for one in of_row)]


def read_row(data: bytes, name: str, index: int) -> StoredRollout:
    """Return one rollout whole.

    Raises: like `list_rows`; StoreError if there is no such row.
    """
    with opened(data, name) as file:
        if 0 <= index < file.metadata.num_rows:
            (row,) = file.read().slice(index, 1).to_pylist(maps_as_pydicts="strict")
            return StoredRollout(
                rollout=to_rollout(row),
                advantages=tuple(_to_array(turn["advantages"]) for turn in row["turns"]),
                status=row["status"],
                staleness=row["staleness"],
            )
    raise StoreError(
        f"{name} has no row {index}",
        allowed="the index of a row that `list_rows` shows",
        next_step="list the file's rows anew",
    )


def _read_columns(data: bytes, name: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    with opened(data, name) as file:
        found: list[dict[str, Any]] = file.read(columns=list(columns), use_threads=False).to_pylist()
        return found
