"""Tasks that generate their problems, in any number: sums, and data sets of reasoning-gym.

Sums of two whole numbers are the canary that every machine can train on. The two orders, 3 + 5 and 5 + 3, are
two examples of one problem, which is either held out or trained on.

A data set of reasoning-gym is scored by its own function. Tested with reasoning-gym 0.1.25. All examples come
from one generator: two whose seeds are close serve the same problems. Five data sets have no stored answer,
some reward garbage or an echo of the question, and the scorer of prime_factorization raises on words: then
there is no score, never a 0.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import cached_property
from importlib.metadata import version as package_version
from typing import Any, Literal

from pydantic import Field

from strop.errors import ConfigError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import FreeTable, expert
from strop.spec.task import TaskSection
from strop.tasks.answers import text_after_thinking
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import pose_example
from strop.tasks.registry import import_extra
from strop.tasks.task import Task, TaskLimits, fit_limits, hash_version, right_or_wrong

_SUM = "What is {a} + {b}?"
_BASE_SUM = f"{_SUM}\nA:"


class ArithmeticSpec(TaskSection):
    """Sums of two whole numbers: What is a + b?"""

    name: Literal["arithmetic"] = "arithmetic"
    min_value: int = Field(
        default=1,
        ge=1,
        le=300,
        description="Smallest number, included; 10 with 99: two digits each.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    max_value: int = Field(
        default=20,
        ge=1,
        le=300,
        description="Largest number, included.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    num_held_out: int = Field(
        default=100,
        ge=1,
        description="Pairs kept out of training for evaluation, in both orders of their numbers. Which ones"
        " is fixed by their content, not by the run's seed.",
    )

    @property
    def num_train(self) -> int:
        """Pairs to train on; the mirror of the last one of an odd number that is held out is in no split."""
        num_values = max(0, self.max_value - self.min_value + 1)
        return max(0, num_values**2 - self.num_held_out - self.num_held_out % 2)


class Arithmetic(Task):
    """What is a + b? Right if the last number of the reply is the sum.

    `format_ok`: the reply ends with a number, as defined in `answers`.
    """

    name = "arithmetic"

    def __init__(self, spec: ArithmeticSpec) -> None:
        self.limits = fit_limits(TaskLimits(max_reply_tokens=32, base_stop_strings=("\n",)), spec)
        self._spec = spec

    @property
    def version(self) -> str:
        """Hash over the settings and limits: they decide every example."""
        return hash_version(self.name, _BASE_SUM, "last-number-2", self.limits, self._spec)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the sums of a split."""
        return self._splits[split]

    @cached_property
    def _splits(self) -> Mapping[Split, Sequence[Example]]:
        """All pairs in an order that the settings alone decide, those of held-out problems first."""
        spec, num = self._spec, self._spec.num_held_out
        equal = [(value, value) for value in range(spec.min_value, spec.max_value + 1)]
        problems = [((a, b), (b, a)) for b, _ in equal for a in range(spec.min_value, b)]
        # Two pairs of equal numbers form a problem, so that every problem has two pairs.
        problems += zip(equal[::2], equal[1::2], strict=False)
        ranked = [(rank, problems[_place_of(rank, len(problems))]) for rank in range(len(problems))]
        pairs: list[tuple[int, int]] = []
        for part in (ranked[: math.ceil(num / 2)], ranked[math.ceil(num / 2) :]):
            # One pair of each problem, then the others; which, the rank decides, not the numbers.
            for other in (0, 1):
                pairs += [problem[(rank + other) % 2] for rank, problem in part]
        # Of an odd number of pairs one has no partner.
        pairs += equal[-1:] if len(equal) % 2 else []
        mirrored = {(b, a) for a, b in pairs[:num]}
        train = [pair for pair in pairs[num:] if pair not in mirrored][: spec.num_train]
        return {
            split: [make_example(self.name, {"a": a, "b": b}, str(a + b)) for a, b in chosen]
            for split, chosen in ((Split.TRAIN, train), (Split.HELD_OUT, pairs[:num]))
        }

    def problem_of(self, example: Example) -> str:
        """Return the numbers with the smaller one first: both orders are one problem."""
        low, high = sorted((example.fields["a"], example.fields["b"]))
        return f"{low} + {high}"

    def render(self, example: Example) -> tuple[Message, ...]:
        """Ask for the sum in one sentence."""
        asked, base = (wording.format(**example.fields) for wording in (_SUM, _BASE_SUM))
        return pose_example(self._spec, example, asked, base=base)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last number of the reply with the sum."""
        from strop.tasks.mathematics import last_number

        # Without its numbers an example has no score.
        judged, total = text_after_thinking(text) or "", example.fields["a"] + example.fields["b"]
        number = last_number(judged)
        is_last = number is not None and judged.rstrip(" \n.!)]}*$_`'\"").endswith(number.text)
        return right_or_wrong(number is not None and number.value == total, format_ok=is_last)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the sum alone, in a sentence, with thousands commas and with a decimal part."""
        a, b = example.fields["a"], example.fields["b"]
        return str(a + b), f"{a} + {b} = {a + b}.", f"The answer is {a + b:,}", f"**{a + b}.0**"


def _place_of(rank: int, size: int) -> int:
    """Return the place of `rank` in a fixed permutation of range(size).

    A Feistel network permutes the next larger square power of two; a result beyond `size` is permuted again.
    """
    num_bits = max(1, math.ceil((size - 1).bit_length() / 2))
    mask = (1 << num_bits) - 1
    while True:
        left, right = rank >> num_bits, rank & mask
        for round_index in range(4):
            name = f"arithmetic/{size}/{round_index}/{right}".encode()
            noise = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
            left, right = right, left ^ (noise & mask)
        rank = left << num_bits | right
        if rank < size:
            return rank


_QUESTION = "{question}\n\nWrite your final answer between <answer> and </answer>."
_CLOSING = re.compile(r"< ?/ ?answer ?>", re.IGNORECASE)
_OPENED = re.compile(rf"<answer ?>(.*?)({_CLOSING.pattern}|(?=<answer ?>)|\Z)", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"\$?\\boxed\{([^{}]*)\}\$?")
_DRAWS = 8
"""For each example that is asked for: problems may repeat each other."""
_UNFIT = {
    *("composite", "isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication"),
    *("ransom_note", "word_ladder"),
}
"""Data sets whose problems differ between processes, and the one that mixes others, as a mixture does."""


class ReasoningGymSpec(TaskSection):
    """Any data set of the reasoning-gym package."""

    name: Literal["reasoning-gym"]
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(default=100, ge=1, le=10**7, description="Examples that are held out.")
    dataset: str = Field(min_length=1, description="Name of the data set, for example 'chain_sum'.")
    config: FreeTable = Field(
        default={},
        description="The data set's own settings but seed and size, handed on as they stand. A file that"
        " extends another adds to the table key by key; naming another data set starts it anew.",
        json_schema_extra=expert("each generator has parameters of its own"),
    )


class ReasoningGym(Task):
    """Answer in a tag. Reward: the data set's score in [0, 1]; right means full marks.

    The last `<answer>` of the reply that is closed and not empty is judged; without a tag, the last line.
    `format_ok`: the tag is there.
    """

    name = "reasoning-gym"

    def __init__(self, spec: ReasoningGymSpec) -> None:
        limits = TaskLimits(max_reply_tokens=2048, base_stop_strings=("</answer>",), verify_limit_s=5.0)
        self.limits = fit_limits(limits, spec)
        self._spec, self.variant = spec, spec.dataset
        self._entries: dict[str, Mapping[str, Any]] = {}
        """What the scorer needs, by example id."""

    @property
    def version(self) -> str:
        """Hash that covers the release of the package too. Raises: ConfigError if it is not installed."""
        import_extra("reasoning_gym")
        release = package_version("reasoning-gym")
        return hash_version(self.name, _QUESTION, "answer-tag-3", self.limits, self._spec, release)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split; held-out ones stay the same when `num_train` changes.

        Raises: ConfigError if the package, the data set or one of its settings does not exist, or if there
            are too few different problems.
        """
        num = self._spec.num_held_out
        return self._drawn[:num] if split is Split.HELD_OUT else self._drawn[num:]

    @cached_property
    def _drawn(self) -> Sequence[Example]:
        """Different examples, held-out ones first; no other one poses a problem of theirs."""
        spec = self._spec
        num_wanted = spec.num_held_out + spec.num_train
        found: dict[str, Example] = {}
        held_out: set[str] = set()
        for index in range(_DRAWS * num_wanted):
            with redirect_stdout(sys.stderr):  # Some of the generators print.
                entry = self._dataset[index]
            answer = None if entry["answer"] is None else str(entry["answer"])
            fields = {"dataset": spec.dataset, "question": str(entry["question"])}
            example = make_example(self.name, fields, answer)
            if len(found) < spec.num_held_out:
                held_out.add(self.problem_of(example))
            elif self.problem_of(example) in held_out:
                continue
            found.setdefault(example.example_id, example)
            self._entries.setdefault(example.example_id, entry)
            if len(found) == num_wanted:
                return tuple(found.values())
        raise ConfigError(
            f"task.num_train={spec.num_train} and task.num_held_out={spec.num_held_out} ask for"
            f" {num_wanted} different problems",
            allowed=f"about {len(found)} in all with these settings",
            next_step="lower task.num_train, or let the task's own settings allow more",
        )

    @cached_property
    def _dataset(self) -> Any:
        spec, create = self._spec, import_extra("reasoning_gym").create_dataset
        size = _DRAWS * (spec.num_held_out + spec.num_train)
        try:
            if spec.dataset in _UNFIT:
                raise ValueError("its problems are others in each process")
            return create(spec.dataset, seed=0, size=size, **spec.config)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"task.dataset={spec.dataset} with task.config={spec.config}"
                f" ({type(error).__name__}: {error})",
                allowed=f"{', '.join(list_datasets())}, each with its own settings but seed and size",
                next_step="correct the name, or the setting in task.config",
            ) from error

    def problem_of(self, example: Example) -> str:
        """Return a name shared by questions with the same words, numbers and signs and the same answer.

        Without a stored answer, they stay in their order.
        """
        words = normal_text(example.fields["question"]).split()
        key = words if example.answer is None else [*sorted(words), "\n", example.answer]
        return hashlib.sha256(" ".join(key).encode()).hexdigest()[:16]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the question and name the tag for the answer."""
        content = _QUESTION.format(question=example.fields["question"])
        return pose_example(self._spec, example, content, base=f"{content}\n")

    def warm_up(self) -> None:
        """Draw the examples: the scorer needs the generated problem."""
        self.examples(Split.HELD_OUT)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Score the answer with the data set's own function.

        Raises: KeyError if the example is not of this task; any exception of the data set's function.
        """
        answer, is_tagged = answer_of(text)
        self.warm_up()
        score = float(self._dataset.score_answer(answer, self._entries[example.example_id]))
        return Outcome(parts={"score": score}, is_correct=score >= 1.0 - 1e-9, format_ok=is_tagged)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the stored answer in its tag, if the data set stores one."""
        if example.answer is None:
            return ()
        tagged = f"<answer>{example.answer}</answer>"
        return tagged, f"Let me think.\n{tagged}\n"


def answer_of(reply: str) -> tuple[str, bool]:
    """Return the answer of a reply, and whether it stands in a tag."""
    judged = text_after_thinking(reply) or ""
    opened = [(text.strip(), end) for text, end in _OPENED.findall(judged)]
    if not opened:
        # The template may have opened the tag.
        lines = _CLOSING.sub("", judged).strip().splitlines()
        return (lines[-1].strip() if lines else ""), False
    # '<answer> and </answer>' is the prompt's wording. A last closing tag may be the stop string.
    closed = [text for text, end in opened if end and text not in ("", "and")]
    answer = next(reversed(closed or [text for text, _ in opened if text]), "")
    box = _BOX.fullmatch(answer)
    return (box[1].strip() if box else answer), True


def list_datasets() -> list[str]:
    """Return the names of all data sets that are taken. Raises: ConfigError without the package."""
    return sorted(set(import_extra("reasoning_gym").factory.DATASETS) - _UNFIT)
