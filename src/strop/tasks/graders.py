"""Judge replies that end in one answer: a number, a formula, a letter, a text.

Judged is what a reply says behind its last closed thinking block, without the problems that it poses itself
behind its answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args
from unicodedata import normalize

from strop.rollout import Example, Outcome
from strop.tasks.answers import judged_text, show_answer, text_after_thinking
from strop.tasks.mathematics.answers import (
    find_answer,
    find_boxes,
    find_number,
    marked_answer,
    marked_numbers,
    read_value,
)
from strop.tasks.mathematics.equivalence import Strictness, answers_equal, normal_form
from strop.tasks.overlap import normal_text
from strop.tasks.rows.row_task import gold_of
from strop.tasks.task import right_or_wrong


class Grader(NamedTuple):
    """How the answers of one kind are read and compared."""

    read_gold: Callable[[Any], str | None]
    """Return a row's answer as it is compared; None: it is no answer of this kind."""
    allowed: str
    """What `read_gold` reads."""
    judge: Callable[[Example, str, str], Outcome]
    """Judge a reply to an example with this question."""

    def require_gold(self, value: Any) -> str:
        """Return a row's answer as it is compared. Raises: ValueError if it is none."""
        answer = self.read_gold(value)
        if answer is None:
            raise ValueError(f"{value!r:.80}")
        return answer


def _judge_number(example: Example, text: str, question: str, *, is_marked_so: bool = False) -> Outcome:
    """Compare values. `format_ok`: there is a number, or, if it is to be marked so, one behind '####'."""
    gold, judged = gold_of(example), judged_text(text, question)
    found = find_number(judged, question)
    if found is None:
        return right_or_wrong(False, format_ok=False)
    is_formed = not is_marked_so or any(number.value is not None for number in marked_numbers(judged))
    is_correct = found.value is not None and found.value == read_value(gold)
    return right_or_wrong(is_correct, format_ok=is_formed, extracted=found.text)


def _judge_formula(example: Example, text: str, question: str, *, strictness: Strictness) -> Outcome:
    """Compare final answers; `format_ok`: exactly one box, or without boxes one answer sentence.

    Raises: ConfigError if math-verify is needed and not installed; any exception of math-verify about the
        gold answer.
    """
    gold, answer = gold_of(example), find_answer(judged_text(text, question))
    if answer is None:
        return right_or_wrong(False, format_ok=False)
    is_formed = answer.num_marks == 1
    may_count = strictness != "strict" or (answer.is_boxed and is_formed)
    is_correct = may_count and answers_equal(gold, answer.text, strictness)
    return right_or_wrong(is_correct, format_ok=is_formed, extracted=answer.text)


_LETTERS = "ABCD"
# No part of a word, and not ruled out: 'A is wrong'.
_END = r"(?!'?[A-Za-z0-9_])(?![^\w.;]*(?:is|are|was)(?:n't| not|\s+(?:in|un)\w+| wrong| false| too)\b)"
_ALONE = re.compile(r"[\W_]*(?:\\boxed\{(?:\\text\{)?)?([A-D])[\W_]*")
_MARKED = re.compile(
    rf"(?:\W*(?:\\?text|(?i:the|option|choice|letter)\b))*[\W_]*(?:[A-D]{_END}|[a-d](?=\W*\Z))"
)
_CLAIM = re.compile(
    r"(?<![A-Za-z0-9_'])[A-D](?=\W{1,3}(?:is|must be) (?:the )?(?:most |best )?"
    r"(?:correct|right|better|best|true|answer)\b)"
)
# At the start of a sentence 'A' may be an article, and 'B cells' are no choice.
_LETTER = re.compile(
    rf"(?:(?:^|(?<=[.!?] ))[*(]*[A-D]{_END}(?! (?!because|since|as|is|was|must|for|due|best|and|or|but)[a-z])"
    rf"|(?<![A-Za-z0-9_'.!?])(?<![.!?] )(?!^)[A-D]{_END})"
)
_RULES_OUT = re.compile(
    r"(?:\b(?:not|nor|never|except|without|cannot)|n't)(?: be)?(?: option| choice)?[^\w.;]+$", re.IGNORECASE
)
_SEVERAL = re.compile(
    rf"[^\w.;]{{0,8}}(?:,|/|&|\bor\b|\band\b)[^\w.;]{{0,8}}[A-D]{_END}(?! (?!(?:are|and|or)\b)[a-z])"
)
_MAX_CHOICE_CHARS = 2000


def _judge_letter(example: Example, text: str, question: str) -> Outcome:
    """Compare letters; `format_ok`: the first line is the letter, maybe in brackets or with a period."""
    judged = normalize("NFKC", judged_text(text, question)).strip()
    # A repeated question chooses none.
    is_echo = judged.endswith("Answer:")
    letter = None if is_echo else find_letter(judged, example.fields.get("choices", ()))
    is_formed = _ALONE.fullmatch(judged.partition("\n")[0]) is not None
    return right_or_wrong(letter == gold_of(example), format_ok=is_formed, extracted=letter)


def find_letter(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter that a reply chooses: one that stands alone, is marked, is claimed, or opens a line.

    A choice in words is its letter. None if there is none, or several are named at once.
    """
    line = text.partition("\n")[0]
    if alone := _ALONE.fullmatch(line):
        return alone[1]
    said = normal_text(line[:_MAX_CHOICE_CHARS])
    for letter, choice in zip(_LETTERS, map(normal_text, choices), strict=False):
        if choice and said in (choice, f"{letter.lower()} {choice}"):
            return letter
    marked = marked_answer(text)
    found = _MARKED.match(marked.text) if marked is not None else None
    found = found or next(reversed([*_CLAIM.finditer(text)]), None)
    stated = (
        m for m in _LETTER.finditer(line) if not _RULES_OUT.search(line[max(0, m.start() - 20) : m.start()])
    )
    found = found or next(stated, None)
    if found is None or _SEVERAL.match(found.string, found.end()):
        return None
    return found.group()[-1].upper()


def _read_number(value: Any) -> str | None:
    text = show_answer(value).strip()
    return None if read_value(text) is None else text.replace(",", "").lstrip("$")


def _read_formula(value: Any) -> str | None:
    text = show_answer(value).strip()
    text = (find_boxes(text) or [text])[-1]
    return text if normal_form(text) else None


def _read_letter(value: Any) -> str | None:
    if type(value) is int and 0 <= value < len(_LETTERS):
        return _LETTERS[value]
    return value if isinstance(value, str) and re.fullmatch("[A-D]", value) else None


# Rewards that compare texts as they stand; `format_ok` is unknown.


def _compared(holds: Callable[[str, str], bool]) -> Callable[[Example, str, str], Outcome]:
    """Return a judge of what a reply says behind its last closed thinking block, beside the answer."""

    def judge(example: Example, text: str, question: str) -> Outcome:
        said = text_after_thinking(text)
        is_correct = said is not None and holds(said, gold_of(example))
        return Outcome(parts={"correct": float(is_correct)}, is_correct=is_correct)

    return judge


def _spelled(text: str, gold: str) -> str:
    plain = " ".join(normalize("NFC", text).replace("\u2212", "-").split())
    # A truth value is true in JSON, True in Python and TRUE in a table.
    return plain.casefold() if gold.casefold() in ("true", "false") else plain


def _is_spelled(text: str, gold: str) -> bool:
    return _spelled(text, gold) == _spelled(gold, gold)


# Letters of scripts that put no space between words, or glue endings to them.
_UNSPACED = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_IN_WORD = rf"[^\W{_UNSPACED}]"


def _contains(text: str, answer: str) -> bool:
    gold = _spelled(answer, answer)
    # As whole words and numbers: 4 is not in 42, -4, 4.5, 1/4, 4:30 or 4,500, and C is not in C++.
    before = rf"(?<!{_IN_WORD})" if re.match(_IN_WORD, gold) else ""
    behind = rf"(?!{_IN_WORD})" if re.match(_IN_WORD, gold[-1:]) else ""
    if re.match(r"[-$.]*[0-9]", gold):
        before += r"(?<![0-9])(?<!(?<![A-Za-z])\.)(?<![0-9][,/:])" + (
            r"(?<![\w)\]])" if gold[0] == "-" else r"(?<!(?<![\w)\]])-)"
        )
    if gold[-1:].isdigit():
        behind += r"(?![.,/:]?[0-9])"
    elif behind:
        behind += r"(?![+#]{1,2}(?!\w))"
    found = re.search(before + re.escape(gold) + behind, _spelled(text, answer))
    return bool(gold) and found is not None


_FENCED = re.compile(r"\s*```[\w-]*\n(.*?)\n?```\s*", re.DOTALL)


def _fits_schema(text: str, answer: str) -> bool:
    fenced = _FENCED.fullmatch(text)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    return is_valid(value, json.loads(answer))


def is_valid(value: Any, schema: Any) -> bool:
    """Whether a value is what a JSON Schema, one of `read_schema`, describes."""
    from jsonschema import validators

    return bool(validators.validator_for(schema)(schema).is_valid(value))


def read_schema(answer: Any) -> Any:
    """Return a JSON Schema: a table, or its text. Raises: ValueError if it is none."""
    from jsonschema import SchemaError, validators

    schema = json.loads(answer) if isinstance(answer, str) else answer
    try:
        validators.validator_for(schema).check_schema(schema)
    except (SchemaError, AttributeError, TypeError) as error:
        raise ValueError(f"{getattr(error, 'message', error)}") from error
    return schema


def _read_text(value: Any) -> str | None:
    return show_answer(value) or None


STRICTNESS: Mapping[str, Grader] = {
    level: Grader(_read_formula, "a number, a formula or a word", partial(_judge_formula, strictness=level))
    for level in get_args(Strictness)
}
"""How formulas are compared, by the values of `task.strictness`."""
GRADERS: Mapping[str, Grader] = {
    "number": Grader(_read_number, "a number", _judge_number),
    "marked-number": Grader(_read_number, "a number", partial(_judge_number, is_marked_so=True)),
    "math": STRICTNESS["standard"],
    "letter": Grader(_read_letter, "a letter from A to D, or its index from 0", _judge_letter),
    "exact": Grader(_read_text, "a text", _compared(_is_spelled)),
    "contains": Grader(_read_text, "a text", _compared(_contains)),
    "json-schema": Grader(
        lambda value: show_answer(read_schema(value)),
        "a JSON Schema, as a table or its text",
        _compared(_fits_schema),
    ),
}
