"""The run file of an evaluation: tasks, sampling, number of examples. Only reads the file.

It has the form of a run file, `extends` included, and holds only what plays a part in asking a model: `name`,
`seed`, `eval.num_examples`, `eval.num_samples`, `eval.baselines`, and the sections task, sampling, model,
engine, placement, harness and store; as a job also output and job. Several tasks are `[task.parts.LABEL]`
tables without a `task.name`. What it does not say of the model is as the run that is evaluated was trained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from strop.errors import ConfigError
from strop.spec import RunSpec
from strop.spec.base import DEFAULT, to_name
from strop.spec.display import KeyPath, dotted, format_value, show_path, show_value
from strop.spec.reader import ResolvedSpec, merge_sources, resolve_sources
from strop.spec.run import last_name
from strop.spec.schema import PARTS_TABLE
from strop.spec.sources import parse_override, read_sources
from strop.spec.train import EvalSpec

_OF_FILE = re.compile(r"[a-z0-9-]+\.(.+)-step-\d{6,}\.json")
_OF_EVAL = ("num_examples", "num_samples", "baselines")
_MODEL_URI: KeyPath = ("model", "uri")
_HARNESS_TASKS: KeyPath = ("harness", "tasks")
_SECTIONS = ("task", "sampling", "model", "engine", "placement", "harness")
_OF_JOBS = ("output", "job")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalFile:
    """The content of an evaluation's run file."""

    origin: str
    """The file, for messages."""
    name: str
    """Of the evaluation: results' names begin with it."""
    tasks: tuple[str, ...]
    """Names of the tasks, each once; empty where lm-eval alone is asked."""
    values: Mapping[KeyPath, Any]
    """Settings of asking beside `task.name`; paths in them are absolute. Of several tasks' own settings the
    paths are ('task', 'parts', LABEL, NAME)."""
    counts: EvalSpec
    model_uri: str | None
    """The model that the file is for; None where it does not say."""
    carried: Mapping[str, Path] = field(default_factory=dict)
    """Of a job: files that lie beside this one there, by name: the results that its baselines are."""

    @property
    def is_by_harness(self) -> bool:
        """Whether lm-eval evaluates; then there are no tasks of strop's."""
        return bool(self.values.get(_HARNESS_TASKS))

    @property
    def has_several(self) -> bool:
        """Whether the tasks are in separate tables."""
        return any(place[:2] == PARTS_TABLE for place in self.values)

    def to_text(self) -> str:
        """Return an equivalent run file that is independent of its folder, without job settings."""
        kept = {place: value for place, value in self.values.items() if place[0] not in _OF_JOBS}
        lines: dict[KeyPath, Any] = {("name",): self.name}
        if len(self.tasks) == 1 and not self.has_several:
            lines[("task", "name")] = self.tasks[0]
        # A default is not a request: lm-eval refuses requested samples.
        given = [name for name in _OF_EVAL if name in self.counts.model_fields_set]
        given = [name for name in given if getattr(self.counts, name) != ()]
        lines |= kept | {("eval", name): getattr(self.counts, name) for name in given}
        if self.model_uri is not None:
            lines[_MODEL_URI] = self.model_uri
        return "".join(f"{dotted(path)} = {format_value(value)}\n" for path, value in lines.items())

    def words_for(self, run: RunSpec | None, task: str = "") -> list[str]:
        """Return the `key=value` words for one of the tasks, as `read_setup` takes them.

        `run`: whose model it is; what the file leaves open of the model is as it was trained there. `task`
        empty: the only one.
        Raises: ConfigError if the file is for another model.
        """
        left_out = {"store", "harness", *_OF_JOBS}
        values = {place: value for place, value in self.values.items() if place[0] not in left_out}
        if self.has_several:
            own = {place: value for place, value in values.items() if place[:2] == PARTS_TABLE}
            names = {place[2]: str(values.get((*PARTS_TABLE, place[2], "name"), place[2])) for place in own}
            label = next((label for label, name in names.items() if name == task), None)
            values = {place: value for place, value in values.items() if place not in own}
            values |= {("task", place[3]): value for place, value in own.items() if place[2] == label}
            values.pop(("task", "name"), None)
        if run is not None:
            if self.model_uri is not None and last_name(self.model_uri) != last_name(run.model.uri):
                raise ConfigError(
                    f"model.uri={show_value(self.model_uri)} ({self.origin}), and the run whose checkpoints"
                    f" are evaluated trains {show_value(run.model.uri)}",
                    allowed="the run's model, or no model.uri: what is evaluated is the run's checkpoints",
                    next_step="remove model.uri from the evaluation's file, or name another file",
                )
            for name in type(run.model).model_fields:
                if ("model", name) != _MODEL_URI:
                    values.setdefault(("model", name), getattr(run.model, name))
        return [f"{dotted(path)}={format_value(value)}" for path, value in values.items()]


def read_eval_file(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, is_job: bool = False
) -> EvalFile:
    """Read an evaluation's run file with everything that it extends. `is_job`: it may have job settings.

    An override TASK.key=value is of one of its tasks.

    Values are not judged here: `words_for` and `read_setup` do.
    Raises: ConfigError if there is no such file, it names no task, or it sets what plays no part.
    """
    shown = show_path(os.fspath(path))
    if not Path(path).is_file():
        raise ConfigError(
            f"the evaluation's file {shown} is not there",
            allowed="a run file with a task, relative to the file that names it",
            next_step="correct the path",
        )
    given, _ = merge_sources(read_sources(os.fspath(path), ()))
    if overrides:
        single = given[("task", "name")].value if ("task", "name") in given else None
        tables = {place[2]: f"task.parts.{place[2]}" for place in given if place[:2] == PARTS_TABLE}
        tables |= {str(single): "task"} if single else {}
        placed = []
        for word in overrides:
            (first, *rest), _ = parse_override(word)
            is_of_task = bool(rest) and first in tables
            placed.append(f"{tables[first]}{word.removeprefix(first)}" if is_of_task else word)
        given, _ = merge_sources(read_sources(os.fspath(path), placed))
    values = {place: leaf.value for place, leaf in given.items()}
    given_name = str(values.pop(("name",), to_name(Path(path).stem) or DEFAULT))
    name = to_name(given_name)
    counts = {key: values.pop(("eval", key)) for key in _OF_EVAL if ("eval", key) in values}
    model_uri = values.pop(_MODEL_URI, None)
    tasks = _take_tasks(values, shown)
    if not name:
        raise _wrong(f"name={show_value(given_name)} in {shown}", "a name with letters or digits", "rename")
    if idle := [place for place in values if place[0] == "harness"] if not values.get(_HARNESS_TASKS) else []:
        raise _wrong(
            f"{dotted(idle[0])} ({given[idle[0]].origin}) without harness.tasks: lm-eval is not asked",
            "settings of harness together with harness.tasks",
            "add harness.tasks, or remove it",
        )
    allowed = {*_SECTIONS, "store", *(_OF_JOBS if is_job else ())}
    foreign = [
        f"{dotted(place)} ({given[place].origin})"
        for place in values
        if place != ("seed",) and place[0] not in allowed
    ]
    if foreign:
        raise _wrong(
            f"{', '.join(foreign)}: no part of evaluating checkpoints",
            "name, seed, eval.num_examples, eval.num_samples, eval.baselines, and the sections"
            f" {', '.join([*_SECTIONS, 'store'])}{'; as a job also output and job' if is_job else ''}",
            "remove it; a file that both extend may hold what training and evaluation share",
        )
    try:
        checked = EvalSpec.model_validate(counts)
    except ValidationError as error:
        fault = error.errors()[0]
        key = f"eval.{fault['loc'][0]}"
        form = "texts" if "baselines" in key else "a number of 1 or more, or none"
        raise _wrong(f"{key}={show_value(fault['input'])} in {shown}", form, "correct it") from error
    folder = os.path.dirname(os.path.abspath(path))
    found = tuple(_absolute_baseline(word, folder) for word in checked.baselines)
    checked = checked.model_copy(update={"baselines": found} if found else {})
    return EvalFile(origin=shown, name=name, tasks=tasks, values=values, counts=checked, model_uri=model_uri)


def _absolute_baseline(word: str, folder: str) -> str:
    """Return NAME=PLACE, made absolute if the place exists beside the file or in the current folder."""
    name, equals, place = word.rpartition("=")
    for base in (folder, os.getcwd()):
        full = os.path.abspath(os.path.join(base, os.path.expanduser(place)))
        if os.path.exists(full):
            return f"{name}{equals}{full}"
    return word


def _take_tasks(values: dict[KeyPath, Any], shown: str) -> tuple[str, ...]:
    """Return the names of a file's tasks; `task.name` is removed from its values.

    Raises: ConfigError if there is none, one stands twice, or a setting does not say whose it is.
    """
    if values.get(_HARNESS_TASKS):
        if of_task := [dotted(place) for place in values if place[0] == "task"]:
            raise _wrong(
                f"{', '.join(of_task)} in {shown}, which lists harness.tasks",
                "strop's own tasks, or lm-eval's, which have data and prompts of their own",
                "write a second file for the others",
            )
        return ()
    task = values.pop(("task", "name"), None)
    if isinstance(task, str):
        return (task,)
    labels = dict.fromkeys(place[2] for place in values if place[:2] == PARTS_TABLE)
    names = [str(values.get((*PARTS_TABLE, label, "name"), label)) for label in labels]
    shared = [dotted(place) for place in values if place[0] == "task" and place[:2] != PARTS_TABLE]
    if not names:
        raise _wrong(
            f"{shown} names no task",
            "task.name, a table [task.parts.LABEL] for each of several tasks, or harness.tasks for lm-eval's",
            "add it",
        )
    if shared:
        raise _wrong(
            f"{', '.join(shared)} in {shown} is no task's of its own",
            "settings in the table of their task, [task.parts.LABEL]",
            "move it there",
        )
    if len(set(names)) < len(names):
        raise _wrong(
            f"{shown} names the task {next(name for name in names if names.count(name) > 1)} twice",
            "each task once: its result is one file",
            "write a second file for the other one",
        )
    return tuple(names)


def resolve_job(path: str, overrides: Sequence[str]) -> tuple[EvalFile, ResolvedSpec]:
    """Read the file of an evaluation job: the evaluation, and the resources of the job.

    The spec names the first task alone, and no sampling: it is what launchers and sites read.
    Raises: ConfigError as `read_eval_file` and `load_spec` do.
    """
    file = read_eval_file(path, overrides, is_job=True)
    sources = read_sources(path, overrides)
    for source in sources:
        # What is asked travels in the file; its GPUs are not split into the roles of a run.
        of_file = ("task", "sampling", "eval", "engine", "placement", "harness")
        for place in [place for place in source if place[0] in of_file]:
            del source[place]
    first = file.tasks[0] if file.tasks else "arithmetic"
    words = [word for word in file.words_for(None, first) if word.startswith("task.")]
    # One prompt a step: the task need not be large enough to train on.
    words = [f"name={file.name}", f"task.name={first}", "train.prompts_per_step=1", *words]
    return file, resolve_sources([*read_sources(None, words), *sources])


def guess_command(path: str, overrides: Sequence[str]) -> tuple[str, str | None]:
    """Return whether a run file is for training or evaluation, and a notice if it is ambiguous.

    Raises: ConfigError if it cannot be read.
    """
    places = {place for source in read_sources(path, overrides) for place in source}
    if _HARNESS_TASKS in places:
        return "eval", None
    if ("task", "name") not in places and any(place[:2] == PARTS_TABLE for place in places):
        return "eval", None
    of_evaluation = {place for place in places if place[0] == "eval" and place[-1] in _OF_EVAL}
    shared = {*_SECTIONS, *_OF_JOBS, "store", "name", "seed"}
    if any(place[0] not in shared for place in places - of_evaluation):
        return "train", None
    shown = show_path(path)
    if of_evaluation:
        return "eval", f"{shown} says nothing of training, and is an evaluation; --command train trains"
    return "train", f"{shown} is trained with the defaults: it says nothing of it; --command eval evaluates"


def is_of_file(path: Path) -> bool:
    """Whether a result in a run's `eval/` belongs to an evaluation file, not to the run's own evaluations."""
    return _OF_FILE.fullmatch(path.name) is not None


def _wrong(given: str, allowed: str, next_step: str) -> ConfigError:
    return ConfigError(given, allowed=allowed, next_step=next_step)
