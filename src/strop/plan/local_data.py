"""A task's examples as far as they are on this disk. Opens no connection, and says what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from strop.errors import DataError, RemoteMissing, explain_refusal
from strop.rollout import Example, Split
from strop.spec.task import MixtureSpec, TaskSpec
from strop.store.data_files import only_local_data
from strop.tasks import Task, build_task
from strop.tasks.traits import require_written


def read_task_offline(section: TaskSpec) -> tuple[Task, tuple[str, ...]]:
    """Build the task and read its examples from this disk alone; return what of them is not here.

    Raises: DataError if what is here is malformed; ConfigError as the task does.
    """
    task, missing = _read_offline(section)
    if missing and isinstance(section, MixtureSpec):
        # Reading ends at the first part that lacks something; each is asked what else is missing.
        parts = [_read_offline(part.task)[1] for part in section.read_parts().values()]
        missing = tuple(dict.fromkeys(name for names in parts for name in names))
    return task, missing


def _read_offline(section: TaskSpec) -> tuple[Task, tuple[str, ...]]:
    task = build_task(section)
    with only_local_data() as missing:
        try:
            task.examples(Split.HELD_OUT)
        except (DataError, RemoteMissing):
            if not missing:
                raise
    return task, tuple(missing)


def require_trainable_here(task: Task) -> None:
    """Refuse a task that no run can have. Raises: ConfigError like `require_written`."""
    with only_local_data():
        require_written(task)


def training_examples_here(task: Task) -> Sequence[Example]:
    """Return the training examples of a run that trains on its own replies to them.

    Raises: DataError if the task is for evaluation only.
    """
    with only_local_data():
        found = task.examples(Split.TRAIN)
    if not found:
        raise DataError(
            explain_refusal(
                f"task {task.name} has no training examples",
                allowed="a task with examples to train on; this one is for evaluation only",
                next_step="train on another task, and name this one in `strop eval`",
            )
        )
    return found
