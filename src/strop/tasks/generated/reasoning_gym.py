"""Any data set of the reasoning-gym package as a task, scored by the data set's own function.

Tested with reasoning-gym 0.1.25. All examples come from one generator: two whose seeds are close serve the
same problems. Five data sets have no stored answer, some reward garbage or an echo of the question, and the
scorer of prime_factorization raises on words: then there is no score, never a 0.

An example depends only on data set, settings and seed, in every process.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import version as package_version
from typing import Any, Literal

import numpy as np
from pydantic import Field

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import FreeTable, expert
from strop.spec.task import TaskSection
from strop.tasks.answers import judged_text
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import pose
from strop.tasks.task import Task, TaskLimits
from strop.tasks.version import fit_limits, hash_version

_MAX_REPLY_TOKENS = 2048
_PROMPT = "{question}\n\nWrite your final answer between <answer> and </answer>."
_BASE_STOP_STRINGS = ("</answer>",)
_VERIFIER = "answer-tag-3"
_TAG = re.compile(r"<( ?/ ?)?answer ?>", re.IGNORECASE)
_BOX = re.compile(r"\$?\\boxed\{([^{}]*)\}\$?")
_VERIFY_LIMIT_S = 5.0
_OWN_SETTINGS = ("seed", "size")
_FULL_SCORE = 1.0 - 1e-9
HASH_SEEDED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Data sets whose generators iterate over Python's sets: their problems depend on its hash seed."""
_DRAWS_PER_EXAMPLE = 8


class ReasoningGymSpec(TaskSection):
    """Any data set of the reasoning-gym package."""

    name: Literal["reasoning-gym"]
    dataset: str = Field(
        min_length=1,
        max_length=100,
        description="Name of the reasoning-gym data set, for example 'chain_sum'.",
    )
    config: FreeTable = Field(
        default={},
        description="The data set's own settings, handed on as they stand. A file that extends another"
        " adds to the table key by key; naming another data set starts it anew.",
        json_schema_extra=expert("each generator has parameters of its own"),
    )
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )
    data_seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed of the data set's generator. Apart from the run's seed, so that runs with"
        " different seeds see the same examples.",
        json_schema_extra=expert("another draw of the same generator tests what one draw says"),
    )

    @property
    def judges_by_data(self) -> bool:
        """True: the scorer needs the generated problem."""
        return True


class ReasoningGym(Task):
    """Answer in a tag. Reward: the data set's score in [0, 1]; right means full marks.

    The last `<answer>` of the reply that is closed and not empty is judged; without a tag, the last line.
    `format_ok`: the tag is there.
    """

    name = "reasoning-gym"

    def __init__(self, spec: ReasoningGymSpec) -> None:
        reserved = [key for key in _OWN_SETTINGS if key in spec.config]
        if reserved:
            raise ConfigError(
                f"task.config sets {' and '.join(reserved)}",
                allowed="the data set's other settings; strop sets seed and size itself",
                next_step="use task.data_seed, task.num_train and task.num_held_out",
            )
        self._spec = spec
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS,
            base_stop_strings=_BASE_STOP_STRINGS,
            verify_limit_s=_VERIFY_LIMIT_S,
        )
        self.limits = fit_limits(limits, spec)

    @property
    def variant(self) -> str:
        """The data set."""
        return self._spec.dataset

    @property
    def version(self) -> str:
        """Hash over settings, prompt, limits and the release of the package."""
        _import_package(self._spec.dataset)
        release = package_version("reasoning-gym")
        return hash_version(self.name, _PROMPT, _VERIFIER, self.limits, self._spec, release)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split; a question, in any order of its words, is in one split only, once.

        Raises: ConfigError if the package, the data set or one of its settings does not exist;
            DataError if the data set has too few different questions.
        """
        examples = tuple(example for example, _ in self._problems.values())
        num_held_out = self._spec.num_held_out
        return examples[:num_held_out] if split is Split.HELD_OUT else examples[num_held_out:]

    def problem_of(self, example: Example) -> str:
        """Return a name shared by questions that differ only in order (`problem_key`)."""
        key = problem_key(example.fields["question"], example.answer)
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the question and name the tag for the answer."""
        content = _PROMPT.format(question=example.fields["question"])
        return pose(content, base=f"{content}\n", thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Score the answer with the data set's own function.

        Raises: KeyError if the example is not of this task; any exception of the data set's function.
        """
        answer, is_tagged = answer_of(text)
        _, entry = self._problems[example.example_id]
        with _own_random_state(example.example_id):
            score = float(self._dataset.score_answer(answer, entry))
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
        package = _import_package(spec.dataset)
        own = {"seed": spec.data_seed, "size": _DRAWS_PER_EXAMPLE * (spec.num_held_out + spec.num_train)}
        try:
            with _own_random_state(f"{spec.dataset}/{spec.data_seed}"):
                return package.create_dataset(spec.dataset, **{**spec.config, **own})
        except (AssertionError, TypeError, ValueError) as error:
            settings = fields(package.factory.DATASETS[spec.dataset][1])
            names = sorted({field.name for field in settings} - set(_OWN_SETTINGS))
            raise ConfigError(
                f"task.config={spec.config} for reasoning-gym data set {spec.dataset}"
                f" ({type(error).__name__}: {error})",
                allowed=f"the data set's settings {', '.join(names)}",
                next_step="correct or leave out the setting in task.config",
            ) from error

    @cached_property
    def _problems(self) -> dict[str, tuple[Example, Mapping[str, Any]]]:
        """Different examples with the entries that their scorer needs, by id, held-out ones first."""
        spec, dataset = self._spec, self._dataset
        num_wanted = spec.num_held_out + spec.num_train
        problems: dict[str, tuple[Example, Mapping[str, Any]]] = {}
        held_out: set[str] = set()
        for index in range(len(dataset)):
            with _own_random_state(f"{spec.dataset}/{spec.data_seed}/{index}"):
                entry = dataset[index]
            question, answer = str(entry["question"]), entry["answer"]
            answer = None if answer is None else str(answer)
            key = problem_key(question, answer)
            if len(problems) < spec.num_held_out:
                held_out.add(key)
            elif key in held_out:
                continue
            example = make_example(self.name, {"dataset": spec.dataset, "question": question}, answer)
            problems.setdefault(example.example_id, (example, entry))
            if len(problems) == num_wanted:
                return problems
        raise DataError(
            f"task.num_train={spec.num_train} and task.num_held_out={spec.num_held_out} ask for"
            f" {num_wanted} different questions of reasoning-gym data set {spec.dataset}",
            allowed=f"about {len(problems)} in all with these settings",
            next_step="lower task.num_train, or widen the data set with task.config",
        )


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
    """Return the names of all data sets that this process can draw, except the one that mixes others.

    Raises: ConfigError if the package is not installed.
    """
    package = _import_package(None)
    unfit = {"composite"} | (HASH_SEEDED if sys.flags.hash_randomization else set())
    return sorted(name for name in package.factory.DATASETS if name not in unfit)


def _import_package(dataset: str | None) -> Any:
    """Import reasoning-gym (about two seconds) and check the name of a data set."""
    try:
        with warnings.catch_warnings():
            # Raised by its sources when Python compiles them for the first time.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task.name=reasoning-gym, but the package is not installed ({error})",
            allowed="reasoning-gym with the extra 'tasks' installed",
            next_step="pip install 'strop[tasks]'",
        ) from error
    if dataset in HASH_SEEDED and sys.flags.hash_randomization:
        raise ConfigError(
            f"task.dataset={dataset}: reasoning-gym draws other problems of it in each process",
            allowed="this data set where PYTHONHASHSEED=0 is set",
            next_step="set PYTHONHASHSEED=0 in the environment of the command, or choose another data set",
        )
    if dataset is not None and dataset not in DATASETS:
        near = " or ".join(get_close_matches(dataset, sorted(DATASETS), n=2))
        raise ConfigError(
            f"task.dataset={dataset} is not a data set of reasoning-gym",
            allowed=", ".join(sorted(DATASETS)),
            next_step=f"did you mean {near}" if near else "choose one of these names",
        )
    return reasoning_gym


def problem_key(question: str, answer: str | None) -> str:
    """Return a key shared by problems that differ only in order, such as 3 + 4 and 4 + 3.

    The key is the answer with the sorted words, numbers and signs of the question; without a stored answer,
    they stay in their order.
    """
    words = normal_text(question).split()
    return " ".join(words) if answer is None else " ".join([*sorted(words), "\n", answer])


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
