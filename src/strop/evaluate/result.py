"""A stored result: scores with their protocol, their model and their validity.

A score is stored with everything that could have changed it; a file that lacks a field, or was changed since,
is unreadable. Shares are in [0, 1]. None means not measured; a rollout that could not be judged is unscored,
which never counts as wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, computed_field

from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.io import write_bytes_atomically
from strop.rollout import Sampling, Split
from strop.tasks.failures import FailureCause, sum_up

PROTOCOL_FIELDS = (
    *("task", "task_version", "replies_version", "split", "num_examples", "examples_digest"),
    *("tokenizer_digest", "prompt_format", "max_reply_tokens", "sampling", "num_samples"),
)
"""Fields that comparable results share. The task's version covers its prompt, stop strings and verifier; the
tokenizer's digest covers chat template and terminators."""

SUSPECT_TRUNCATED_FRAC = 0.02
"""A score with a larger share of truncated replies is marked: some of them might have been right."""
_SEAL = "content_digest"


class Validity(StrEnum):
    """Whether a result may be compared and reported."""

    VALID = "valid"
    TRUNCATION = "invalid: truncation"
    """A budget below the task's own truncated replies."""
    UNSCORED = "invalid: unscored"
    """Too many rollouts could not be judged; the rest may not be representative."""
    VERIFIER = "invalid: verifier errors"
    """The verifier failed too often: it raised, crashed or ran out of its own time."""


class Record(BaseModel):
    """A stored record, or a part of one."""

    # Strict and closed: a result with other fields is unreadable.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ExampleScore(Record):
    """The rollouts of one kind of one example."""

    problem: str | None = None
    """Name shared by all examples of its problem; None if no other example poses it."""
    num_judged: int
    solved_frac: float | None
    """Solved share of the judged rollouts; None if there are none."""
    format_ok_frac: float | None
    """Share in the right format, among rollouts whose format was checked."""
    in_format_solved_frac: float | None
    """Solved share of those in the right format; None if there are none."""
    reward_mean: float | None


class Summary(Record):
    """Scores of the rollouts of one kind, greedy or sampled, over some examples."""

    accuracy: float | None
    """Mean over examples of the solved share of their judged rollouts; None if none was judged."""
    low: float
    high: float
    """Ends of the 95 % interval, over problems."""
    num_rollouts: int
    num_too_long: int
    """Rollouts whose prompt leaves no room for a reply; they count as not solved."""
    num_unscored: int
    """Rollouts that could not be judged; no mean includes them."""
    verifier_error_frac: float
    """Share of all rollouts whose verifier raised, crashed or ran out of its own time; they are unscored."""
    timed_out_frac: float | None
    """Share of the judged replies whose code timed out; they count as wrong."""
    truncated_frac: float | None
    format_ok_frac: float | None
    """Share in the right format, among rollouts whose format was checked; independent of correctness."""
    reply_tokens_mean: float | None
    reward_mean: float | None


class Score(Summary):
    """The summary over all examples of an evaluation, and the score of each example."""

    by_example: dict[str, ExampleScore]


class PassAtK(Record):
    """Probability that at least one of k sampled rollouts solves an example, as the mean over examples."""

    value: float | None
    """None if no example has k judged rollouts."""
    low: float
    high: float
    """Ends of the 95 % interval, over problems."""
    num_examples: int
    num_left_out: int
    """Examples with fewer than k judged rollouts, because lost rollouts are not the model's fault."""


class PartScores(Record):
    """Scores of one part of a mixture."""

    task: str
    example_ids: list[str]
    greedy: Summary
    sampled: Summary | None
    pass_at_k: dict[Annotated[int, Field(strict=False)], PassAtK]

    @property
    def scores(self) -> dict[str, Summary]:
        """The existing scores, by the kind of rollouts."""
        return {"greedy": self.greedy} | ({} if self.sampled is None else {"sampled": self.sampled})


class EvalPlan(Record):
    """The subject and the protocol of an evaluation: everything that is known before the first reply."""

    task: str
    variant: str | None = None
    """Variant of the task, such as a data set of reasoning-gym; None if there is only one."""
    task_version: str
    """Version of the task that judges."""
    replies_version: str
    """Version of the task that posed the problems; differs from `task_version` after rescoring."""
    split: Split
    step: int
    model_digest: str
    dtype: str | None
    tokenizer_digest: str
    prompt_format: str
    num_examples: int
    examples_digest: str
    """Hash over the example ids, which are hashes of content."""
    run_seed: int
    max_reply_tokens: int
    """For a mixture, the largest budget of its parts."""
    part_reply_tokens: dict[str, int] = {}
    """Budgets of a mixture's parts, by label."""
    stop_strings: list[str] | None = None
    """Texts that end a reply besides the model's terminator; None if not recorded."""
    first_prompt: str | None = None
    """The rendered prompt of the first example; None if not recorded."""
    sampling: Sampling
    num_samples: int | None
    date: str | None = None
    """The date that prompts print, such as 2026-11-29; None where they print none."""
    compares: bool = False
    """Whether the sampled replies to an example were judged beside each other; the greedy one is alone."""

    @property
    def identity(self) -> EvalPlan:
        """Only the fields of the plan, also if this is a result."""
        return EvalPlan.model_validate({name: getattr(self, name) for name in EvalPlan.model_fields})

    @property
    def full_name(self) -> str:
        """Task and variant, for example 'reasoning-gym/chain_sum'."""
        return self.task if self.variant is None else f"{self.task}/{self.variant}"

    def budget_of(self, part: str | None) -> int:
        """Reply budget of a part's examples; None: the task has no parts."""
        return self.part_reply_tokens.get(part or "", self.max_reply_tokens)

    @property
    def digest(self) -> str:
        """Hash over the fields of the plan, but for the date and the prompt, which may print it."""
        return self._hash(EvalPlan.model_fields.keys() - {"date", "first_prompt"})

    def _hash(self, names: Collection[str]) -> str:
        return _hash(self.model_dump(mode="json", include=set(names)))[:16]


class EvalResult(EvalPlan):
    """One evaluation of one model on one split of one task."""

    policy_version: int
    """Version that the engine served; one for all rollouts."""
    greedy: Score
    sampled: Score | None
    # Keys of a JSON object are texts, so they are read as numbers.
    pass_at_k: dict[Annotated[int, Field(strict=False)], PassAtK]
    parts: dict[str, PartScores] = {}
    """Scores of a mixture's parts, by label."""
    causes: list[FailureCause] = []
    """Causes of unscored rollouts, the commonest first."""
    validity: Validity
    audit: str | None = None
    """Verdict of this user's audit of the task's version; None if there is none."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def protocol_digest(self) -> str:
        """Hash over `PROTOCOL_FIELDS`; equal for comparable results."""
        return self._hash(PROTOCOL_FIELDS)

    @property
    def truncation_suspect(self) -> bool:
        """Whether so many replies were truncated that the score may reflect the budget, not the model."""
        return any((score.truncated_frac or 0.0) > SUSPECT_TRUNCATED_FRAC for score in self.scores.values())

    @property
    def scores(self) -> dict[str, Score]:
        """The existing scores, by the kind of rollouts."""
        return {"greedy": self.greedy} | ({} if self.sampled is None else {"sampled": self.sampled})

    @property
    def is_valid(self) -> bool:
        """Whether the scores may be compared and reported."""
        return self.validity is Validity.VALID

    @property
    def verdict(self) -> str:
        """The causes of unscored rollouts and the validity, in one line."""
        return f"{self.lost}{self.validity.value}"

    @property
    def lost(self) -> str:
        """The causes of unscored rollouts, as the beginning of a line; empty if there are none."""
        num_rollouts = sum(score.num_rollouts for score in self.scores.values())
        return f"{sum_up(self.causes, num_rollouts)}; " if self.causes else ""


def digest_examples(example_ids: list[str]) -> str:
    """Return a hash over example ids, independent of their order."""
    return hashlib.sha256("\n".join(sorted(example_ids)).encode()).hexdigest()[:16]


def result_name(plan: EvalPlan) -> str:
    """Return the file name of a result, for example 'arithmetic-step-000020.json'.

    The name contains the split unless it is the held-out one.
    """
    task = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.full_name)
    split = "" if plan.split is Split.HELD_OUT else f"-{plan.split.value}"
    return f"{task}{split}-step-{plan.step:06d}.json"


def dump_result(result: EvalResult) -> dict[str, Any]:
    """Return a result as JSON values, with a hash over them."""
    # Through JSON, so that the keys of tables are texts as in the file.
    values: dict[str, Any] = json.loads(result.model_dump_json())
    return {**values, _SEAL: _hash(values)}


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_result(result: EvalResult, path: Path) -> None:
    """Write a result as JSON, complete or not at all. Raises: StoreError if the file cannot be written."""
    text = json.dumps(dump_result(result), indent=1, ensure_ascii=False)
    write_bytes_atomically(path, (text + "\n").encode())


def read_result(path: Path) -> EvalResult:
    """Read a result. Raises: StoreError if it cannot be read; CorruptRecord like `parse_result`."""
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
    """Parse a result file; `path` is for messages. Raises: CorruptRecord if it is none."""
    try:
        values = json.loads(data)
        if values.pop(_SEAL) != _hash(values):
            raise ValueError("it was changed after it was written")
        for name in EvalResult.model_computed_fields:
            del values[name]
        return EvalResult.model_validate_json(json.dumps(values))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = "; ".join(str(error).splitlines()[:3])
        raise CorruptRecord(
            f"{path} is not a complete result ({type(error).__name__}: {cause})",
            allowed="a result as an evaluation wrote it",
            next_step="run the evaluation again",
        ) from error


def refuse_invalid(result: EvalResult) -> None:
    """Refuse an invalid result. Raises: CheckRefused, exit code 76, with the cause and its numbers."""
    if result.is_valid:
        return
    scores = list(result.scores.values())
    cut = max(score.truncated_frac or 0.0 for score in scores)
    lost, total = sum(s.num_unscored for s in scores), sum(s.num_rollouts for s in scores)
    raise CheckRefused(
        f"{result.lost}the result of {result.task} at step {result.step} is {result.validity}: {cut:.1%} of"
        f" replies were cut at {result.max_reply_tokens} tokens, {lost} of {total} rollouts are unscored",
        allowed="results that are valid",
        next_step="evaluate with the task's own reply budget: leave task.max_reply_tokens out"
        if result.validity is Validity.TRUNCATION
        else "mend what kept the rollouts from being judged and evaluate again",
    )


def write_order(result: EvalResult, path: Path) -> None:
    """Write the solved share of each example as JSON lines, the easiest first.

    Sampled rollouts count if there are any, greedy ones otherwise. Examples that could not be judged have
    `solved_frac` null and come last.

    Raises: CheckRefused if the result is invalid; StoreError if the file cannot be written.
    """
    refuse_invalid(result)
    score = result.greedy if result.sampled is None else result.sampled
    rows = [
        {"example_id": name, "solved_frac": one.solved_frac, "num_samples": one.num_judged}
        for name, one in sorted(
            score.by_example.items(),
            key=lambda item: (item[1].solved_frac is None, -(item[1].solved_frac or 0.0), item[0]),
        )
    ]
    text = "".join(json.dumps(line) + "\n" for line in rows)
    write_bytes_atomically(path, text.encode())
