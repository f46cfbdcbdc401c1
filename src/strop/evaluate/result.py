"""A stored score: what was measured, by which protocol, on which model, and whether it can count.

A score never stands alone. It is stored with everything that could have changed it: task version,
split, examples, stops, budget and sampling. A file that lacks one of them is unreadable, not a score
with defaults. What two of them have in common is `comparison`'s business.

Shares are in [0, 1]. None stands where nothing was measured; a rollout that could not be judged is
unscored, and unscored is never wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.io import write_bytes_atomically
from strop.rollout import Sampling, Split
from strop.tasks.failures import FailureCause, sum_up

PROTOCOL_FIELDS = (
    "task",
    "task_version",
    "replies_version",
    "split",
    "num_examples",
    "examples_digest",
    "tokenizer_digest",
    "prompt_format",
    "max_reply_tokens",
    "sampling",
    "num_samples",
    "pass_threshold",
)
"""What must agree before two scores may be compared. The task's version covers its prompt, stop
strings and verifier; the tokenizer's digest covers chat template and terminators."""

SUSPECT_TRUNCATED_FRAC = 0.02
"""Share of cut replies above which a score is marked: some of them might have been right."""
_CONTENT_DIGEST = "content_digest"
"""Key of a stored result beside its fields: a hash over all of them."""
_ROUNDING = 1e-9


class Validity(StrEnum):
    """Whether a result may be believed, compared and reported."""

    VALID = "valid"
    TRUNCATION = "invalid: truncation"
    """Replies were cut by a budget below the task's own."""
    UNSCORED = "invalid: unscored"
    """Too many rollouts could not be judged; the rest may not be typical."""
    VERIFIER = "invalid: verifier errors"
    """The verifier failed too often: it raised, crashed or ran out of its own time."""


class Record(BaseModel):
    """A stored record, or a part of one."""

    # Strict and closed: a result of another form is unreadable rather than half understood.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ExampleScore(Record):
    """The rollouts of one kind of one example."""

    problem: str | None = None
    """What all examples that pose its problem have in common; None where it is a problem of its own."""
    num_judged: int
    """Rollouts that are known to be right or wrong."""
    solved_frac: float | None
    """Share of them that is solved; None if there is none."""
    format_ok_frac: float | None
    """Share in the asked form, among those whose task can tell."""
    in_format_solved_frac: float | None
    """Solved share of those in the asked form; None if none is."""
    reward_mean: float | None


class Summary(Record):
    """How good the rollouts of one kind, greedy or sampled, were over some examples."""

    accuracy: float | None
    """Mean over examples of the solved share of their judged rollouts; None if none was judged."""
    low: float
    high: float
    """Ends of the 95 % interval, over problems."""
    num_samples: int
    """Rollouts per example that were asked for."""
    num_rollouts: int
    num_too_long: int
    """Rollouts not attempted because the prompt leaves no room for a reply; they count as not solved."""
    num_unscored: int
    """Rollouts that could not be judged; they are in no mean."""
    verifier_error_frac: float
    """Share of all rollouts whose verifier raised, crashed or ran out of its own time; they are unscored."""
    failures: dict[str, int]
    """Rollouts without a verdict, by kind of failure."""
    timed_out_frac: float | None
    """Share of the judged replies whose code used up its time: wrong ones, told apart from others."""
    truncated_frac: float | None
    """Share of the judged replies that were cut."""
    cut_unsolved_frac: float | None
    """Share of the judged replies that were cut and not solved; more room might have solved them."""
    format_ok_frac: float | None
    """Share of answers in the asked form, among rollouts whose task can tell; apart from being right."""
    reply_tokens_mean: float | None
    reward_mean: float | None
    profile_area: float | None = None
    """Area under the performance profile (AUP), the mean over tasks; None where the task is no suite whose
    best scores are known."""


class Score(Summary):
    """The same over all examples of an evaluation, and each of them."""

    by_example: dict[str, ExampleScore]
    """By example id."""

    @model_validator(mode="after")
    def _check_accuracy(self) -> Self:
        _require_mean(self, self.by_example.values(), "")
        return self


class PassAtK(Record):
    """How probable it is that one of k sampled rollouts solves an example, over examples."""

    value: float | None
    """None where no example has k judged rollouts."""
    low: float
    high: float
    """Ends of the 95 % interval, over problems."""
    num_examples: int
    """Examples that are counted."""
    num_left_out: int
    """Examples with fewer than k judged rollouts: a failure of ours must not count as one of the model's."""


class PartScores(Record):
    """What one part of a mixture has to do with the scores of the whole."""

    task: str
    example_ids: list[str]
    greedy: Summary
    sampled: Summary | None
    pass_at_k: dict[Annotated[int, Field(strict=False)], PassAtK]

    @property
    def scores(self) -> dict[str, Summary]:
        """The scores there are, by the kind of rollouts."""
        found = {"greedy": self.greedy, "sampled": self.sampled}
        return {name: score for name, score in found.items() if score is not None}


def _require_mean(score: Summary, examples: Iterable[ExampleScore], place: str) -> None:
    """Refuse an accuracy that is not the mean of its examples'. Raises: ValueError with both."""
    shares = [example.solved_frac for example in examples if example.solved_frac is not None]
    expected = sum(shares) / len(shares) if shares else None
    if expected is None or score.accuracy is None:
        is_mean = score.accuracy is expected
    else:
        is_mean = abs(score.accuracy - expected) <= _ROUNDING
    if not is_mean:
        raise ValueError(f"{place}accuracy is {score.accuracy}, and the mean of its examples is {expected}")


class EvalPlan(Record):
    """What is evaluated, and how: everything that is known before the first reply."""

    task: str
    variant: str | None = None
    """Which of the tasks of that name, such as a data set of reasoning-gym; None where there is one only."""
    task_version: str
    """Of the task that judges."""
    replies_version: str
    """Of the task that posed and ended the replies; another one where they were judged anew."""
    split: Split
    step: int
    """Steps behind the model."""
    model_digest: str
    dtype: str | None
    """Number format that the weights were served in; None where it is not known."""
    dtype_reason: str | None = None
    """Why it was that one; no part of the plan's identity."""
    tokenizer_digest: str
    prompt_format: str
    num_examples: int
    examples_digest: str
    """Hash over the example ids, which are hashes of content."""
    run_seed: int
    max_reply_tokens: int
    """Of a mixture, the largest of its parts'."""
    part_reply_tokens: dict[str, int] = {}
    """Budgets of a mixture's parts, by label."""
    stop_strings: list[str] | None = None
    """Texts that end a reply beside the model's terminator; None where that was not recorded."""
    first_prompt: str | None = None
    """The first example as the model is asked; None where that was not recorded."""
    sampling: Sampling
    """Distribution of the sampled rollouts."""
    num_samples: int | None
    """Sampled rollouts per example; None: greedy only."""
    pass_threshold: float | None
    """Reward from which on a rollout counts as solved; None: what the task calls correct."""

    @property
    def identity(self) -> EvalPlan:
        """The plan alone, where this is more than a plan."""
        fields = {name: getattr(self, name) for name in EvalPlan.model_fields}
        return EvalPlan.model_validate(fields | {"dtype_reason": None})

    @property
    def full_name(self) -> str:
        """Task and variant, for example 'reasoning-gym/chain_sum'."""
        return self.task if self.variant is None else f"{self.task}/{self.variant}"

    def budget_of(self, part: str | None) -> int:
        """Tokens that a reply to an example of a part may have; None: the task has no parts."""
        return self.part_reply_tokens.get(part or "", self.max_reply_tokens)

    @property
    def digest(self) -> str:
        """Hash over all fields of the plan."""
        return self._hash(EvalPlan.model_fields.keys() - {"dtype_reason"})

    def _hash(self, names: Collection[str]) -> str:
        values = self.model_dump(mode="json", include=set(names))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class EvalResult(EvalPlan):
    """One evaluation of one model on one split of one task."""

    policy_version: int
    """Version that the engine served; one for all rollouts."""
    greedy: Score
    sampled: Score | None
    # Keys of a JSON object are texts, so they are read as numbers.
    pass_at_k: dict[Annotated[int, Field(strict=False)], PassAtK]
    """By k; empty where none was asked for."""
    parts: dict[str, PartScores] = {}
    """Of a mixture, each part by its label."""
    causes: list[FailureCause] = []
    """What kept rollouts from being judged, the commonest first."""
    validity: Validity
    audit: str | None = None
    """Verdict of the audit that this user made of the task's version; None where there is none."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def protocol_digest(self) -> str:
        """Hash over everything in `PROTOCOL_FIELDS`; equal for scores that may be compared."""
        return self._hash(PROTOCOL_FIELDS)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def truncation_suspect(self) -> bool:
        """Whether so many replies were cut that the score may say more about the budget than the model."""
        return any((score.truncated_frac or 0.0) > SUSPECT_TRUNCATED_FRAC for score in self.scores.values())

    @model_validator(mode="before")
    @classmethod
    def _take_computed(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        beside = {*cls.model_computed_fields, _CONTENT_DIGEST}
        return {name: value for name, value in values.items() if name not in beside}

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if len(self.greedy.by_example) != self.num_examples:
            raise ValueError(f"{self.num_examples} examples, but the greedy score lists another number")
        for label, part in self.parts.items():
            for kind, score in part.scores.items():
                by_example = self.scores[kind].by_example
                _require_mean(
                    score, [by_example[name] for name in part.example_ids], f"parts.{label}.{kind}: "
                )
        return self

    @property
    def scores(self) -> dict[str, Score]:
        """The scores there are, by the kind of rollouts."""
        found = {"greedy": self.greedy, "sampled": self.sampled}
        return {name: score for name, score in found.items() if score is not None}

    @property
    def is_valid(self) -> bool:
        """Whether the scores may be believed."""
        return self.validity is Validity.VALID

    @property
    def verdict(self) -> str:
        """Whether the scores may be believed, behind what kept rollouts from being judged."""
        return f"{self.lost}{self.validity.value}"

    @property
    def lost(self) -> str:
        """What kept rollouts from being judged, as the begin of a line; empty where nothing did."""
        num_rollouts = sum(score.num_rollouts for score in self.scores.values())
        return f"{sum_up(self.causes, num_rollouts)}; " if self.causes else ""


def digest_examples(example_ids: list[str]) -> str:
    """Return a hash over example ids, which does not depend on their order."""
    return hashlib.sha256("\n".join(sorted(example_ids)).encode()).hexdigest()[:16]


def result_name(plan: EvalPlan) -> str:
    """Return the file name of a result, for example 'arithmetic-step-000020.json'.

    The held-out split is the usual one; any other stands in the name.
    """
    task = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.full_name)
    split = "" if plan.split is Split.HELD_OUT else f"-{plan.split.value}"
    return f"{task}{split}-step-{plan.step:06d}.json"


def dump_result(result: EvalResult) -> dict[str, Any]:
    """Return a result as JSON values, sealed with a hash over them."""
    # As a file gives them back: keys of a table are texts there.
    values: dict[str, Any] = json.loads(result.model_dump_json())
    return {**values, _CONTENT_DIGEST: _digest_content(values)}


def write_result(result: EvalResult, path: Path) -> None:
    """Write a result as JSON, complete or not at all.

    Raises: StoreError if the file cannot be written.
    """
    text = json.dumps(dump_result(result), indent=1, ensure_ascii=False)
    write_bytes_atomically(path, (text + "\n").encode())


def _digest_content(values: Mapping[str, Any]) -> str:
    """Hash what stands in a file, so that fields that a later version adds leave the digest as it was."""
    content = {name: value for name, value in values.items() if name != _CONTENT_DIGEST}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_result(path: Path) -> EvalResult:
    """Read a result. Raises: StoreError if the file cannot be read; CorruptRecord, see `parse_result`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"the result {path} cannot be read ({error})",
            allowed="a file that an evaluation wrote",
            next_step="check the path, or run the evaluation again",
        ) from error
    return parse_result(data, path)


def parse_result(data: bytes, path: Path | str) -> EvalResult:
    """Return the result that a file's bytes are; `path` names it.

    Raises: CorruptRecord if a field is missing, unknown or of the wrong type, if the file was changed since
        it was written, or an accuracy is not that of its examples. A file of a version that did not
        seal results has no digest over all fields; the rest holds for it.
    """
    try:
        result = EvalResult.model_validate_json(data)
        values = json.loads(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise _unreadable(path, f"{where}: {first['msg']}") from error
    stored = values.get("protocol_digest")
    if stored != result.protocol_digest:
        raise _unreadable(path, f"protocol_digest is {stored}, its fields give {result.protocol_digest}")
    if values.get(_CONTENT_DIGEST, _digest_content(values)) != _digest_content(values):
        raise _unreadable(path, "it was changed after it was written: its content_digest is another one")
    return result


def _unreadable(path: Path | str, cause: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path} is not a complete result ({cause})",
        allowed="a score stored with its split, counts, task version and digests, as it was written",
        next_step="run the evaluation again",
    )


def refuse_invalid(result: EvalResult) -> None:
    """Refuse a result that may not be believed.

    Raises: CheckRefused, exit code 76, with the cause and the numbers behind it.
    """
    if result.is_valid:
        return
    scores = list(result.scores.values())
    cut = max(score.truncated_frac or 0.0 for score in scores)
    lost = sum(score.num_unscored for score in scores)
    total = sum(score.num_rollouts for score in scores)
    failed = max(score.verifier_error_frac for score in scores)
    raise CheckRefused(
        f"{result.lost}the result of {result.task} at step {result.step} is {result.validity}: a share of"
        f" {cut:.3f} of replies was cut at {result.max_reply_tokens} tokens, {lost} of {total} rollouts"
        f" unscored, the verifier failed on a share of {failed:.3f}",
        allowed="results that are valid",
        next_step="evaluate with the task's own reply budget: leave task.max_reply_tokens out"
        if result.validity is Validity.TRUNCATION
        else "mend what kept the rollouts from being judged and evaluate again",
    )


def write_order(result: EvalResult, path: Path) -> None:
    """Write the solved share of each example as JSON lines, the easiest first.

    The first line says task, version, split and model. Each further one has `example_id`, `solved_frac`
    (in [0, 1]) and `num_samples`, the judged rollouts behind it: sampled ones where there are any,
    greedy ones otherwise. Ties stand in the order of their ids. Examples that could not be judged have
    `solved_frac` null and stand last: left out, their ids would not match the task's.

    Raises: CheckRefused if the result is invalid; StoreError if the file cannot be written.
    """
    refuse_invalid(result)
    score = result.greedy if result.sampled is None else result.sampled
    header = {
        "task": result.task,
        "task_version": result.task_version,
        "split": result.split.value,
        "model_digest": result.model_digest,
        "num_examples": result.num_examples,
    }

    def rank(example_id: str) -> tuple[bool, float, str]:
        solved_frac = score.by_example[example_id].solved_frac
        return solved_frac is None, -(solved_frac or 0.0), example_id

    rows = [
        {
            "example_id": example_id,
            "solved_frac": score.by_example[example_id].solved_frac,
            "num_samples": score.by_example[example_id].num_judged,
        }
        for example_id in sorted(score.by_example, key=rank)
    ]
    text = "".join(json.dumps(line) + "\n" for line in (header, *rows))
    write_bytes_atomically(path, text.encode())
