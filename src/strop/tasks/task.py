"""The task contract: one object for training, evaluation and sampling.

A task renders the prompt, ends and limits the reply, and judges it. Nothing else in strop knows how a problem
is worded or scored, so training and evaluation cannot drift apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from strop.rollout import Example, Failure, FailureOwner, Message, Outcome, Split
from strop.spec.base import NOT_HASHED

if TYPE_CHECKING:
    from strop.spec.task import TaskSpec

TURN = "\x1e"
"""Separates the replies of a multi-turn attempt where they are one text, as gold replies and probes are:
ASCII's record separator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """Limits of a reply, and the range of its reward."""

    max_reply_tokens: int
    """Tokens that a reply may use: the most that a full solution needs, or what a run says."""
    own_reply_tokens: int = 0
    """The task's own budget, whatever a run set; 0: it has none."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a reply, in addition to the model's own terminator."""
    base_stop_strings: tuple[str, ...] = ()
    """Additional ones for prompts in plain text: base models write them when they go on to invent another
    problem. In a chat they would cut replies that may contain them."""
    max_reward: float = 1.0
    """Reward of a right reply. Rewards lie in [min_reward, max_reward]; another value is a failure."""
    min_reward: float = 0.0
    """Reward of the worst reply; below 0 where a task gives negative marks."""
    chance: float = 0.0
    """Share of full marks that a reply without work earns, for example 0.25 with four choices."""
    max_goldless_frac: float = 0.0
    """Share of examples for which no right reply may be known. 0: the task promises one for each."""
    verify_limit_s: float | None = None
    """Wall time (seconds) of one judgement, enforced by killing its process. None: it runs in the caller's
    process, because the text or the verifier itself bounds its time."""

    def stops(self, *, is_base: bool) -> tuple[str, ...]:
        """Return the texts that end a reply to a prompt of this form."""
        return self.stop_strings + self.base_stop_strings if is_base else self.stop_strings


Outcomes = Sequence[Outcome]
THINKING_TOKENS = 8192
"""Tokens that a reply may use beyond the task's own limit where thinking is on."""


def hash_version(
    name: str, prompt: str, verifier: str, limits: TaskLimits, spec: TaskSpec, data_digest: str = ""
) -> str:
    """Hash everything that can change a prompt, a limit, an example or a score.

    Of the settings all but those of the type `Unhashed`, and all that a user's class has of its own.
    """
    left_out = {key for key, field in type(spec).model_fields.items() if NOT_HASHED in field.metadata}
    settings = spec.model_dump(mode="json", exclude=left_out)
    parts = [name, prompt, verifier, asdict(limits), settings, data_digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def fit_limits(limits: TaskLimits, spec: TaskSpec) -> TaskLimits:
    """Apply `task.thinking`, `task.stop` and `task.max_reply_tokens` to a task's limits; keep its own limit.

    Thinking gets more tokens and no stop strings: thoughts may contain any text.
    """
    stop, own_tokens, asked = spec.stop, limits.max_reply_tokens, spec.max_reply_tokens
    if spec.thinking == "on":
        stop, own_tokens = (), own_tokens + THINKING_TOKENS
    if stop is not None:
        limits = replace(limits, stop_strings=stop, base_stop_strings=())
    return replace(limits, max_reply_tokens=asked or own_tokens, own_reply_tokens=own_tokens)


def right_or_wrong(is_correct: bool, *, format_ok: bool, extracted: str | None = None) -> Outcome:
    """Return the outcome of a reply that is either right or wrong."""
    parts: dict[str, float | None] = {"correct": float(is_correct)}
    return Outcome(parts=parts, is_correct=is_correct, format_ok=format_ok, extracted=extracted)


class Task(ABC):
    """One verifiable task: what every task has, and defaults of what only some have."""

    name: str
    """Registry name, for example 'arithmetic'."""
    limits: TaskLimits
    """Reply budget, stop strings and full marks; the widest of all examples."""
    variant: str | None = None
    """Which of several tasks of one name this is; None: there is one."""
    world: Any = None
    """What plays a task of several turns; None: a single reply is judged."""
    asks_judge: bool = False
    """Whether a model judges replies."""
    is_ordered: bool = False
    """Whether `epoch_order` says the order of training examples; else they are shuffled."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Hash over everything that changes prompts or scores; stored with every result.

        Raises: DataError like `examples`, if the version covers the data.
        """

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Example]:
        """Return all examples of a split, in a fixed order. The two splits share no id.

        Raises: DataError if the data is missing, empty, malformed or the splits overlap.
        """

    @abstractmethod
    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the messages that pose the example."""

    @abstractmethod
    async def verify(self, example: Example, text: str) -> Outcome:
        """Judge a reply. `text` ends before its terminator or stop string.

        Awaited in the run's own process, or in a process that is killed at `limits.verify_limit_s`.
        """

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return replies that deserve full marks, the form that the prompt asks for first.

        Empty if no answer is known. The self-test judges all of them.
        """
        return ()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of rows in the data, by name. Raises: DataError like `examples`."""
        return {}

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the limits of an example."""
        return self.limits

    def part_of(self, example: Example) -> str | None:
        """Return the label of an example's part; None if the task has no parts."""
        return None

    def problem_of(self, example: Example) -> str | None:
        """Return the name shared by examples that pose one problem; None if unknown."""
        return None

    def entry_point(self, example: Example) -> str | None:
        """Return the name that a reply's program must define, '' if it runs as a whole; None: no program."""
        return None

    def row_keys(self) -> Mapping[str, str | None]:
        """Map the number of each training row, from 0, to its example id; None: the row is left out.

        Empty if the task has no rows that could be numbered. Raises: DataError like `examples`.
        """
        return {}

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the positions of an epoch's training examples, if the task `is_ordered`."""
        raise NotImplementedError

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return how many tokens the policy may write in an attempt: in one reply, or in all turns."""
        return limits.max_reply_tokens

    def compares(self, example: Example) -> bool:
        """Whether replies to an example are judged beside each other. `verify` judges a group of one."""
        return False

    async def verify_group(self, example: Example, texts: Sequence[str], outcomes: Outcomes) -> Outcomes:
        """Judge replies beside each other, if the task `compares`; `outcomes` say what else is known of them.

        Raises: any exception of the verifier; then no reply of the group has a score.
        """
        raise NotImplementedError

    async def verify_here(self, example: Example, texts: Sequence[str], outcomes: Outcomes) -> Outcomes:
        """Complete outcomes in the run's own process, in whichever they were made: to call a server.

        Raises: any exception of the verifier; then no reply has a score.
        """
        return outcomes

    def warm_up(self) -> None:
        """Load what judging needs, in a process that others are forked from."""
        return


def _passed_on(name: str) -> Any:
    """Return a member that is that of the task of an example, or of the one task."""
    if isinstance(getattr(Task, name), property):
        return property(lambda self: getattr(self.task_of(None), name))
    return lambda self, *given: getattr(self.task_of(next(iter(given), None)), name)(*given)


class TasksInOne(Task):
    """A task whose examples are those of other tasks, to which passes what concerns an example."""

    @abstractmethod
    def task_of(self, example: Any, /) -> Task:
        """Return the task of an example."""

    render = _passed_on("render")
    verify = _passed_on("verify")
    for _name in str.split("gold_replies limits_of part_of problem_of entry_point compares verify_group"):
        locals()[_name] = _passed_on(_name)
    verify_here = _passed_on("verify_here")


class TaskWrapper(TasksInOne):
    """A task around another one, to which everything passes that it does not change."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name, self.variant = task.name, task.variant
        self.limits, self.world = task.limits, task.world
        self.is_ordered, self.asks_judge = task.is_ordered, task.asks_judge

    def task_of(self, example: Any, /) -> Task:
        """Return the one task."""
        return self._task

    version = _passed_on("version")
    examples = _passed_on("examples")
    for _name in str.split("counts row_keys epoch_order attempt_tokens warm_up"):
        locals()[_name] = _passed_on(_name)


def describe_counts(task: Task) -> str:
    """Describe the counts of rows in a task's data in one line; empty if there are none.

    Raises: DataError like `examples`.
    """
    return ", ".join(f"{name}: {count}" for name, count in task.counts.items() if count)


def list_names(task: Task, examples: Iterable[Example]) -> frozenset[str]:
    """Return the ids of some examples, and the names of the problems that they pose."""
    names = {name for example in examples for name in (example.example_id, task.problem_of(example))}
    return frozenset(name for name in names if name is not None)


# A grader that gives an impossible score is broken: the rollout has no score, and the task owns the failure.

CEILING = "ceiling"
"""Kind of failure: a score above full marks."""
IMPOSSIBLE = "impossible_value"
"""Kind of failure: a score below the lowest marks, or not a number."""
_SLACK = 1e-6
"""Tolerance as a share of full marks: rewards are often sums in float32."""


def is_within(reward: float, limits: TaskLimits) -> bool:
    """Whether a task with these limits can give a reward. Infinities and NaN: no."""
    slack = _SLACK * limits.max_reward
    return limits.min_reward - slack <= reward <= limits.max_reward + slack


def within_bounds(outcome: Outcome, limits: TaskLimits) -> Outcome:
    """Return an outcome unchanged, or as a failure without a score if the score is impossible."""
    scores = {name: value for name, value in outcome.parts.items() if value is not None}
    reward = outcome.reward
    is_finite = all(map(math.isfinite, scores.values()))
    if outcome.failure is not None or (is_finite and (reward is None or is_within(reward, limits))):
        return outcome
    is_above = is_finite and reward is not None and reward > limits.max_reward
    detail = f"a score of {math.nan if reward is None else reward:g} ({scores}), and by task.min_reward and"
    detail += f" task.max_reward a reply earns {limits.min_reward:g} to {limits.max_reward:g}"
    failure = Failure(owner=FailureOwner.TASK, kind=CEILING if is_above else IMPOSSIBLE, detail=detail)
    # Records hold finite numbers only.
    parts = {name: value if math.isfinite(value or 0.0) else None for name, value in outcome.parts.items()}
    return replace(outcome, parts=parts, is_correct=None, failure=failure)
