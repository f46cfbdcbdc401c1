"""Open questions in the columns `prompt` and, if known, `gold`; a model behind HTTP grades the replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from strop.errors import ConfigError
from strop.rollout import Example, Failure, Message, Outcome, Split, make_example
from strop.spec.judge import MAX_ANSWER_TOKENS, LlmJudgeSpec
from strop.tasks.answers import text_after_thinking
from strop.tasks.llm_judge.client import (
    CALL_LIMIT_S,
    SEED,
    WAIT_LIMIT_S,
    CallLimiter,
    JudgeClient,
)
from strop.tasks.llm_judge.rubric import (
    CONTRACT,
    GROUP_CONTRACT,
    Judgement,
    Rubric,
    find_judgement,
    judgement_path,
    keep_judgement,
    read_judgements,
    read_rubric,
)
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, SplitExamples, read_examples, require_texts
from strop.tasks.task import Task, TaskLimits
from strop.tasks.version import fit_limits, hash_version

_MAX_REPLY_TOKENS = 2048
_VERIFIER = "llm-judge-2"
_SPARE_S = 5.0


class LlmJudge(Task):
    """The reward is the judge's score; a reply with `task.pass_score` or more is correct.

    The text behind the last closed thinking block is judged. An empty text earns 0 without a call, and is the
    only one with `format_ok` false. A reply that the judge does not score has no score. The version covers
    the judge's name, revision, rubric and contract.
    """

    name = "llm-judge"

    def __init__(self, spec: LlmJudgeSpec) -> None:
        self._spec = spec
        self._contract = GROUP_CONTRACT if spec.compares else CONTRACT
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS,
            # If only quality is judged, no reply is known to be right.
            max_goldless_frac=1.0,
            verify_limit_s=WAIT_LIMIT_S + CALL_LIMIT_S + _SPARE_S,
        )
        self.limits = fit_limits(limits, spec)
        limiter = CallLimiter(
            num_at_once=spec.judge_concurrency,
            max_calls=spec.max_judge_calls,
        )
        self.client = JudgeClient(spec.judge_url, spec.judge_model, spec.judge_key_env, limiter)

    @cached_property
    def version(self) -> str:
        """Hash over settings, judge, limits and the ids of all examples; reads rubric and data."""
        digest = "" if self._spec.source is None else self._splits.digest
        return hash_version(self.name, self._rubric.text, self.judge_digest, self.limits, self._spec, digest)

    @cached_property
    def judge_digest(self) -> str:
        """Hash over everything that identifies the judge; reads the rubric."""
        spec = self._spec
        parts = [_VERIFIER, spec.judge_model, spec.judge_revision, self._rubric.text, self._contract]
        text = json.dumps([*parts, SEED, MAX_ANSWER_TOKENS])
        return sha256(text.encode()).hexdigest()

    @property
    def judge_digests(self) -> Sequence[str]:
        """The digest of the one judge."""
        return (self.judge_digest,)

    @property
    def judge_name(self) -> str:
        """The judge's name and revision, for people."""
        return f"{self._spec.judge_model} ({self._spec.judge_revision})"

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the questions of a split, in the order of the data.

        Raises: DataError if the data is missing, empty or malformed, or a row has no text for a placeholder
            of the rubric; ConfigError if the task names no data.
        """
        return self._splits.of(split)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the row's prompt."""
        return pose(str(example.fields["prompt"]), thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Ask the judge for a score.

        Raises: DataError if the example has no text for a placeholder of the rubric; ConfigError if the judge
            cannot be called from this process; StoreError if a judgement cannot be stored.
        """
        return (await self.verify_group(example, [text], [await self.verify_member(example, text)]))[0]

    def compares(self, example: Example) -> bool:
        """Whether the judge compares replies."""
        return self._spec.compares

    async def verify_member(self, example: Example, text: str) -> Outcome:
        """Judge nothing: the judge sees the whole group."""
        return Outcome(parts={})

    async def verify_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Ask the judge once for the scores of distinct texts, in an order that only they decide.

        Raises: as `verify`.
        """
        self.require_judgeable(example)
        judged = [text_after_thinking(text) or "" for text in texts]
        shown = sorted({one for one in judged if one.strip()}, key=_digest)
        secret = f"{self.judge_digest}\0{example.example_id}"
        question = self._rubric.fill(_values(example), shown, secret, self._contract)
        paths = [judgement_path(self.judge_digest, f"{question}{place or ''}") for place in range(len(shown))]
        kept = [judgement for path in paths if (judgement := find_judgement(path)) is not None]
        is_cached = len(kept) == len(shown)
        found: list[Judgement] | Failure = kept
        if not is_cached:
            answer = self.client.ask(question)
            num = len(shown) if self._spec.compares else None
            found = answer if isinstance(answer, Failure) else read_judgements(answer, num)
        if isinstance(found, Failure):
            results: dict[str, Judgement | Failure] = dict.fromkeys(shown, found)
        else:
            results = dict(zip(shown, found, strict=True))
            for path, judgement in zip(paths, () if is_cached else found, strict=not is_cached):
                keep_judgement(path, judgement)
        pairs = zip(judged, outcomes, strict=True)
        return [self._complete(one, results.get(one), outcome, is_cached) for one, outcome in pairs]

    def _complete(
        self, text: str, result: Judgement | Failure | None, outcome: Outcome, is_cached: bool
    ) -> Outcome:
        if result is None:
            return replace(outcome, parts={"judge": 0.0}, is_correct=False, format_ok=False)
        metrics = {**outcome.metrics, "judge_cached": float(is_cached), "reply_chars": float(len(text))}
        if isinstance(result, Failure):
            metrics[result.kind] = 1.0
            return replace(outcome, parts={"judge": None}, metrics=metrics, failure=result)
        return replace(
            outcome,
            parts={"judge": result.score},
            is_correct=result.score >= self._spec.pass_score,
            metrics={**metrics, "judge_score": result.score},
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold reply of the row, if it has one."""
        return () if example.answer is None else (example.answer,)

    def require_judgeable(self, example: Example) -> None:
        """Refuse an example without a text for a placeholder of the rubric.

        Raises: DataError naming example, field and rubric.
        """
        self._rubric.require_values(_values(example), f"example {example.example_id}")

    def as_question(self, prompt: str, gold: str | None, fields: Mapping[str, Any]) -> Example:
        """Return an example of this task for the question of another task."""
        return make_example(self.name, {**_plain(fields), "prompt": prompt}, gold)

    def warm_up(self) -> None:
        """Refuse a judge that no call can reach from this process.

        Raises: ConfigError if httpx or the key is missing, or the rubric cannot be read.
        """
        _ = self._rubric  # Read now: every call would fail on it.
        self.client.open()

    @cached_property
    def _rubric(self) -> Rubric:
        return read_rubric(self._spec.rubric)

    @cached_property
    def _splits(self) -> SplitExamples:
        spec = self._spec
        if spec.source is None:
            raise ConfigError(
                "task llm-judge has no task.source",
                allowed="a file or data set with the column prompt",
                next_step="name the data in task.source",
            )
        rubric = self._rubric
        reading = RowReading(
            layout=DataLayout(
                train=("data/train-00000-of-00001.parquet",), held_out=("data/test-00000-of-00001.parquet",)
            ),
            to_example=lambda row: row_example(row, rubric),
            question=lambda example: str(example.fields["prompt"]),
        )
        return read_examples(reading, spec.source, num_train=spec.num_train, num_held_out=spec.num_held_out)


def row_example(row: Row, rubric: Rubric | None = None) -> Example:
    """Return the example of a row, checked against a rubric if there is one.

    Raises: DataError naming the row.
    """
    (prompt,) = require_texts(row, "prompt")
    gold = row.values.get("gold")
    if gold is not None and (not isinstance(gold, str) or not gold.strip()):
        raise bad_row(
            f"{row.place} has gold={str(gold)[:80]!r}", allowed="a text that is not empty, or no gold at all"
        )
    others = {key: value for key, value in row.values.items() if key not in ("prompt", "gold")}
    example = make_example(LlmJudge.name, {**_plain(others), "prompt": prompt}, gold)
    if rubric is not None:
        rubric.require_values(_values(example), f"{row.place}, example {example.example_id},")
    return example


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a rubric can use: texts and numbers."""
    return {key: value for key, value in fields.items() if isinstance(value, str | int | float)}


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()


def _values(example: Example) -> dict[str, str]:
    values = {key: str(value) for key, value in example.fields.items()}
    return values if example.answer is None else {**values, "gold": example.answer}
