"""Grade-school word problems in the schema of gsm8k: `question`, and `answer` ending in '#### N'."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, NamedTuple
from unicodedata import normalize

from pydantic import Field

from strop.rollout import Example, Outcome, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import SOURCE_HELP, FewShot, TrainingRows
from strop.tasks.answers import NUMBER_PATTERN, judged_text, last_number_match, parse_number
from strop.tasks.mathematics.answers import is_marked, marked_answer
from strop.tasks.mathematics.equivalence import SCALES, parse_exact
from strop.tasks.mathematics.normal_form import normal_form
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, gold_of, require_texts
from strop.tasks.task import TaskLimits, right_or_wrong

_MAX_REPLY_TOKENS = 1024
_PROMPT = (
    "{question}\n\nSolve this step by step. Then write '####', a space and the final number on the last line."
)
_BASE_PROMPT = "Q: {question}\nA:"
_BASE_PROMPT_HASH = "Question: {question}\nAnswer:"
"""The forms of lm-eval 0.4.13's gsm8k_cot and gsm8k. Shots use the second, whose answers are in the data."""
_VERIFIER = "gsm8k-number-6"
# Base models write these when they go on to invent another problem: generation ends there.
_MARKERS = ("Question:", "[Question]", "Q:", "\n\n\n")
_HARNESS_STOP_STRINGS = ("</s>", "<|im_end|>")
"""Stop strings of lm-eval's tasks, besides the first word of their prompts."""


class Gsm8kSpec(FewShot, TrainingRows):
    """Grade-school word problems, in the columns `question` and `answer` of gsm8k."""

    name: Literal["gsm8k"]
    source: Unhashed[str] = Field(
        default="openai/gsm8k", min_length=1, description=SOURCE_HELP.format("openai/gsm8k")
    )
    mode: Literal["auto", "strict", "hash", "flex"] = Field(
        default="auto",
        description="Which number of the reply is judged. 'auto': behind 'The answer is', else behind '####',"
        " else in the last box, else the last one. The others are the filters of lm-eval 0.4.13 with their"
        " flaws, for comparison with published scores: 'strict' and 'flex' of gsm8k_cot, 'hash' of gsm8k.",
        json_schema_extra=expert("published scores differ by how an answer is found"),
    )


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

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the number that answers with the gold number."""
        mode = self._spec.mode
        if mode != "auto":
            return _judge_as_harness(mode, example.fields["solution"], text)
        question = str(example.fields.get("question", ""))
        judged = (
            judged_text(text, lambda one: _first_marked(one) is not None or is_marked(one), question) or ""
        )
        number, gold_number = find_number(judged, question), read_number(gold_of(example))
        extracted, value = number or (None, None)
        is_correct = gold_number is not None and value is not None and value == gold_number.value
        format_ok = any(marked.value is not None for marked in _marked_numbers(judged))
        return right_or_wrong(is_correct, format_ok=format_ok, extracted=extracted)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the worked solution, the marked number and the number in a sentence, as the mode needs."""
        answer = example.answer or ""
        if self._spec.mode == "strict":
            return (f"The answer is {answer}.",)
        marked = (example.fields["solution"], f"#### {answer}")
        return marked if self._spec.mode == "hash" else (*marked, f"The answer is {answer}.")


def _to_example(row: Row) -> Example:
    question, solution = require_texts(row, "question", "answer")
    _, mark, tail = solution.rpartition("####")
    if not mark or (parse_number(tail) is None and _read_fraction(tail) is None):
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
# `auto` searches the reply without its run-on for the first sentence 'The answer is N.' or else the first
# '#### N' that is not taken back, then the last box or answer sentence, then the last number. It reads
# fractions and '72 million' too. Of '24+48=72' the result counts; '72/3', '72^2', '72 or 73' and '5:72' are
# no number, and so no answer. Values are compared exactly.
#
# `strict`, `hash` and `flex` are lm-eval 0.4.13's filters bit for bit: 'strict-match' of its task gsm8k_cot,
# 'strict-match' of gsm8k, and 'flexible-extract' of both. Their flaws are kept: strict loses the last digit
# if no period follows, flex takes '..' for a number and a minus for a sign, nothing is cut at a follow-up
# problem, and texts are compared. Source of the patterns: lm_eval/tasks/gsm8k/{gsm8k,gsm8k-cot}.yaml (MIT).

_MAX_CHARS = 200
_MARKED = re.compile(rf"#{{4,}}\s*(\S[^\n]{{,{_MAX_CHARS}}})")
_PHRASE = re.compile(
    rf"\bThe answer is:?\s*[*_]*({NUMBER_PATTERN})[*_]*(?=[ \t]*(?:\n|$)|[.!](?:\s|$))", re.IGNORECASE
)
_GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!]|\\!,|,\\!)(?=[0-9]{3}(?![0-9]))")
# '#### Step 1', and '#### 1. Find the eggs' over numbers, are headings.
_HEADING = re.compile(
    rf"(?:step|part)\b|[0-9]{{1,2}}[.):][ \t]+[A-Za-z][^\n]{{,{_MAX_CHARS}}}"
    rf"(?:\*\*\$?[0-9]|[=#]|\\boxed|\n[^0-9]{{,{_MAX_CHARS}}}[0-9])",
    re.IGNORECASE,
)
_RETRACTS = re.compile(
    r"\b(?:wait\b|actually|correction|mistake|oops|sorry|let me (?:re|correct|fix|double)|i was wrong)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*((?:[ \t$(]|\\[(])*(?![0-9]{1,2}[.):]\*)[-\u2212]?[$0-9.][^*\n]{0,60})\*\*")
_ASIDE = re.compile(
    r"\b(?:for|in|over|after|per|every|each|within|during|(from|at)|of|with|by|across)[ \t]+"
    r"(?:(?:the|all|these|those|just|only|next|last|first|about) )?[$]?$",
    re.IGNORECASE,
)
"""What stands before a number that describes another one: '18 dollars a day for 7 days'."""
_SENTENCE = re.compile(r"[.!?][ \t]+")
_CLAUSE = re.compile(r"(?<=[0-9a-z*] )\((?!.*\))|, (?:which|where|as)\b(?!.*,)|,? (?:because|since)\b(?!.*,)")
"""What only explains: '18 (9 eggs at 2)', '18, which is 9 eggs at 2'."""
_LEAD = re.compile(r"(?:[ \t*_`~$(\[\u2248]|\\[(\[]|\\(?:text|mathbf|mathrm|textbf)[ \t]*\{)*")
_TRAIL = " \t*_`$\\)]"
_SIGN = r"\*\*|[-+*/^\u00d7\u00f7\u00b7\u2013]|\\(?:times|cdot|div)(?![a-zA-Z])|x(?=[ \t]*[0-9$])"
_OPERATOR = rf"(?:[ \t]*(?:{_SIGN})[ \t]*|:(?=[0-9]))"
_NUMBER = re.compile(NUMBER_PATTERN)
# A number that goes on so, or stands behind an operator, is a part of a calculation, a range or a list.
_GOES_ON = re.compile(
    rf"(?:{_OPERATOR}|(?:,|[ \t]*(?:\\text\{{)?[ \t](?:or|and|to)[ \t]*\}}?)[ \t]+)[({{$]*\.?[0-9]"
    r"|[ \t]*[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]"
)
_IS_OPERAND = re.compile(
    rf"(?:[0-9)\]}}%]{_OPERATOR}|[0-9][ \t]+or[ \t]+|between[ \t]+[$0-9.,]+[ \t]+and[ \t]+)[({{$]*0$"
)
_SLASHED = re.compile(r"(?<![0-9])(?:[0-9]{1,9}[ \t]{1,3})?[0-9]{1,9}/[0-9]{1,9}(?![0-9]|[.,/][0-9])")
_VULGAR = {ord(one): f" {normalize('NFKC', one)}".replace("\u2044", "/") for one in "¼½¾⅓⅔"}
_FRACTION = re.compile("/|frac|[\u00bc-\u00be\u00f7\u2153\u2154]")
_SCALE = re.compile(rf"[ \t]*(?:\\text\{{[ \t]*)?({'|'.join(SCALES)})s?\b", re.IGNORECASE)
_HARNESS = {
    "strict": re.compile(r"The answer is (\-?[0-9\.\,]+)."),
    "hash": re.compile(r"#### (\-?[0-9\.\,]+)"),
    "flex": re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"),
}
_HARNESS_IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


class Number(NamedTuple):
    """A number as it was written, and its value; None if the text is a calculation, a range or a list."""

    text: str
    value: Fraction | None


def find_number(text: str, question: str = "") -> Number | None:
    """Return the number that is the answer by the rules of `auto`; None if there is none."""
    text = _GROUPED.sub(",", text.replace("\\$", "$"))
    # What was marked first counts, unless the reply takes it back and marks another.
    parts = _RETRACTS.split(text) if text.count("####") > 1 or _PHRASE.search(text) else [text]
    if number := next((number for part in reversed(parts) if (number := _first_marked(part))), None):
        return number
    found = marked_answer(text)
    return (found and read_number(found.text[:_MAX_CHARS])) or _last_stated(text, question)


def _first_marked(text: str) -> Number | None:
    phrase = _PHRASE.search(text)
    return read_number(phrase.group(1)) if phrase else next(_marked_numbers(text), None)


def _last_stated(text: str, question: str) -> Number | None:
    """Return the last number, or one before it in its line that the last one only describes."""
    last = last_number_match(text if text.isascii() else (text := text.translate(_VULGAR)))
    if last is None:
        return None
    start = text.rfind("\n", 0, last.start()) + 1
    line = text[max(start, last.start() - _MAX_CHARS) : last.start()]
    line = _SENTENCE.split(line)[-1]
    bold = [*_BOLD.finditer(text, max(start, last.start() - _MAX_CHARS))]
    if bold and "=" not in text[bold[-1].end() : last.start()]:
        return read_number(bold[-1].group(1))
    slashed = _SLASHED.findall(line + last.group()) if line.endswith("/") else []
    if slashed and (number := _read_fraction(slashed[-1])):
        return Number(slashed[-1], number)
    if "=" in line:
        pass
    elif _CLAUSE.search(line) and (stated := list(_NUMBER.finditer(_CLAUSE.split(line)[0]))):
        return _read_from(line, stated[-1])
    elif aside := _ASIDE.search(line):
        stated = [match for match in _NUMBER.finditer(line) if not _ASIDE.search(line, 0, match.start())]
        given = {parse_number(match.group()) for match in _NUMBER.finditer(question)}
        is_money = "$" in last.group() or text[last.end() :][:8].lstrip().startswith("dollar")
        begins = [match for match in stated[:1] if not is_money and not _LEAD.sub("", line[: match.start()])]
        news = [match for match in stated if parse_number(match.group()) not in given]
        if begins or (news and (aside[1] or parse_number(last.group()) in given)):
            return _read_from(line, (begins or news)[-1])
    is_operand = _IS_OPERAND.search(text[max(0, last.start() - 20) : last.start()] + "0") is not None
    return Number(last.group(), None) if is_operand else _read_from(text, last)


def read_number(text: str) -> Number | None:
    """Read a text that begins with a number or says what one equals; None if it does neither."""
    sides = [_read_side(_LEAD.sub("", side, 1)) for side in text.split("=")]
    read = [side for side in sides if side is not None and side.value is not None]
    return read[-1] if read and sides[0] not in read else sides[0]


def _marked_numbers(text: str) -> Iterator[Number]:
    lines = (mark.group(1) for mark in _MARKED.finditer(text) if not _HEADING.match(text, mark.start(1)))
    answers = (found.text if (found := marked_answer(line)) else line for line in lines)
    return (number for answer in answers if (number := read_number(answer)))


def _read_side(side: str) -> Number | None:
    fraction = _read_fraction(side)
    if fraction is not None:
        return Number(side, fraction)
    match = _NUMBER.match(side)
    return None if match is None else _read_from(side, match)


def _read_from(text: str, match: re.Match[str]) -> Number:
    if _GOES_ON.match(text, match.end()):
        return Number(text, None)
    scale = _SCALE.match(text, match.end())
    power = 0 if scale is None else SCALES[scale.group(1).lower()]
    value = parse_number(match.group())
    return Number(match.group(), None if value is None else Fraction(value) * 10**power)


def _read_fraction(text: str) -> Fraction | None:
    """Read a fraction or mixed number that is not whole: '72/3' is a calculation."""
    if not _FRACTION.search(text):
        return None
    begun = _SLASHED.match(text)
    # What follows a fraction is its unit: '3/4 of an hour'.
    is_whole = begun is None or _GOES_ON.match(text, begun.end())
    form = normal_form(text.rstrip(_TRAIL) if begun is None or is_whole else begun.group())
    number = parse_exact(form) if "frac" in form or "/" in form else None
    return None if number is None or number.value.denominator == 1 else number.value


def _judge_as_harness(mode: str, solution: str, text: str) -> Outcome:
    """Judge as lm-eval's filter and its metric `exact_match` do; 'hash' compares all of the gold."""
    matches = _HARNESS[mode].findall(text)
    match = matches[-1 if mode == "flex" else 0] if matches else ""
    answer = next(filter(None, (match,) if isinstance(match, str) else match), "").strip()
    cleaned = [answer, solution if mode == "hash" else solution.rpartition("####")[2].strip()]
    for pattern in _HARNESS_IGNORED:
        cleaned = [pattern.sub("", one) for one in cleaned]
    is_correct = bool(matches) and cleaned[0].lower() == cleaned[1].lower()
    return right_or_wrong(is_correct, format_ok=bool(matches), extracted=answer if matches else None)
