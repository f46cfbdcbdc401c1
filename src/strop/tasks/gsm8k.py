"""Grade-school word problems in the schema of gsm8k: `question`, and `answer` ending in '#### N'."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import Gsm8kSpec
from strop.tasks.answers import NUMBER_PATTERN, cut_at_first, last_number, parse_number
from strop.tasks.contract import TaskLimits
from strop.tasks.rows import Row, SplitRows, read_split_rows
from strop.tasks.version import hash_version, limit_reply

_MAX_REPLY_TOKENS = 1024
_PROMPT = (
    "{question}\n\nSolve this step by step. Then write '####', a space and the final number on the last line."
)
_VERIFIER = "hash-or-last-number-1"
# What base models write when they go on to a problem of their own making.
_STOP_STRINGS = ("Question:", "[Question]", "Q:", "\n\n\n")
_MARKED = re.compile(rf"####\s*({NUMBER_PATTERN})")
_COLUMNS = ("question", "answer")
_MAX_SHOWN = 3


class Gsm8k:
    """Right if the number behind the first '####', else the last number, equals the gold number.

    Judged is the text before the first stop string, whoever generated it. `format_ok`: a number
    stands behind '####'; it is told apart from being right, because only one of the two may grow.
    A question that stands twice in one split is kept once.
    """

    name = "gsm8k"

    def __init__(self, spec: Gsm8kSpec) -> None:
        self._spec = spec
        limits = TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS, stop_strings=_STOP_STRINGS)
        self.limits = limit_reply(limits, spec.max_reply_tokens)

    @cached_property
    def version(self) -> str:
        """Hash over settings, prompt, limits and the ids of all examples; reads the data."""
        ids = [example.example_id for split in Split for example in self.examples(split)]
        data_digest = hashlib.sha256("".join(ids).encode()).hexdigest()
        return hash_version(self.name, _PROMPT, _VERIFIER, self.limits, self._spec, data_digest)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split, in the order of the data.

        Raises: DataError if the data is missing, empty or malformed, or a question is in both splits.
        """
        train, held_out = self._splits
        return train if split is Split.TRAIN else held_out

    def render(self, example: Example) -> tuple[Message, ...]:
        """Give the question and say how the answer is to be marked."""
        return (Message(role="user", content=_PROMPT.format(question=example.fields["question"])),)

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the marked number, else the last one, with the gold number."""
        judged = cut_at_first(text, _STOP_STRINGS)
        marked = _MARKED.search(judged)
        found = parse_number(marked.group(1)) if marked else last_number(judged)
        is_correct = found is not None and found == parse_number(example.answer or "")
        return Outcome(
            parts={"correct": float(is_correct)}, is_correct=is_correct, format_ok=marked is not None
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the worked solution, the marked number, and the number in a sentence."""
        answer = example.answer or ""
        return example.fields["solution"], f"#### {answer}", f"The answer is {answer}."

    @cached_property
    def _splits(self) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        rows = read_split_rows(self._spec.source, num_held_out=self._spec.num_held_out)
        train = _to_examples(rows.train, self._spec.num_train)
        held_out = _to_examples(rows.held_out, self._spec.num_held_out)
        _refuse_overlap(rows, train, held_out)
        return train, held_out


def _to_examples(rows: Sequence[Row], num_wanted: int | None) -> tuple[Example, ...]:
    by_question: dict[str, Example] = {}
    for row in rows:
        example = _to_example(row)
        by_question.setdefault(_question_key(example), example)
    return tuple(by_question.values())[:num_wanted]


def _to_example(row: Row) -> Example:
    question, solution = (row.values.get(column) for column in _COLUMNS)
    if not isinstance(question, str) or not isinstance(solution, str) or not question.strip():
        found = {key: type(value).__name__ for key, value in row.values.items()}
        raise DataError(
            explain_refusal(
                f"{row.place} has columns {found}",
                allowed="a question and an answer, both texts, the question not empty",
                next_step="mend or remove the row, or map the columns when the file is written",
            )
        )
    _, mark, tail = solution.rpartition("####")
    gold = parse_number(tail)
    if not mark or gold is None:
        raise DataError(
            explain_refusal(
                f"the answer in {row.place} ends in {solution[-40:]!r}",
                allowed="an answer whose last line is '#### ' and a number",
                next_step="mend or remove the row",
            )
        )
    return make_example(
        "gsm8k", {"question": question, "solution": solution}, tail.strip().replace(",", "").lstrip("$")
    )


def _question_key(example: Example) -> str:
    return " ".join(str(example.fields["question"]).split())


def _refuse_overlap(rows: SplitRows, train: Sequence[Example], held_out: Sequence[Example]) -> None:
    train_questions = {_question_key(example) for example in train}
    shared = [example for example in held_out if _question_key(example) in train_questions]
    if shared:
        shown = "; ".join(repr(_question_key(example)[:60]) for example in shared[:_MAX_SHOWN])
        raise DataError(
            explain_refusal(
                f"{len(shared)} of {len(held_out)} held-out questions of {rows.source} are training"
                f" questions too, for example {shown}",
                allowed="no question in both splits: its score would measure memory",
                next_step="remove these rows from one of the two files",
            )
        )
