"""Multiple-choice questions in the schema of MMLU: `question`, `subject`, `choices` (4), `answer` (0 to 3).

The model writes the letter. Published scores, which lm-eval makes, take the letter that it finds likeliest,
and differ by many points. Evaluation is on the test split, training on `auxiliary_train`, whose rows name no
subject.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal
from unicodedata import normalize

from pydantic import Field

from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import SOURCE_HELP, FewShot, TrainingRows
from strop.tasks.answers import judged_text
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import join_shots, pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row, read_shot_rows
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples, gold_of, require_texts
from strop.tasks.task import TaskLimits, right_or_wrong

_LETTERS = "ABCD"
_PROMPT = (
    "The following is a multiple choice question{about}. Reply with the letter of the right choice"
    " alone.\n\n{question}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
)
_BASE_HEADER = "The following are multiple choice questions (with answers) about {subject}.\n\n"
_BASE_PROMPT = "{question}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
"""The form of lm-eval 0.4.13's mmlu, also of its generative variant."""
_END = r"(?!'?[A-Za-z0-9_])"
_LETTER_ALONE = re.compile(r"[\W_]*(?:\\boxed\{(?:\\text\{)?)?([A-D])[\W_]*")
_PHRASE = re.compile(
    r"(?:\b(?:answer|(?:right|correct|best) (?:choice|option))\b"
    r"(?:[^\w.;?!\n]+(?:is|be|must|should|would|to|the|this|question|therefore|thus|clearly|option|choice|letter)\b)*"
    rf"[^\w.;?!]*|\\boxed\{{[^\w]*(?:text\{{[^\w]*)?)"
    # A small letter may be an article, unless it is the last word.
    rf"((?-i:[A-D]){_END}|[a-d](?=[)\].*_$}}]*\s*\Z))",
    re.IGNORECASE,
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
_RULED_OUT = re.compile(r"[^\w.;]*(?:is|are|was)(?:n't| not|\s+(?:in|un)\w+| wrong| false| too)\b")
_RULES_OUT = re.compile(
    r"(?:\b(?:not|nor|never|except|without|cannot)|n't)(?: be)?(?: option| choice)?[^\w.;]+$", re.IGNORECASE
)
_SEVERAL = re.compile(
    rf"[^\w.;]{{0,8}}(?:,|/|&|\bor\b|\band\b)[^\w.;]{{0,8}}[A-D]{_END}(?! (?!(?:are|and|or)\b)[a-z])"
)
_MAX_CHOICE_CHARS = 2000


class MmluSpec(FewShot, TrainingRows):
    """Multiple-choice questions of 57 subjects; the model writes the letter."""

    name: Literal["mmlu"]
    source: Unhashed[str] = Field(
        default="cais/mmlu", min_length=1, description=SOURCE_HELP.format("cais/mmlu")
    )
    subject: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Held-out questions of one subject, for example 'astronomy'; training rows name none."
        " none = all.",
        json_schema_extra=expert("the questions of MMLU have subjects"),
    )


class Mmlu(RowTask):
    """Right if the reply chooses the right letter, as `find_letter` says.

    `format_ok`: the first line is that letter, maybe in brackets or with a period.
    """

    def __init__(self, spec: MmluSpec) -> None:
        def why_left_out(row: Row, split: Split) -> str | None:
            if split is Split.TRAIN or spec.subject is None or row.values.get("subject") == spec.subject:
                return None
            return "another subject"

        reading = RowReading(
            layout=DataLayout(
                train=("all/auxiliary_train-00000-of-00001.parquet",),
                held_out=("all/test-00000-of-00001.parquet",),
                shots=("all/dev-00000-of-00001.parquet",),
            ),
            to_example=_to_example,
            # Many questions read alike ('Which of these is true?') and differ in their choices.
            question=lambda example: "\n".join([example.fields["question"], *example.fields["choices"]]),
            why_left_out=why_left_out,
            drops_shared=True,
        )
        super().__init__(
            spec,
            reading,
            TaskLimits(max_reply_tokens=32, base_stop_strings=("\n", "</s>")),
            source=spec.source,
            prompt=_PROMPT,
            base_prompt=_BASE_HEADER + _BASE_PROMPT,
            verifier="chosen-letter-2",
        )
        self._num_few_shot = spec.num_few_shot

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the question with its choices, under a line that names the subject."""
        subject = _subject(example)
        content = _PROMPT.format(about=f" about {subject}" if subject else "", **_choices(example))
        header = _BASE_HEADER.format(subject=subject) if subject else ""
        shots = [shot for shot in self.shots if _subject(shot) == subject] if self._num_few_shot else []
        shots = shots[: self._num_few_shot]
        solved = join_shots(
            [
                (_BASE_PROMPT.format(**_choices(shot)), f" {shot.answer}")
                for shot in shots[: self._num_few_shot]
            ]
        )
        base = header + solved + _BASE_PROMPT.format(**_choices(example))
        return pose(content, base=base, thinking=self._spec.thinking)

    def prompt_fields(self, example: Example) -> Mapping[str, str]:
        """Return the question, the subject in words, and the choices `a` to `d`."""
        return {"subject": _subject(example), **_choices(example)}

    @cached_property
    def shots(self) -> tuple[Example, ...]:
        """The solved examples of the data, in its order, whether or not the prompts show them.

        Raises: DataError if the source has none.
        """
        rows = read_shot_rows(self._source, self._reading.layout)
        return tuple(map(self._reading.to_example, rows))

    @cached_property
    def _splits(self) -> SplitExamples:
        splits = self._read_splits()
        return replace(splits, shots=self.shots) if self._num_few_shot else splits

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the letter that the reply chooses with the right one; a repeated question chooses none."""
        question = str(example.fields.get("question", ""))
        judged = judged_text(text, lambda part: _PHRASE.search(part) is not None, question)
        judged = normalize("NFKC", judged or "").strip()
        letter = (
            None if judged.endswith("Answer:") else find_letter(judged, example.fields.get("choices", ()))
        )
        return right_or_wrong(
            letter == gold_of(example),
            format_ok=_LETTER_ALONE.fullmatch(judged.partition("\n")[0]) is not None,
            extracted=letter,
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the letter alone, with its choice, in brackets and in a sentence."""
        letter = example.answer or "A"
        choice = example.fields["choices"][_LETTERS.index(letter)]
        return letter, f"{letter}. {choice}", f" ({letter})", f"The answer is {letter}."


def find_letter(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter that a reply chooses: one that stands alone, or is claimed, or opens the first line.

    A choice in words is its letter. None if there is none, or the first line names several.
    """
    line = text.partition("\n")[0]
    if alone := _LETTER_ALONE.fullmatch(line):
        return alone[1]
    said = normal_text(line[:_MAX_CHOICE_CHARS])
    for letter, choice in zip(_LETTERS, map(normal_text, choices), strict=False):
        if choice and said in (choice, f"{letter.lower()} {choice}"):
            return letter
    claims = [*_PHRASE.finditer(text)][-1:] or [*_CLAIM.finditer(text)][-1:]
    letters = claims or [
        m for m in _LETTER.finditer(line) if not _RULES_OUT.search(line[max(0, m.start() - 20) : m.start()])
    ]
    for match in letters:
        if _SEVERAL.match(match.string, match.end()):
            return None
        if not _RULED_OUT.match(match.string, match.end()):
            return match.group()[-1].upper()
    return None


def _subject(example: Example) -> str:
    return str(example.fields["subject"]).replace("_", " ")


def _choices(example: Example) -> dict[str, str]:
    """Return the fields of a question that the prompts use."""
    a, b, c, d = example.fields["choices"]
    return {"question": example.fields["question"].strip(), "a": a, "b": b, "c": c, "d": d}


def _to_example(row: Row) -> Example:
    (question,) = require_texts(row, "question")
    choices, answer = row.values.get("choices"), row.values.get("answer")
    if not (
        isinstance(choices, list)
        and len(choices) == len(_LETTERS)
        and isinstance(answer, int)
        and 0 <= answer < len(_LETTERS)
    ):
        raise bad_row(
            f"{row.place} has choices {str(choices)[:80]} and answer {answer!r}",
            allowed="a list of four choices, and the index of the right one, 0 to 3",
        )
    fields = {
        "question": question,
        "subject": str(row.values.get("subject") or ""),
        "choices": [str(choice) for choice in choices],
    }
    return make_example("mmlu", fields, _LETTERS[answer])
