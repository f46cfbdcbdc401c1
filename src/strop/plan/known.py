"""Read what is on this disk of a run's model and data, and assume the rest. No network, no writes.

`strop.store.get_model` fetches missing files, which a plan must not. The sizes of a model are read from its
config.json, or from the table of known models; weights, tokenizer and data may be elsewhere. Missing files
are named; lengths that depend on them are assumed, and the plan lists each assumption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from strop.errors import ConfigError, DataError, RemoteMissing, StropError, split_error
from strop.plan.rollouts import REPLY_LIMIT_FRAC, Assumption
from strop.policy.footprint import ModelSize, read_model_size
from strop.rollout import Example, Split
from strop.spec import RunSpec
from strop.spec.judge import role_judges
from strop.spec.parts import MixtureSpec, plain_sections
from strop.spec.run import code_of
from strop.spec.task import EnvironmentSection, TaskSection
from strop.store import follow_store
from strop.store.model_files import check_model_dir
from strop.store.models import CONFIG, find_description, find_model, find_model_dir, step_of
from strop.store.resolve import only_local
from strop.tasks import Task, build_task, render_prompt, resolve_prompt_format
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
    """The facts about a model that are known without a network."""

    size: ModelSize
    source: str
    """Where the sizes are from, for people."""
    path: Path
    """A local folder with its config.json."""
    lacks: str = ""
    """What the folder lacks to be loaded, for people."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can be rendered."""
        return (self.path / "tokenizer.json").is_file()


def describe_model(uri: str, cache_dir: Path | None = None) -> KnownModel | None:
    """Return the sizes of a model from its local files, or its config.json alone.

    None: the model is unknown. Uses no network.
    Raises: ConfigError for an invalid name, or a directory without config.json.
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
        return KnownModel(path=path, size=read_model_size(path), source=source, lacks=lacks)
    path = find_description(uri, cache_dir)
    if path is not None:
        return KnownModel(path=path, size=read_model_size(path), source=f"its {CONFIG} in {path}")
    return None


def find_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint of a path: a run (its newest), a checkpoint, or the `model` folder inside one.

    None: the path is no part of a run.
    Raises: StoreError if it is a run or a checkpoint without a complete one.
    """
    path = path.expanduser().absolute()
    place = path.parent if path.name == "model" else path
    model_dir = find_model_dir(place)
    if model_dir == place:
        return None
    checkpoint = model_dir.parent
    return Checkpoint(path=checkpoint, run_path=checkpoint.parent.parent, step=step_of(checkpoint))


def read_task_offline(section: TaskSection) -> tuple[Task, tuple[str, ...]]:
    """Build the task and read its examples from this disk only; also return the names of missing files.

    Raises: DataError for malformed files; ConfigError as the task does.
    """
    task, missing = _read_offline(section)
    if missing and isinstance(section, MixtureSpec):
        # Reading stops at the first part with a missing file, so each part is read separately.
        parts = [_read_offline(part.task)[1] for part in section.read_parts().values()]
        missing = tuple(dict.fromkeys(name for names in parts for name in names))
    return task, missing


def _read_offline(section: TaskSection) -> tuple[Task, tuple[str, ...]]:
    with only_local() as missing:
        task = build_task(section)
        try:
            task.examples(Split.HELD_OUT)
        except (DataError, RemoteMissing):
            if not missing:
                raise
    return task, tuple(missing)


def training_examples_here(task: Task) -> Sequence[Example]:
    """Return the training examples of a run with rollouts.

    Raises: DataError if the task is for evaluation only; RemoteMissing for files that are not on this disk.
    """
    with only_local():
        examples = task.examples(Split.TRAIN)
    if not examples:
        raise DataError(
            f"task {task.name} has no training examples",
            allowed="a task with examples to train on; this one is for evaluation only",
            next_step="train on another task, and name this one in `strop eval`",
        )
    return examples


NUM_MEASURED_PROMPTS = 200
"""The first so many prompts are measured."""
ASSUMED_PROMPT_TOKENS = 256
"""Mean length of a prompt if no prompt is here."""
ASSUMED_EVAL_EXAMPLES = 500
"""Held-out examples if the task's data is not here."""
CHARACTERS_PER_TOKEN = 4.0
"""Of English; code and numbers have fewer."""
TEMPLATE_TOKENS = 30
"""Tokens that a chat template adds to a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The facts about a run that are on this disk."""

    model: KnownModel | None
    train: Sequence[Example] | None
    """None: not here, or the run has no rollouts."""
    held_out: Sequence[Example] | None
    offline_data: OfflineData | None
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
    """Lengths of prompts and offline rows in tokens, measured or assumed."""

    prompt_mean: float
    prompt_max: int | None
    """None: unknown; micro-batches are then assumed to be full."""
    offline_mean: float
    """Of a demonstration or a pair, its prompt included."""
    offline_scored: float
    """Mean number of its tokens in the loss."""
    num_eval_examples: int
    assumed: tuple[Assumption, ...]


def read_known(spec: RunSpec, cache_dir: Path | None) -> tuple[Task, Known]:
    """Read what is on this disk of the model and the data.

    Raises: ConfigError or DataError for inputs that training would refuse.
    """
    unknown = []
    uri, model = spec.model.uri, describe_model(spec.model.uri, cache_dir)
    if model is None:
        unknown.append(
            f"prompt, memory, disk and time: model {uri} is not on this machine, nor is its config.json;"
            f" `strop plan --fetch` fetches that, `strop model get {uri}` the model"
        )
    elif not model.has_tokenizer:
        unknown.append(
            f"prompt: the tokenizer of {uri} is not on this machine; the sizes are those of {model.source}."
            " `strop plan --fetch` fetches it"
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
        require_held_out(spec, task)
        train, missing = _read_training_examples(spec, task)
    if missing and held_out is not None:
        unknown.append(
            f"prompt and number of training examples: {' and '.join(missing)} is not on this machine;"
            " training fetches it"
        )
    offline_data, unread = _read_offline_data(spec, task, model)
    frozen, unknown_models = find_frozen(spec, cache_dir)
    known = Known(
        model=model,
        train=train,
        held_out=held_out,
        offline_data=offline_data,
        unknown=(*unknown, *unread, *unknown_models),
        frozen=frozen,
    )
    return task, known


def refuse_unfit(spec: RunSpec) -> None:
    """Refuse before a queue what a node would refuse after it, as far as the data is on this disk.

    What cannot be read here is left to the node, which may see other disks.

    Raises: ConfigError for GPUs or examples that the task lacks; DataError for offline data that is malformed
        or does not fit the model.
    """
    sections = plain_sections(spec.task)
    if (
        spec.job.env_gpus
        and not code_of(spec)
        and not any(isinstance(s, EnvironmentSection) for s in sections)
    ):
        raise ConfigError(
            f"job.env_gpus={spec.job.env_gpus} for task {spec.task.name}, which has no environments",
            allowed="GPUs for tasks whose environments, or whose own code, compute on them",
            next_step="leave job.env_gpus out",
        )
    task: Task | None = None
    missing: tuple[str, ...] = ()
    model = None
    with follow_store(spec.store):
        with suppress(StropError, OSError, ImportError):
            task, missing = read_task_offline(spec.task)
        with suppress(StropError, OSError):
            model = describe_model(spec.model.uri)
        if task is not None and not missing:
            require_held_out(spec, task)
        if task is not None:
            _read_offline_data(spec, task, model)


def require_held_out(spec: RunSpec, task: Task) -> None:
    """Raise ConfigError if a run is to be evaluated on more examples than there are."""
    asked, there = spec.eval.num_examples, len(task.examples(Split.HELD_OUT))
    if asked is not None and asked > there:
        raise ConfigError(
            f"eval.num_examples={asked}, and task {task.name} has {there} held-out examples",
            allowed=f"1 to {there}, or none for all",
            next_step="lower eval.num_examples, or leave it out",
        )


def _read_training_examples(spec: RunSpec, task: Task) -> tuple[Sequence[Example] | None, tuple[str, ...]]:
    """Return the training examples, and the names of missing files, such as an order file."""
    with only_local() as missing:
        try:
            return training_examples_here(task) if spec.train.has_rl else None, ()
        except RemoteMissing:
            if not missing:
                raise
    return None, tuple(missing)


def _read_offline_data(
    spec: RunSpec, task: Task, model: KnownModel | None
) -> tuple[OfflineData | None, tuple[str, ...]]:
    """Return the demonstrations or pairs, or a message that they are not here."""
    source = find_offline_source(spec)
    if source is None:
        return None, ()
    name = f"{source.setting}={source.source}"
    if model is None or not model.has_tokenizer:
        return None, (f"{source.kind}: without the model's tokenizer {name} is not read",)
    is_here = "://" in source.source or Path(source.source).expanduser().exists()
    with only_local() as missing:
        try:
            if is_here:
                framing = read_framing(model.path, task, spec.model.prompt_format)
                if source.kind == "pairs":
                    return read_pairs(spec.dpo, framing), ()
                return read_demonstrations(spec.sft, framing), ()
        except RemoteMissing:
            if not missing:
                raise
    return None, (f"{source.kind}: {name} is not on this machine",)


def find_frozen(spec: RunSpec, cache_dir: Path | None) -> tuple[dict[str, ModelSize], list[str]]:
    """Return the sizes of reference and teacher by role, and of the judges that the run starts by name.

    Also returns a message for each model that is not here.
    """
    sizes, unknown = {}, []
    judges = {judge.judge_model: judge.judge_model for judge in role_judges(spec.task)}
    for role, uri in {**spec.frozen_models, **judges}.items():
        model = None if uri is None else describe_model(uri, cache_dir)
        if model is not None:
            sizes[role] = model.size
        elif uri is not None:
            unknown.append(
                f"memory and time of the {role}, which counts like the policy: {uri} is not on this"
                f" machine; `strop model get {uri}` fetches it"
            )
    return sizes, unknown


def settle_lengths(spec: RunSpec, task: Task, known: Known, prompt: PlannedPrompt | None) -> Lengths:
    """Return the lengths for a plan: measured if data and tokenizer are here, else assumed.

    `prompt` has the measured lengths of the training prompts.
    """
    assumed = []
    reply = REPLY_LIMIT_FRAC * task.limits.max_reply_tokens
    mean, why = (prompt.tokens_mean, "") if prompt else _assume_prompt(spec, task, known)
    if why:
        assumed.append(Assumption(name="prompt_tokens_mean", value=round(mean), why=why))
    source, data = find_offline_source(spec), known.offline_data
    offline_mean = offline_scored = 0.0
    if data is not None:
        offline_mean, offline_scored = fmean(data.lengths), data.num_scored / len(data.lengths)
    elif source is not None:
        num_replies = 2 if source.kind == "pairs" else 1
        offline_mean, offline_scored = num_replies * (mean + reply), num_replies * reply
        assumed.append(
            Assumption(
                name="given_tokens_mean",
                value=round(offline_mean),
                why=f"{source.kind} are not read: prompts and replies as long as the run's own",
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
        offline_mean=offline_mean,
        offline_scored=offline_scored,
        num_eval_examples=num_eval,
        assumed=tuple(assumed),
    )


def _assume_prompt(spec: RunSpec, task: Task, known: Known) -> tuple[float, str]:
    """Return an assumed mean length of a prompt, and the reason for it."""
    examples = (known.train or known.held_out or ())[:NUM_MEASURED_PROMPTS]
    if not examples:
        return ASSUMED_PROMPT_TOKENS, "no prompt is here"
    with only_local():
        try:
            prompts = [task.render(example) for example in examples]
        except RemoteMissing:
            # A mixture without the training examples of a part cannot render its examples.
            return ASSUMED_PROMPT_TOKENS, "no prompt can be rendered without the data that is missing"
    if known.tokenizer_path is None:
        num_characters = fmean(sum(len(message.content) for message in messages) for messages in prompts)
        of = f"in {len(prompts)} prompts"
        why = f"{CHARACTERS_PER_TOKEN:g} characters a token {of}: the tokenizer is not here"
        return TEMPLATE_TOKENS + num_characters / CHARACTERS_PER_TOKEN, why
    tokenizer = Tokenizer.load(known.tokenizer_path)
    prompt_format = resolve_prompt_format(tokenizer, spec.model.prompt_format)
    lengths = [len(render_prompt(tokenizer, messages, prompt_format)[1]) for messages in prompts]
    return fmean(lengths), f"as {len(lengths)} held-out prompts have: the training examples are not here"
