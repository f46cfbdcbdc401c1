"""What this disk says about a run, and what is assumed where it says nothing. No network, no writes.

The sizes of a model need its config.json alone, or a row of the table of known models; its weights and its
tokenizer may be elsewhere, and so may the data. What is missing is named; the lengths that follow from
it are assumed, and each assumption is listed with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from strop.errors import RemoteMissing
from strop.plan.generating import REPLY_LIMIT_FRAC
from strop.plan.judging import Assumption
from strop.plan.locate import (
    KnownModel,
    describe_model,
    read_task_offline,
    require_trainable_here,
    training_examples_here,
)
from strop.plan.plan import PlannedPrompt
from strop.policy.footprint import ModelSize
from strop.rollout import Example, Split
from strop.spec import RunSpec
from strop.spec.judge import role_judges
from strop.store.data_files import only_local_data
from strop.tasks import Task, render_prompt, resolve_prompt_format
from strop.tokenizer import Tokenizer
from strop.train.data.offline import OfflineData, find_offline_source, read_offline_data

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
    if wanted is None or wanted.source is None:
        return None, ()
    name = f"{wanted.setting}={wanted.source}"
    if model is None or model.path is None or not model.has_tokenizer:
        return None, (f"{wanted.kind}: without the model's tokenizer {name} is not read",)
    is_here = "://" in wanted.source or Path(wanted.source).expanduser().exists()
    with only_local_data() as missing:
        try:
            if is_here:
                return read_offline_data(spec, task, model.path), ()
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
