"""Write a short text backwards: a generated task with a graded reward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Literal

from pydantic import Field, model_validator

from strop.errors import ConfigError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import SpecConflict, expert
from strop.spec.task import TaskSection
from strop.tasks.answers import judged_text
from strop.tasks.prompt import pose
from strop.tasks.task import Task, TaskLimits
from strop.tasks.version import fit_limits, hash_version

_PROMPT = "Write this text backwards, letter by letter: {text}"
_VERIFIER = "common-beginning-4"
_SPLITS = "by-problem-1"
_MAX_WORD_CHARS = 8
_MAX_PREAMBLE_TOKENS = 32
_CHANCE = {"beginning": 0.02, "any-order": 0.3}
"""Reward of nonsense: it may begin with the right letter, and shares some letters in order with any text."""
_DRAWS_PER_EXAMPLE = 50

# No word reads the same both ways, so copying is never right.
_WORD_LIST = """
    amber anchor apple autumn basket beacon bird border bottle branch bread bridge bright broom butter
    cabin candle canvas carpet castle cedar chalk cherry circle clever cloud clover coast copper corner
    cotton cradle crane cricket crystal curtain dance desert distant dragon dream dust early earth echo
    ember engine fabric falcon feather field finger flame forest fountain fox garden gentle ginger glass
    golden granite green hammer harbor harvest hidden hollow honey horse iron island ivory jacket jungle
    kettle kitchen ladder lantern lemon letter linen little lumber maple marble market meadow mirror mist
    morning mountain needle north novel oak ocean olive orchard oven paper pebble pencil pepper pillow
    planet plum pocket pond quiet quill rabbit rain raven ribbon river road rocket saddle salt sand season
    shadow shell silver simple smoke snow spark spring steam stone storm summer sugar table thread thunder
    timber tower travel valley velvet village violet walnut water wheel willow window winter wolf wooden
    yarn yellow
"""
WORDS = tuple(_WORD_LIST.split())


class ReverseTextSpec(TaskSection):
    """Write a short text backwards, letter by letter."""

    name: Literal["reverse-text"]
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )
    min_words: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Fewest words of a text, included.",
        json_schema_extra=expert("the texts can be made longer"),
    )
    max_words: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="Most words of a text, included.",
        json_schema_extra=expert("the texts can be made longer"),
    )
    partial_marks: Literal["beginning", "any-order"] = Field(
        default="beginning",
        description="What a wrong reply earns a part of the marks for: the letters that are right from its"
        " beginning, or letters in the right order anywhere. The second pays for one word said to everybody;"
        " it is here to see a run collapse, and for random models, which earn something by it.",
        json_schema_extra=expert("earlier versions paid for letters in any order, and can be repeated"),
    )

    @model_validator(mode="after")
    def _check_range(self) -> ReverseTextSpec:
        if self.min_words > self.max_words:
            raise SpecConflict(
                {"task.min_words": self.min_words, "task.max_words": self.max_words},
                "no length is left for a text",
                allowed="a smallest number of words that is at most the largest one",
                next_step="swap the two values",
            )
        return self


class ReverseText(Task):
    """Reward: number of leading letters that are right, over the length of the longer of reply and answer.

    Right only if equal but for case. The last non-blank line is judged, without outer white space.
    `format_ok`: the reply is one line. A letter counts only behind right ones, so almost nothing is earned
    without reading the text. `task.partial_marks = "any-order"` rewards constant words (the best that were
    tried earn a third of full marks), and a policy learns to reply with one of them to every text.
    """

    name = "reverse-text"

    def __init__(self, spec: ReverseTextSpec) -> None:
        self._spec = spec
        own_limit = _MAX_PREAMBLE_TOKENS + (_MAX_WORD_CHARS + 1) * spec.max_words
        limits = TaskLimits(max_reply_tokens=own_limit, chance=_CHANCE[spec.partial_marks])
        self._grade = share_of_beginning if spec.partial_marks == "beginning" else subsequence_ratio
        self.limits = fit_limits(limits, spec)

    @property
    def version(self) -> str:
        """Hash over the settings and limits: they decide every example."""
        return hash_version(self.name, _PROMPT, _VERIFIER, self.limits, self._spec, _SPLITS)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the texts of a split; held-out texts stay the same when `num_train` changes.

        Raises: ConfigError if the word counts allow too few different texts.
        """
        texts, num_held_out = self._texts, self._spec.num_held_out
        return texts[:num_held_out] if split is Split.HELD_OUT else texts[num_held_out:]

    def problem_of(self, example: Example) -> str:
        """Return the sorted words: another order of them needs the same letters."""
        return _sort_words(example.fields["text"])

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the text with the instruction."""
        return pose(_PROMPT.format(**example.fields), thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last line of the reply with the text written backwards."""
        lines = [line.strip() for line in (judged_text(text) or "").splitlines() if line.strip()]
        reply = lines[-1].casefold() if lines else ""
        gold = example.fields["text"][::-1]
        return Outcome(
            parts={"similarity": self._grade(reply, gold)},
            is_correct=reply == gold,
            format_ok=len(lines) == 1,
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the text written backwards, alone and below a sentence."""
        gold = example.fields["text"][::-1]
        return gold, f"Here it is:\n{gold}\n"

    @cached_property
    def _texts(self) -> tuple[Example, ...]:
        """Distinct texts, held-out ones first; no training text has the same words as a held-out one."""
        spec = self._spec
        wanted = spec.num_held_out + spec.num_train
        stream = random.Random(f"reverse-text/{spec.min_words}/{spec.max_words}")
        texts: dict[str, None] = {}
        held_out: set[str] = set()
        for _ in range(_DRAWS_PER_EXAMPLE * wanted):
            num_words = stream.randint(spec.min_words, spec.max_words)
            text = " ".join(stream.choice(WORDS) for _ in range(num_words))
            if len(texts) < spec.num_held_out:
                held_out.add(_sort_words(text))
            elif _sort_words(text) in held_out:
                continue
            texts[text] = None
            if len(texts) == wanted:
                return tuple(make_example(self.name, {"text": text}, text[::-1]) for text in texts)
        raise ConfigError(
            f"task.num_train={spec.num_train} and task.num_held_out={spec.num_held_out} ask for {wanted}"
            f" different texts of {spec.min_words} to {spec.max_words} words",
            allowed=f"about {len(texts)} texts in all at these lengths",
            next_step="raise task.max_words, or lower task.num_train",
        )


def _sort_words(text: str) -> str:
    return " ".join(sorted(text.split()))


def share_of_beginning(reply: str, gold: str) -> float:
    """Return the length of the common beginning of two texts, in letters, over the length of the longer one.

    Other characters are skipped and earn nothing: r-i-v has three of five characters right. 1 if and only
    if both are equal.
    """
    if reply == gold:
        return 1.0
    pairs = zip(filter(str.isalnum, reply), filter(str.isalnum, gold), strict=False)
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return num_right / max(len(reply), len(gold))


def subsequence_ratio(reply: str, gold: str) -> float:
    """Return 2 L / (len(reply) + len(gold)) with L the longest common subsequence; 1 if equal.

    Edges: two empty texts are equal; one empty text gives 0. Characters of the reply beyond four
    times the gold's length count in the denominator only, which bounds the work.
    """
    if reply == gold:
        return 1.0
    best = [0] * (len(gold) + 1)
    for char in reply[: 4 * len(gold)]:
        diagonal = 0
        for index, gold_char in enumerate(gold, start=1):
            above = best[index]
            best[index] = diagonal + 1 if char == gold_char else max(above, best[index - 1])
            diagonal = above
    return 2.0 * best[-1] / (len(reply) + len(gold))
