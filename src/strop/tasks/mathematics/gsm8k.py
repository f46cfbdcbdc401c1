"""Grade-school word problems in the schema of gsm8k: `question`, and `answer` ending in '#### N'."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from strop.rollout import Example, Outcome, make_example
from strop.spec.base import expert
from strop.spec.task import FewShot, TrainingRows
from strop.tasks.answers import NUMBER_PATTERN, judged_text, last_number_text, parse_number
from strop.tasks.contract import TaskLimits, right_or_wrong
from strop.tasks.mathematics.answers import find_boxes
from strop.tasks.registry import built_in
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples, gold_of, require_texts

_MAX_REPLY_TOKENS = 1024
_PROMPT = (
    "{question}\n\nSolve this step by step. Then write '####', a space and the final number on the last line."
)
_BASE_PROMPT = "Q: {question}\nA:"
_BASE_PROMPT_HASH = "Question: {question}\nAnswer:"
"""The forms of lm-eval 0.4.13's gsm8k_cot and gsm8k. Shots use the second, whose answers are in the data."""
_VERIFIER = "gsm8k-number-3"
# Base models write these when they go on to invent another problem.
_MARKERS = ("Question:", "[Question]", "Q:", "\n\n\n")
_HARNESS_STOP_STRINGS = ("</s>", "<|im_end|>")
"""Stop strings of lm-eval's tasks, besides the first word of their prompts."""


class Gsm8kSpec(FewShot, TrainingRows):
    """Grade-school word problems, in the columns `question` and `answer` of gsm8k."""

    name: Literal["gsm8k"]
    source: str = Field(
        default="openai/gsm8k",
        min_length=1,
        description="Source of the problems: a hub id such as openai/gsm8k, a folder or file of Parquet or"
        " JSONL, or such a one in a store, as s3://bucket/path. A text that starts with '/', '~' or '.',"
        " or ends in .parquet, .jsonl or .json, is a path; a relative one is relative to the file that"
        " names it.",
    )
    mode: Literal["auto", "strict", "hash", "flex"] = Field(
        default="auto",
        description="Which number of the reply is judged. 'auto': behind 'The answer is', else behind '####',"
        " else in the last box, else the last one. The others are the filters of lm-eval 0.4.13 with their"
        " flaws, for comparison with published scores: 'strict' and 'flex' of gsm8k_cot, 'hash' of gsm8k.",
        json_schema_extra=expert("published scores differ by how an answer is found"),
    )


@built_in("gsm8k", Gsm8kSpec, "Grade-school word problems from a hub, Parquet or JSONL.", rank=50)
class Gsm8k(RowTask):
    """Right if the reply's number equals the gold number; `task.mode` chooses the number.

    The text behind the last closed thinking block and before the first stop string is judged; the modes of
    lm-eval judge all of it. `format_ok`: a number follows '####', or, in a mode of lm-eval, that mode finds a
    number; it is recorded apart from correctness, because only one of the two may grow. A question that
    occurs twice in one split is kept once.
    """

    _spec: Gsm8kSpec

    def __init__(self, spec: Gsm8kSpec) -> None:
        is_hash = spec.mode == "hash" or spec.num_few_shot > 0
        markers = _MARKERS if spec.mode == "auto" else ("Question:" if is_hash else "Q:",)
        base_stops = (*markers, *_HARNESS_STOP_STRINGS)
        super().__init__(
            spec,
            _READING,
            TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS, base_stop_strings=base_stops),
            source=spec.source,
            prompt=_PROMPT,
            base_prompt=_BASE_PROMPT_HASH if is_hash else _BASE_PROMPT,
            verifier=_VERIFIER,
        )

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the number that answers with the gold number."""
        mode = self._spec.mode
        if mode != "auto":
            answer = harness_answer(mode, text)
            gold = harness_gold(mode, example.fields["solution"])
            is_correct = answer is not None and harness_clean(answer) == gold
            return right_or_wrong(is_correct, format_ok=answer is not None, extracted=answer)
        gold_number = parse_number(gold_of(example))
        judged = judged_text(text, _MARKERS) or ""
        answer = find_number_text(judged)
        is_correct = answer is not None and parse_number(answer) == gold_number
        return right_or_wrong(is_correct, format_ok=MARKED.search(judged) is not None, extracted=answer)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the worked solution, the marked number and the number in a sentence, as the mode needs."""
        answer = example.answer or ""
        if self._spec.mode == "strict":
            return (f"The answer is {answer}.",)
        marked = (example.fields["solution"], f"#### {answer}")
        return marked if self._spec.mode == "hash" else (*marked, f"The answer is {answer}.")

    def _read_splits(self) -> SplitExamples:
        return super()._read_splits().with_shots(self._num_few_shot)


def _to_example(row: Row) -> Example:
    question, solution = require_texts(row, "question", "answer")
    _, mark, tail = solution.rpartition("####")
    gold = parse_number(tail)
    if not mark or gold is None:
        raise bad_row(
            f"the answer in {row.place} ends in {solution[-40:]!r}",
            allowed="an answer whose last line is '#### ' and a number",
        )
    return make_example(
        "gsm8k", {"question": question, "solution": solution}, tail.strip().replace(",", "").lstrip("$")
    )


_READING = RowReading(
    layout=DataLayout(
        train=("main/train-00000-of-00001.parquet",), held_out=("main/test-00000-of-00001.parquet",)
    ),
    to_example=_to_example,
    question=lambda example: str(example.fields["question"]),
)
# `auto` searches the text before any marker of a follow-up problem for the first sentence 'The answer is N.',
# then the first '#### N', then the last box, then the last number. It reads numbers as `answers` does and
# compares them as decimals.
#
# `strict`, `hash` and `flex` are lm-eval 0.4.13's filters bit for bit, for scores that are compared with
# published ones: 'strict-match' of its task gsm8k_cot, 'strict-match' of gsm8k, and 'flexible-extract' of
# both. Their flaws are kept: strict loses the last digit if no period follows, flex takes '..' for a
# number and a minus for a sign, nothing is cut at a follow-up problem, and '18.00' is not '18', because
# texts are compared. Source of the patterns: lm_eval/tasks/gsm8k/{gsm8k,gsm8k-cot}.yaml (MIT).

HarnessMode = Literal["strict", "hash", "flex"]
MARKED = re.compile(rf"####\s*({NUMBER_PATTERN})")
"""The form that strop's prompt requests."""
_PHRASE = re.compile(
    rf"\bThe answer is:?\s*[*_]*({NUMBER_PATTERN})[*_]*(?=[ \t]*(?:\n|$)|[.!](?:\s|$))", re.IGNORECASE
)
_HARNESS = {
    "strict": re.compile(r"The answer is (\-?[0-9\.\,]+)."),
    "hash": re.compile(r"#### (\-?[0-9\.\,]+)"),
    "flex": re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"),
}
_HARNESS_IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


def find_number_text(text: str) -> str | None:
    """Return the text of the number that is the answer by the rules of `auto`, or None."""
    if phrase := _PHRASE.search(text):
        return phrase.group(1)
    if marked := MARKED.search(text):
        return marked.group(1)
    boxes = find_boxes(text)
    if boxes and parse_number(boxes[-1]) is not None:
        return boxes[-1].strip()
    return last_number_text(text)


def harness_answer(mode: HarnessMode, text: str) -> str | None:
    """Return the match of lm-eval's filter in a reply, not yet cleaned; None for its '[invalid]'."""
    matches = _HARNESS[mode].findall(text)
    if not matches:
        return None
    match = matches[-1 if mode == "flex" else 0]
    parts = [part for part in match if part] if isinstance(match, tuple) else [match]
    return parts[0].strip() if parts else None


def harness_clean(text: str) -> str:
    """Clean a text as lm-eval's metric `exact_match` does with the settings of its gsm8k tasks."""
    for pattern in _HARNESS_IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def harness_gold(mode: HarnessMode, solution: str) -> str:
    """Return the cleaned gold answer of a worked solution: all of it in gsm8k, its end in gsm8k_cot."""
    return harness_clean(solution if mode == "hash" else solution.rpartition("####")[2].strip())
