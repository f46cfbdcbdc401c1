"""Any data set of the reasoning-gym package as a task, scored by the data set's own function.

Tested with reasoning-gym 0.1.25. All examples come from one generator: two whose seeds are close serve the
same problems. Five data sets have no stored answer, some reward garbage or an echo of the question, and the
scorer of prime_factorization raises on words: then there is no score, never a 0.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from functools import cached_property
from importlib.metadata import version as package_version
from typing import Any, Literal

import numpy as np
from pydantic import Field

from strop.errors import ConfigError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import FreeTable, expert
from strop.tasks.answers import judged_text
from strop.tasks.generated.drawn import DrawnSection, DrawnTask
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import pose
from strop.tasks.task import TaskLimits
from strop.tasks.version import hash_version

_PROMPT = "{question}\n\nWrite your final answer between <answer> and </answer>."
_VERIFIER = "answer-tag-3"
_LIMITS = TaskLimits(max_reply_tokens=2048, base_stop_strings=("</answer>",), verify_limit_s=5.0)
_TAG = re.compile(r"<( ?/ ?)?answer ?>", re.IGNORECASE)
_BOX = re.compile(r"\$?\\boxed\{([^{}]*)\}\$?")
_OWN_SETTINGS = ("seed", "size")
_SEED = 0
_FULL_SCORE = 1.0 - 1e-9
_DRAWS_PER_EXAMPLE = 8
_UNFIT = frozenset(
    {
        *("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"),
        "composite",
    }
)
"""Generators that iterate over Python's sets, whose problems differ between processes, and the one that mixes
others, as the task mixture does."""


class ReasoningGymSpec(DrawnSection):
    """Any data set of the reasoning-gym package."""

    name: Literal["reasoning-gym"]
    dataset: str = Field(
        min_length=1,
        max_length=100,
        description="Name of the reasoning-gym data set, for example 'chain_sum'.",
    )
    config: FreeTable = Field(
        default={},
        description="The data set's own settings but seed and size, handed on as they stand. A file that"
        " extends another adds to the table key by key; naming another data set starts it anew.",
        json_schema_extra=expert("each generator has parameters of its own"),
    )

    @property
    def judges_by_data(self) -> bool:
        """True: the scorer needs the generated problem."""
        return True


class ReasoningGym(DrawnTask):
    """Answer in a tag. Reward: the data set's score in [0, 1]; right means full marks.

    The last `<answer>` of the reply that is closed and not empty is judged; without a tag, the last line.
    `format_ok`: the tag is there.
    """

    name = "reasoning-gym"

    def __init__(self, spec: ReasoningGymSpec) -> None:
        super().__init__(spec, _LIMITS)
        self._spec = spec
        self._entries: dict[str, Mapping[str, Any]] = {}
        """What the scorer needs, by example id."""

    @property
    def variant(self) -> str:
        """The data set."""
        return self._spec.dataset

    @property
    def version(self) -> str:
        """Hash over settings, prompt, limits and the release of the package."""
        _load_package()
        release = package_version("reasoning-gym")
        return hash_version(self.name, _PROMPT, _VERIFIER, self.limits, self._spec, release)

    def draws(self) -> Iterator[Example]:
        """Yield the data set's problems.

        Raises: ConfigError if the package, the data set or one of its settings does not exist.
        """
        spec = self._spec
        for index in range(len(self._dataset)):
            with _own_random_state(f"{spec.dataset}/{_SEED}/{index}"):
                entry = self._dataset[index]
            question, answer = str(entry["question"]), entry["answer"]
            example = make_example(
                self.name,
                {"dataset": spec.dataset, "question": question},
                None if answer is None else str(answer),
            )
            self._entries.setdefault(example.example_id, entry)
            yield example

    def problem_of(self, example: Example) -> str:
        """Return a name shared by questions with the same words, numbers and signs and the same answer.

        Without a stored answer, they stay in their order.
        """
        words = normal_text(example.fields["question"]).split()
        key = words if example.answer is None else [*sorted(words), "\n", example.answer]
        return hashlib.sha256(" ".join(key).encode()).hexdigest()[:16]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the question and name the tag for the answer."""
        content = _PROMPT.format(question=example.fields["question"])
        return pose(content, base=f"{content}\n", thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Score the answer with the data set's own function.

        Raises: KeyError if the example is not of this task; any exception of the data set's function.
        """
        answer, is_tagged = answer_of(text)
        if not self._entries:
            self.examples(Split.HELD_OUT)  # Draws them.
        with _own_random_state(example.example_id):
            score = float(self._dataset.score_answer(answer, self._entries[example.example_id]))
        return Outcome(parts={"score": score}, is_correct=score >= _FULL_SCORE, format_ok=is_tagged)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the stored answer in its tag, if the data set stores one."""
        if example.answer is None:
            return ()
        tagged = f"<answer>{example.answer}</answer>"
        return tagged, f"Let me think.\n{tagged}\n"

    @cached_property
    def _dataset(self) -> Any:
        spec = self._spec
        package = _load_package()
        if spec.dataset not in (known := list_datasets()):
            raise ConfigError(
                f"task.dataset={spec.dataset} is not among the data sets of reasoning-gym that are taken",
                allowed=", ".join(known),
                next_step="choose one of these names",
            )
        size = _DRAWS_PER_EXAMPLE * (self.num_held_out + self.num_train)
        try:
            with _own_random_state(f"{spec.dataset}/{_SEED}"):
                return package.create_dataset(spec.dataset, seed=_SEED, size=size, **spec.config)
        except (AssertionError, TypeError, ValueError) as error:
            settings = fields(package.factory.DATASETS[spec.dataset][1])
            names = sorted({field.name for field in settings} - set(_OWN_SETTINGS))
            raise ConfigError(
                f"task.config={spec.config} for reasoning-gym data set {spec.dataset}"
                f" ({type(error).__name__}: {error})",
                allowed=f"the data set's settings {', '.join(names)}",
                next_step="correct or leave out the setting in task.config",
            ) from error


def answer_of(reply: str) -> tuple[str, bool]:
    """Return the answer of a reply, and whether it stands in a tag."""
    before, *pieces = _TAG.split(judged_text(reply) or "")
    slashes, texts = pieces[::2], [text.strip() for text in pieces[1::2]]
    if all(slashes):
        # The template may have opened the tag.
        lines = (before + "".join(texts)).strip().splitlines()
        return (lines[-1].strip() if lines else ""), False
    # '<answer> and </answer>' is the prompt's wording. A last closing tag may be the stop string.
    opened = [
        (text, end)
        for slash, text, end in zip(slashes, texts, [*slashes[1:], None], strict=True)
        if not slash
    ]
    closed = [text for text, end in opened if end and text not in ("", "and")]
    answer = next(reversed(closed or [text for text, _ in opened if text]), "")
    box = _BOX.fullmatch(answer)
    return (box[1].strip() if box else answer), True


def list_datasets() -> list[str]:
    """Return the names of all data sets that are taken. Raises: ConfigError without the package."""
    return sorted(set(_load_package().factory.DATASETS) - _UNFIT)


def _load_package() -> Any:
    try:
        with warnings.catch_warnings():
            # Raised by its sources when Python compiles them for the first time.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"task.name=reasoning-gym, but the package is not installed ({error})",
            allowed="reasoning-gym with the extra 'tasks' installed",
            next_step="pip install 'strop[tasks]'",
        ) from error
    return reasoning_gym


@contextmanager
def _own_random_state(stream_name: str) -> Iterator[None]:
    """Seed the process-wide generators, from which some data sets draw, and restore them behind the block."""
    seed = int.from_bytes(hashlib.blake2b(stream_name.encode(), digest_size=4).digest(), "little")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        # Some of the generators print.
        with redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
