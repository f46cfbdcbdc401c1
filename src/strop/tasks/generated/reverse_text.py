"""Write a short text backwards: a generated task with a graded reward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal

from pydantic import Field

from strop.rollout import Example, Message, Outcome, make_example
from strop.spec.base import expert
from strop.tasks.answers import judged_text
from strop.tasks.generated.drawn import DrawnSection, DrawnTask
from strop.tasks.prompt import pose
from strop.tasks.task import TaskLimits
from strop.tasks.version import hash_version

_PROMPT = "Write this text backwards, letter by letter: {text}"
_VERIFIER = "common-beginning-4"
_MAX_WORD_CHARS = 8
_MAX_PREAMBLE_TOKENS = 32
_CHANCE = 0.02
"""Reward of nonsense: it may begin with the right letter."""

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


class ReverseTextSpec(DrawnSection):
    """Write a short text backwards, letter by letter."""

    name: Literal["reverse-text"]
    max_words: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="Most words of a text, included.",
        json_schema_extra=expert("the texts can be made longer"),
    )


class ReverseText(DrawnTask):
    """Reward: number of leading letters that are right, over the length of the longer of reply and answer.

    Right only if equal but for case. The last non-blank line is judged, without outer white space.
    `format_ok`: the reply is one line. A letter counts only behind right ones, so almost nothing is earned
    without reading the text.
    """

    name = "reverse-text"

    def __init__(self, spec: ReverseTextSpec) -> None:
        self._spec = spec
        own_limit = _MAX_PREAMBLE_TOKENS + (_MAX_WORD_CHARS + 1) * spec.max_words
        super().__init__(spec, TaskLimits(max_reply_tokens=own_limit, chance=_CHANCE))

    @property
    def version(self) -> str:
        """Hash over the settings and limits: they decide every example."""
        return hash_version(self.name, _PROMPT, _VERIFIER, self.limits, self._spec)

    def draws(self) -> Iterator[Example]:
        """Yield texts of words of the list."""
        stream = random.Random(f"reverse-text/1/{self._spec.max_words}")
        while True:
            num_words = stream.randint(1, self._spec.max_words)
            text = " ".join(stream.choice(WORDS) for _ in range(num_words))
            yield make_example(self.name, {"text": text}, text[::-1])

    def problem_of(self, example: Example) -> str:
        """Return the sorted words: another order of them needs the same letters."""
        return " ".join(sorted(example.fields["text"].split()))

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the text with the instruction."""
        return pose(_PROMPT.format(**example.fields), thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last line of the reply with the text written backwards."""
        lines = [line.strip() for line in (judged_text(text) or "").splitlines() if line.strip()]
        reply = lines[-1].casefold() if lines else ""
        gold = example.fields["text"][::-1]
        return Outcome(
            parts={"similarity": share_of_beginning(reply, gold)},
            is_correct=reply == gold,
            format_ok=len(lines) == 1,
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the text written backwards, alone and below a sentence."""
        gold = example.fields["text"][::-1]
        return gold, f"Here it is:\n{gold}\n"


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
