"""Models, checkpoints and examples that already are on this disk. No network, no writes.

`strop.store.get_model` fetches what is missing; a plan must not, so it asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import DataError, RemoteMissing, StoreError
from strop.io import is_complete, user_cache_dir
from strop.record import RunDir
from strop.record.run_dir import STATE_NAME, step_of
from strop.rollout import Example, Split
from strop.spec.task import PartedSection, TaskSection
from strop.store import get_model
from strop.store.data_files import only_local_data
from strop.store.hub import find_cached_snapshot
from strop.store.models import HUB_PATTERN, SUBSTITUTES, converted_path
from strop.store.policy import read_policy
from strop.store.stored_models import stored_path
from strop.tasks import Task, build_task
from strop.tasks.traits import require_written

CONVERTED_DTYPE = "float32"
"""Stored type of converted models, as `get_model` chooses it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint of a run. Its bytes are not verified here."""

    path: Path
    run_path: Path
    step: int

    @property
    def model_path(self) -> Path:
        """The Hugging Face directory inside."""
        return self.path / "model"


def find_model(uri: str, cache_dir: Path | None = None) -> Path | None:
    """Return the directory that `get_model` would return without fetching, or None.

    Raises: ConfigError if the name cannot mean a model.
    """
    cache = cache_dir or user_cache_dir()
    if uri.startswith("pypi:"):
        return _find_converted(uri, cache)
    if uri.startswith("s3://"):
        return _find_fetched(uri, cache)
    path = Path(uri).expanduser()
    if path.is_dir():
        return path.absolute()
    match = HUB_PATTERN.match(uri)
    if match is None or path.exists() or uri.startswith("."):
        # Refused before it looks at anything, in the store's own words.
        return get_model(uri, cache_dir=cache, offline=True).path
    repo, revision = match["repo"], match["revision"]
    policy = read_policy()
    copies = (_find_fetched(place, cache) for place in policy.model_uris(repo, revision))
    fetched = next(filter(None, copies), None)
    if fetched is not None and policy.asks_store_first:
        return fetched
    found = find_cached_snapshot(repo, revision) if policy.asks_hub else None
    found = found or fetched
    if found is None and revision is None and repo in SUBSTITUTES:
        found = _find_converted(SUBSTITUTES[repo], cache)
    return found


def _find_fetched(uri: str, cache: Path) -> Path | None:
    """Return the local copy of a model that a store keeps; whether the store has a newer one is not asked."""
    path = stored_path(uri, cache)
    return path if is_complete(path) else None


def _find_converted(uri: str, cache: Path) -> Path | None:
    path = converted_path(uri, CONVERTED_DTYPE, cache)
    return path if is_complete(path) else None


def find_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint that a path means: a run's newest one, itself, or the one around it.

    None: the path is no part of a run.
    Raises: StoreError if it is a run or a checkpoint and holds none that is complete.
    """
    path = path.expanduser().absolute()
    if (path / STATE_NAME).is_file():
        latest = RunDir.open(path).latest_checkpoint()
        if latest is None:
            raise _no_checkpoint(path)
        return Checkpoint(path=latest[1], run_path=path, step=latest[0])
    place = path.parent if path.name == "model" else path
    step, run_path = step_of(place), place.parent.parent
    if step is None or not (run_path / STATE_NAME).is_file():
        return None
    if not is_complete(place):
        raise _no_checkpoint(place)
    return Checkpoint(path=place, run_path=run_path, step=step)


def _no_checkpoint(path: Path) -> StoreError:
    return StoreError(
        f"{path} holds no complete checkpoint",
        allowed="a run that has written one, or a directory checkpoints/step-NNNNNN with COMPLETE in it",
        next_step="let the run reach train.checkpoint_every, or name another run; `strop ls` lists them",
    )


def read_task_offline(section: TaskSection) -> tuple[Task, tuple[str, ...]]:
    """Build the task and read its examples from this disk alone; return what of them is not here.

    Raises: DataError if what is here is malformed; ConfigError as the task does.
    """
    task, missing = _read_offline(section)
    if missing and isinstance(section, PartedSection):
        # Reading ends at the first part that lacks something; each is asked what else is missing.
        parts = [_read_offline(part.task)[1] for part in section.posed_parts().values()]
        missing = tuple(dict.fromkeys(name for names in parts for name in names))
    return task, missing


def _read_offline(section: TaskSection) -> tuple[Task, tuple[str, ...]]:
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
            f"task {task.name} has no training examples",
            allowed="a task with examples to train on; this one is for evaluation only",
            next_step="train on another task, and name this one in `strop eval`",
        )
    return found
