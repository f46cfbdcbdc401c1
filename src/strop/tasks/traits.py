"""Optional capabilities of a task: members beyond the contract, and functions that read them.

The functions below have a default for tasks without the member. Tasks made of other tasks (`TaskWrapper`,
`Mixture`, `Blend`) pass the members on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split
from strop.tasks.contract import GroupVerifier, Task, TaskLimits

T = TypeVar("T")
OPTIONAL = (
    *("epoch_order", "counts", "prompt_fields", "limits_of", "program_form", "group_verifier"),
    *("judge_digests", "part_of", "problem_of", "row_keys", "world", "variant"),
)
"""Names of the optional methods and properties of a task; what reads each says what it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramForm:
    """How the program of a reply is run."""

    entry_point: str | None
    """The name that it must define; None: it runs as a whole, reads its input and prints."""


def has(task: Task, name: str) -> bool:
    """Whether a task has a member of `OPTIONAL`. No property is evaluated: some read the data."""
    return hasattr(type(task), name) or name in getattr(task, "__dict__", ())


def _member(task: Task, name: str, default: T) -> T:
    value: T = getattr(task, name) if has(task, name) else default
    return value


def epoch_order_of(task: Task) -> Callable[[int, int], Sequence[int]] | None:
    """Return a task's own order of training examples, by seed and epoch; None: they are shuffled."""
    return _member(task, "epoch_order", None)


def counts_of(task: Task) -> Mapping[str, int]:
    """Return the counts of rows in a task's data; empty if it counts none."""
    return _member(task, "counts", {})


def describe_counts(task: Task) -> str:
    """Describe the counts of rows in a task's data in one line; empty if there are none.

    Raises: DataError like `examples`.
    """
    return ", ".join(f"{name}: {count}" for name, count in counts_of(task).items() if count)


def prompt_fields_of(task: Task, example: Example) -> Mapping[str, Any]:
    """Return the values that a prompt template may use; the example's fields without `prompt_fields`."""
    find: Callable[[Example], Mapping[str, Any]] = _member(task, "prompt_fields", lambda one: one.fields)
    return find(example)


def limits_of(task: Task, example: Example) -> TaskLimits:
    """Return the limits of an example: its own, or those of the whole task."""
    return _member(task, "limits_of", lambda _: task.limits)(example)


def program_form_of(task: Task, example: Example) -> ProgramForm | None:
    """Return how the program of a reply is run; None if replies are not programs."""
    find: Callable[[Example], ProgramForm | None] = _member(task, "program_form", lambda _: None)
    return find(example)


def group_verifier_of(task: Task, example: Example) -> GroupVerifier | None:
    """Return what judges replies to an example beside each other; None if each is judged alone."""
    find: Callable[[Example], GroupVerifier | None] = _member(task, "group_verifier", lambda _: None)
    return find(example)


def judge_digests_of(*tasks: Task) -> list[str]:
    """Return the hashes of all models that judge replies of these tasks."""
    none: Sequence[str] = ()
    return [digest for task in tasks for digest in _member(task, "judge_digests", none)]


def part_of(task: Task, example: Example) -> str | None:
    """Return the label of an example's part, or None if the task has no parts."""
    find: Callable[[Example], str | None] = _member(task, "part_of", lambda _: None)
    return find(example)


def problem_of(task: Task, example: Example) -> str | None:
    """Return the name shared by examples that pose one problem; None if unknown."""
    find: Callable[[Example], str | None] = _member(task, "problem_of", lambda _: None)
    return find(example)


def list_names(task: Task, examples: Iterable[Example]) -> frozenset[str]:
    """Return the ids of some examples, and the names of the problems that they pose."""
    names = {name for example in examples for name in (example.example_id, problem_of(task, example))}
    return frozenset(name for name in names if name is not None)


def variant_of(task: Task) -> str | None:
    """Return a task's variant, or None if its name has only one."""
    return _member(task, "variant", None)


def world_of(task: Task) -> Any:
    """Return the world of a multi-turn task; None if a single reply is judged."""
    return _member(task, "world", None)


def attempt_tokens_of(task: Task, limits: TaskLimits) -> int:
    """Return how many tokens the policy may write in an attempt: in one reply, or in all turns of a world."""
    world = world_of(task)
    tokens: int = limits.max_reply_tokens if world is None else world.attempt_tokens(limits)
    return tokens


def row_keys_of(task: Task) -> Mapping[str, str | None]:
    """Map the number of each training row, from 0, to its example id; None: the row is left out.

    Raises: DataError if the task has no rows, or as the task does.
    """
    find: Any = _member(task, "row_keys", None)
    if find is None:
        raise DataError(
            f"task {task.name} has no rows of data that could be numbered",
            allowed="ids of its training examples",
            next_step="write ids, as `strop eval --write-order` does; in a mixture, give the file to a part",
        )
    keys: Mapping[str, str | None] = find()
    return keys


def every_form(examples: Sequence[Example]) -> Sequence[Example]:
    """Return examples of every form: all of them, or the first if they are generated on demand."""
    return examples if isinstance(examples, tuple | list) else examples[:1]


class TaskWrapper:
    """A wrapper of a task that passes on everything but `epoch_order`, which only some tasks have."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name = task.name
        self.limits: TaskLimits = task.limits

    @property
    def version(self) -> str:
        """That of the wrapped task."""
        return self._task.version

    @property
    def variant(self) -> str | None:
        """That of the wrapped task."""
        return variant_of(self._task)

    @property
    def world(self) -> Any:
        """That of the wrapped task."""
        return world_of(self._task)

    @property
    def counts(self) -> Mapping[str, int]:
        """Those of the wrapped task; reads its data."""
        return counts_of(self._task)

    @property
    def judge_digests(self) -> Sequence[str]:
        """Those of the wrapped task."""
        return judge_digests_of(self._task)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the task's examples. Raises: DataError as the task does."""
        return self._task.examples(split)

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the example's limits in the task."""
        return limits_of(self._task, example)

    def part_of(self, example: Example) -> str | None:
        """Return the label of the example's part."""
        return part_of(self._task, example)

    def problem_of(self, example: Example) -> str | None:
        """Return the name of the example's problem."""
        return problem_of(self._task, example)

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return the values that a prompt template may use."""
        return prompt_fields_of(self._task, example)

    def row_keys(self) -> Mapping[str, str | None]:
        """Map each of the task's rows to its example id. Raises: DataError as the task does."""
        return row_keys_of(self._task)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example as the task does."""
        return self._task.render(example)

    def verify(self, example: Example, text: str) -> Outcome:
        """Judge as the task does."""
        return self._task.verify(example, text)

    def group_verifier(self, example: Example) -> GroupVerifier | None:
        """Return what judges replies to the example beside each other."""
        return group_verifier_of(self._task, example)

    def program_form(self, example: Example) -> ProgramForm | None:
        """Return how the program of a reply is run."""
        return program_form_of(self._task, example)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the task's gold replies."""
        return self._task.gold_replies(example)
