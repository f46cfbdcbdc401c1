"""The run file of an evaluation: which task, asked how, on how many examples. Reads the file alone.

It has the form of a run file, `extends` included, and holds only what plays a part in asking a model: `name`,
`seed`, `eval.num_examples`, `eval.num_samples`, and the sections task, sampling, model, engine and placement.
What it does not say of the model is as the run that is evaluated was trained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from strop.errors import ConfigError
from strop.spec import RunSpec
from strop.spec.base import DEFAULT
from strop.spec.display import KeyPath, dotted, format_value, show_path, show_value
from strop.spec.reader import merge_sources
from strop.spec.run import last_name
from strop.spec.sources import read_sources
from strop.spec.train import EvalSpec

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_OF_FILE = re.compile(r"[a-z0-9-]+\.(.+)-step-\d{6,}\.json")
_COUNTS = ("num_examples", "num_samples")
_MODEL_URI: KeyPath = ("model", "uri")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalFile:
    """What an evaluation's run file says."""

    origin: str
    """The file, for messages."""
    name: str
    """Of the evaluation: results' names begin with it."""
    task: str
    values: Mapping[KeyPath, Any]
    """Settings of asking beside `task.name`; paths in them are absolute."""
    counts: EvalSpec
    model_uri: str | None
    """The model that the file is for; None where it does not say."""

    def to_text(self) -> str:
        """Return a run file that says the same from any folder."""
        lines = {("name",): self.name, ("task", "name"): self.task, **self.values}
        lines |= {("eval", name): getattr(self.counts, name) for name in _COUNTS}
        if self.model_uri is not None:
            lines[_MODEL_URI] = self.model_uri
        return "".join(f"{dotted(path)} = {format_value(value)}\n" for path, value in lines.items())

    def words_for(self, run: RunSpec | None) -> list[str]:
        """Return the `key=value` words of asking a model, as `read_asking` takes them.

        `run`: whose model it is; what the file leaves open of the model is as it was trained there.
        Raises: ConfigError if the file is for another model.
        """
        values = dict(self.values)
        if run is not None:
            self._refuse_other_model(run)
            for name in type(run.model).model_fields:
                if ("model", name) != _MODEL_URI:
                    values.setdefault(("model", name), getattr(run.model, name))
        return [f"{dotted(path)}={format_value(value)}" for path, value in values.items()]

    def _refuse_other_model(self, run: RunSpec) -> None:
        if self.model_uri is None or last_name(self.model_uri) == last_name(run.model.uri):
            return
        raise ConfigError(
            f"model.uri={show_value(self.model_uri)} ({self.origin}), and the run whose checkpoints are"
            f" evaluated trains {show_value(run.model.uri)}",
            allowed="the run's model, or no model.uri: what is evaluated is the run's checkpoints",
            next_step="remove model.uri from the evaluation's file, or name another file",
        )


def read_eval_file(path: str | os.PathLike[str]) -> EvalFile:
    """Read an evaluation's run file with everything that it extends.

    Values are not judged here: `words_for` and `read_asking` do.
    Raises: ConfigError if there is no such file, it names no task, or it sets what plays no part.
    """
    shown = show_path(os.fspath(path))
    if not Path(path).is_file():
        raise ConfigError(
            f"the evaluation's file {shown} is not there",
            allowed="a run file with a task, relative to the file that names it",
            next_step="correct --eval-config or job.eval_config",
        )
    given, _ = merge_sources(read_sources(os.fspath(path), ()))
    values = {place: leaf.value for place, leaf in given.items()}
    own_name = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")[:40] or DEFAULT
    name = str(values.pop(("name",), own_name))
    task = values.pop(("task", "name"), None)
    counts = {key: values.pop(("eval", key)) for key in _COUNTS if ("eval", key) in values}
    model_uri = values.pop(_MODEL_URI, None)
    if not isinstance(task, str):
        raise _wrong(f"{shown} names no task", "task.name", "add it")
    if _NAME.fullmatch(name) is None:
        raise _wrong(
            f"name={show_value(name)} in {shown}",
            "lowercase letters, digits and hyphens, 40 at most",
            "rename",
        )
    foreign = [
        f"{dotted(place)} ({given[place].origin})"
        for place in values
        if place != ("seed",) and place[0] not in {"task", "sampling", "model", "engine", "placement"}
    ]
    if foreign:
        raise _wrong(
            f"{', '.join(foreign)}: no part of evaluating checkpoints",
            "name, seed, eval.num_examples, eval.num_samples, and the sections task, sampling, model, engine,"
            " placement",
            "remove it; a file that both extend may hold what training and evaluation share",
        )
    try:
        checked = EvalSpec.model_validate(counts)
    except ValidationError as error:
        first = error.errors()[0]
        key = f"eval.{first['loc'][0]}"
        raise _wrong(
            f"{key}={show_value(first['input'])} in {shown}", "a number of 1 or more, or none", "correct it"
        ) from error
    return EvalFile(origin=shown, name=name, task=task, values=values, counts=checked, model_uri=model_uri)


def is_of_file(path: Path) -> bool:
    """Whether a result in a run's `eval/` is of an evaluation that a file described, not the run's own."""
    return _OF_FILE.fullmatch(path.name) is not None


def _wrong(given: str, allowed: str, next_step: str) -> ConfigError:
    return ConfigError(given, allowed=allowed, next_step=next_step)
