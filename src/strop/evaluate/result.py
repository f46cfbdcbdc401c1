"""A stored score: what was measured, by which protocol, on which model, and whether it can count.

A score never stands alone. It is stored with everything that could have changed it: task version,
split, examples, stops, budget and sampling. Two results whose protocols differ are never compared;
the refusal names the fields. A file that lacks one of them is unreadable, not a score with defaults.

Shares are in [0, 1]. None stands where nothing was measured; a rollout that could not be judged is
unscored, and unscored is never wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, computed_field, model_validator

from strop.errors import CheckRefused, CorruptRecord, StoreError, explain_refusal
from strop.evaluate.statistics import Interval, paired_difference
from strop.rollout import Sampling, Split
from strop.store import write_bytes_atomically

PROTOCOL_FIELDS = (
    "task",
    "task_version",
    "split",
    "num_examples",
    "examples_digest",
    "tokenizer_digest",
    "prompt_format",
    "max_reply_tokens",
    "sampling",
    "num_samples",
)
"""What must agree before two scores may be compared. The task's version covers its prompt, stop
strings and verifier; the tokenizer's digest covers chat template and terminators."""


class Validity(StrEnum):
    """Whether a result may be believed, compared and reported."""

    VALID = "valid"
    TRUNCATION = "invalid: truncation"
    """Replies were cut by a budget below the task's own."""
    UNSCORED = "invalid: unscored"
    """Too many rollouts could not be judged; the rest may not be typical."""


class _Record(BaseModel):
    # Strict and closed: a result of another form is unreadable rather than half understood.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Score(_Record):
    """How good the rollouts of one kind, greedy or sampled, were."""

    accuracy: float | None
    """Mean over examples of the solved share of their scored rollouts; None if none was scored."""
    low: float
    high: float
    """Ends of the 95 % interval, over examples."""
    num_samples: int
    """Rollouts per example that were asked for."""
    num_rollouts: int
    num_unscored: int
    """Rollouts that could not be judged; they are in no mean."""
    truncated_frac: float | None
    """Share of the scored rollouts whose reply was cut."""
    cut_unsolved_frac: float | None
    """Share of the scored rollouts that were cut and not solved; more room might have solved them."""
    format_ok_frac: float | None
    """Share of answers in the asked form, among rollouts whose task can tell; apart from being right."""
    reply_tokens_mean: float | None
    reward_mean: float | None
    solved_frac_by_example: dict[str, float | None]
    """By example id; None where no rollout of the example was scored."""


class EvalResult(_Record):
    """One evaluation of one model on one split of one task."""

    task: str
    task_version: str
    split: Split
    step: int
    """Optimizer steps behind the model."""
    model_digest: str
    policy_version: int
    """Version that the engine served; one for all rollouts."""
    tokenizer_digest: str
    prompt_format: str
    num_examples: int
    examples_digest: str
    """Hash over the example ids, which are hashes of content."""
    run_seed: int
    max_reply_tokens: int
    sampling: Sampling
    """Distribution of the sampled rollouts."""
    num_samples: int | None
    """Sampled rollouts per example; None: greedy only."""
    greedy: Score
    sampled: Score | None
    validity: Validity

    @computed_field  # type: ignore[prop-decorator]
    @property
    def protocol_digest(self) -> str:
        """Hash over everything in `PROTOCOL_FIELDS`; equal for scores that may be compared."""
        values = self.model_dump(mode="json", include=set(PROTOCOL_FIELDS))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @model_validator(mode="before")
    @classmethod
    def _take_protocol_digest(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if name != "protocol_digest"}

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if len(self.greedy.solved_frac_by_example) != self.num_examples:
            raise ValueError(f"{self.num_examples} examples, but the greedy score lists another number")
        return self

    @property
    def is_valid(self) -> bool:
        """Whether the scores may be believed."""
        return self.validity is Validity.VALID


def digest_examples(example_ids: list[str]) -> str:
    """Return a hash over example ids, which does not depend on their order."""
    return hashlib.sha256("\n".join(sorted(example_ids)).encode()).hexdigest()[:16]


def result_name(result: EvalResult) -> str:
    """Return the file name of a result, for example 'arithmetic-step-000020.json'.

    The held-out split is the usual one; any other stands in the name.
    """
    task = re.sub(r"[^A-Za-z0-9._-]+", "-", result.task)
    split = "" if result.split is Split.HELD_OUT else f"-{result.split.value}"
    return f"{task}{split}-step-{result.step:06d}.json"


def write_result(result: EvalResult, path: Path) -> None:
    """Write a result as JSON, complete or not at all.

    Raises: StoreError if the file cannot be written.
    """
    text = json.dumps(result.model_dump(mode="json"), indent=1, ensure_ascii=False)
    write_bytes_atomically(path, (text + "\n").encode())


def read_result(path: Path) -> EvalResult:
    """Read a result.

    Raises: StoreError if the file cannot be read; CorruptRecord if a field is missing, unknown or of
        the wrong type, or if the fields are not those that the protocol digest was made from.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(
            explain_refusal(
                f"the result {path} cannot be read ({error})",
                allowed="a file that an evaluation wrote",
                next_step="check the path, or run the evaluation again",
            )
        ) from error
    try:
        result = EvalResult.model_validate_json(data)
        stored = json.loads(data).get("protocol_digest")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise _unreadable(path, f"{where}: {first['msg']}") from error
    if stored != result.protocol_digest:
        raise _unreadable(path, f"protocol_digest is {stored}, its fields give {result.protocol_digest}")
    return result


def _unreadable(path: Path, cause: str) -> CorruptRecord:
    return CorruptRecord(
        explain_refusal(
            f"{path} is not a complete result ({cause})",
            allowed="a score stored with its split, counts, task version and digests, as it was written",
            next_step="run the evaluation again",
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """By how much accuracy changed on the same examples; None where a side has no score."""

    greedy: Interval | None
    sampled: Interval | None


def compare_results(before: EvalResult, after: EvalResult) -> Comparison:
    """Say by how much accuracy changed between two results of one protocol.

    Units: differences of accuracy in [-1, 1], with a 95 % interval over examples. An example that
        is unscored on one side is left out of both.
    Raises: CheckRefused if one result is invalid, or if their protocols differ.
    """
    refuse_invalid(before)
    refuse_invalid(after)
    _refuse_other_protocol(before, after)
    has_samples = before.sampled is not None and after.sampled is not None
    return Comparison(
        greedy=_change(before.greedy, after.greedy),
        sampled=_change(before.sampled, after.sampled) if has_samples else None,
    )


def refuse_invalid(result: EvalResult) -> None:
    """Refuse a result that may not be believed.

    Raises: CheckRefused, exit code 76, with the cause and the numbers behind it.
    """
    if result.is_valid:
        return
    scores = [result.greedy] + ([result.sampled] if result.sampled else [])
    cut = max(score.truncated_frac or 0.0 for score in scores)
    lost = sum(score.num_unscored for score in scores)
    total = sum(score.num_rollouts for score in scores)
    raise CheckRefused(
        explain_refusal(
            f"the result of {result.task} at step {result.step} is {result.validity}: a share of {cut:.3f}"
            f" of replies was cut at {result.max_reply_tokens} tokens, {lost} of {total} rollouts unscored",
            allowed="results that are valid",
            next_step="evaluate with the task's own reply budget: leave task.max_reply_tokens out"
            if result.validity is Validity.TRUNCATION
            else "mend what kept the rollouts from being judged and evaluate again",
        )
    )


def _refuse_other_protocol(before: EvalResult, after: EvalResult) -> None:
    one = before.model_dump(mode="json", include=set(PROTOCOL_FIELDS))
    other = after.model_dump(mode="json", include=set(PROTOCOL_FIELDS))
    different = [name for name in PROTOCOL_FIELDS if one[name] != other[name]]
    if different:
        shown = "; ".join(f"{name} {one[name]!r} and {other[name]!r}" for name in different)
        raise CheckRefused(
            explain_refusal(
                f"two results were measured by different protocols: {shown}",
                allowed="results that agree in " + ", ".join(PROTOCOL_FIELDS),
                next_step="evaluate both models with the same task, split and sampling",
            )
        )


def _change(before: Score | None, after: Score | None) -> Interval | None:
    if before is None or after is None:
        return None
    pairs = [
        (share, after.solved_frac_by_example[example_id])
        for example_id, share in sorted(before.solved_frac_by_example.items())
    ]
    scored = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not scored:
        return None
    return paired_difference([one for one, _ in scored], [other for _, other in scored])
