"""Judge replies that end in one answer: a number, a formula, a letter, a text.

Judged is what a reply says behind its last closed thinking block, without the problems that it poses itself
behind its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unicodedata import normalize

from strop.rollout import Example, Outcome
from strop.tasks.answers import judged_text, show_answer, text_after_thinking
from strop.tasks.mathematics import (
    answers_equal,
    find_answer,
    find_number,
    marked_answer,
    marked_numbers,
    normal_form,
    read_number,
    read_value,
)
from strop.tasks.overlap import normal_text
from strop.tasks.rows.row_task import gold_of
from strop.tasks.task import right_or_wrong


def _judge_number(example: Example, text: str, question: str, *, is_marked_so: bool = False) -> Outcome:
    """Compare values. `format_ok`: there is a number, or, if it is to be marked so, one behind '####'."""
    gold, judged = gold_of(example), judged_text(text, question)
    found = find_number(judged, question)
    if found is None:
        return right_or_wrong(False, format_ok=False)
    is_formed = not is_marked_so or any(number.value is not None for number in marked_numbers(judged))
    is_correct = found.value is not None and found.value == read_value(gold)
    return right_or_wrong(is_correct, format_ok=is_formed, extracted=found.text)


def _judge_formula(example: Example, text: str, question: str, *, is_strict: bool = False) -> Outcome:
    """Compare final answers; `format_ok`: exactly one box, or without boxes one answer sentence.

    Strictly, the answer stands in the one box and is spelled like the gold answer.

    Raises: ConfigError if math-verify is needed and not installed; any exception of math-verify about the
        gold answer.
    """
    gold, answer = gold_of(example), find_answer(judged_text(text, question))
    if answer is None:
        return right_or_wrong(False, format_ok=False)
    is_formed = answer.num_marks == 1
    may_count = not is_strict or (answer.is_boxed and is_formed)
    is_correct = may_count and answers_equal(gold, answer.text, is_strict=is_strict)
    return right_or_wrong(is_correct, format_ok=is_formed, extracted=answer.text)


_LETTERS = "ABCD"
_ALONE = re.compile(r"[\W_]*(?:\\boxed\{(?:\\text\{)?)?([A-D])[\W_]*")
# No part of a word, and not ruled out behind ('A is wrong') or before ('not A').
_LETTER = re.compile(
    r"(?<![A-Za-z0-9_'])[A-D](?!'?[A-Za-z0-9_])"
    r"(?![^\w.;]*(?:is|are|was)(?:n't| not|\s+(?:in|un)\w+| wrong| false| too)\b)"
)
_RULES_OUT = re.compile(
    r"(?:\b(?:not|nor|never|except|without|cannot)|n't)(?: be)?(?: option| choice)?[^\w.;]+$", re.IGNORECASE
)
# At the start of a sentence 'A' may be an article, and 'B cells' are no choice.
_STARTS = re.compile(r"(?:^|[.!?] )[*(]*$")
_GOES_ON = re.compile(r" (?!(?:because|since|as|is|was|must|for|due|best|and|or|but)\b)[a-z]")
_RIGHT = re.compile(r"\W{1,3}(?:is|must be) (?:the |most |best )*(?:correct|right|better|best|true|answer)\b")
_AND = re.compile(r"[^\w.;]{0,8}(?:,|/|&|\bor\b|\band\b)[^\w.;]{0,8}(?=[A-D])")
_MAX_CHOICE_CHARS = 2000
_THUS = re.compile(r"^(?:(?:therefore|thus|hence|so)\b,? ?)?(?:it(?: is|'s) )?", re.IGNORECASE)
_MAX_WORDS = 20  # A gold answer of more is a solution in prose, which no reply repeats.


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
    lines = text.splitlines() or [""]
    marked = marked_answer(text)
    told = marked.text if marked else ""
    if alone := _ALONE.fullmatch(lines[0]) or _ALONE.fullmatch(told.upper()):
        return alone[1]
    for said in (normal_text(one[:_MAX_CHOICE_CHARS]) for one in (lines[0], told)):
        for letter, choice in zip(_LETTERS, map(normal_text, choices), strict=False):
            if choice and said in (choice, f"{letter.lower()} {choice}"):
                return letter
    claims = (one for one in _letters(text) if _RIGHT.match(text, one.end()))
    found = next(_letters(told), None) or next(reversed([*claims]), None)
    if found is None and (alone := _ALONE.fullmatch(_THUS.sub("", lines[-1]))):
        return alone[1]
    if (found := found or next(_letters(lines[0]), None)) is None:
        return None
    other = _AND.match(found.string, found.end())
    return None if other and _LETTER.match(found.string, other.end()) else found[0]


def _letters(text: str) -> Iterator[re.Match[str]]:
    """Return the letters that a text says to be choices."""
    for letter in _LETTER.finditer(text):
        before = text[max(0, letter.start() - 20) : letter.start()]
        is_word = _STARTS.search(before) and _GOES_ON.match(text, letter.end())
        if not is_word and not _RULES_OUT.search(before):
            yield letter


def _read_number(value: Any) -> str | None:
    text = show_answer(value).strip()
    number = read_number(text)
    if number is None or number.value is None or re.search("[0-9!]", text.replace(number.text, "", 1)):
        return None
    return number.text.replace(",", "").lstrip("$")


def _read_formula(value: Any) -> str | None:
    # Solutions mark their answer as replies do.
    text = _read_text(value) or ""
    marked = marked_answer(text)
    text = (marked.text if marked else text.rpartition("####")[2]).strip()
    text = text.removeprefix("**").removesuffix("**").strip()
    return text if len(text.split()) <= _MAX_WORDS and normal_form(text) else None


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


def _read_text(value: Any) -> str | None:
    """Return an answer as a text; None of a table, and of texts of which any may be meant."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, str) for one in value)):
        return None
    return show_answer(value) or None


_FORMULA = "a number, a formula or a word"
GRADERS: Mapping[str, tuple[Callable[[Any], str | None], str, Callable[[Example, str, str], Outcome]]] = {
    "number": (_read_number, "a number", _judge_number),
    "marked-number": (_read_number, "a number", partial(_judge_number, is_marked_so=True)),
    "math": (_read_formula, _FORMULA, _judge_formula),
    "strict-math": (_read_formula, _FORMULA, partial(_judge_formula, is_strict=True)),
    "letter": (_read_letter, "a letter from A to D, or its index from 0", _judge_letter),
    "exact": (_read_text, "a text", _compared(_is_spelled)),
    "contains": (_read_text, "a text", _compared(_contains)),
}
"""By name: what returns a row's answer as it is compared, or None; what answers it reads; and what judges a
reply to an example with this question."""
