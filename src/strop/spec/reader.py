"""Reading a run file: sources in, one validated spec out, with the origin of every value.

The order, weakest first: default, the files named by `extends` (each behind what it extends), the run
file, `key=value` overrides. The later wins, setting by setting. A source that names another task
starts the `task` table anew; where an override does that, a notice says what it dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from strop.errors import ConfigError, format_error
from strop.spec.base import DEFAULT, Section, SpecConflict, to_name
from strop.spec.built_in import built_in_tasks
from strop.spec.display import NULL_WORD, KeyPath, dotted, format_value, show_value
from strop.spec.run import RunSpec
from strop.spec.schema import (
    FREE_TABLES,
    find_settings,
    near_keys,
    plain_settings,
    settings,
    settings_of,
    variant_of,
)
from strop.spec.sources import (
    OVERRIDE,
    PATH_SETTINGS,
    SELECTORS,
    Leaf,
    Leaves,
    absolute_path,
    is_part_setting,
    read_sources,
    unknown_key,
)

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSpec:
    """A run spec with the origin of each value."""

    spec: RunSpec
    origins: Mapping[str, str]
    """Dotted setting to 'default', 'run.toml:7' or 'override'. Keys of `task.config` have their own."""
    notices: tuple[str, ...] = ()
    """What was read and is not used, and why; for the user to see."""


def load_spec(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> ResolvedSpec:
    """Read a TOML run file with everything that it extends, and apply overrides.

    `path` None: there is no file, the overrides say everything. A run without a name has that of its file.

    Raises: ConfigError naming file, line, value and what is allowed; one line per mistake.
    """
    sources = read_sources(None if path is None else os.fspath(path), overrides)
    if path is not None and (stem := to_name(Path(path).stem)):
        sources.insert(0, {("name",): Leaf(path=("name",), value=stem, origin=DEFAULT)})
    return resolve_sources(sources)


def load_section(name: str, model: type[AnySection], words: Sequence[str]) -> AnySection:
    """Read one section of a run file by itself, from `key=value` words about it.

    Raises: ConfigError as `load_spec` does.
    """
    (leaves,) = read_sources(None, words)
    try:
        return model.model_validate({path[1]: leaf.value for path, leaf in leaves.items()})
    except ValidationError as error:
        origins = dict.fromkeys(map(dotted, leaves), OVERRIDE)
        raise _refusal(error, None, origins, section=(name,)) from error


def resolve_sources(sources: Sequence[Leaves]) -> ResolvedSpec:
    """Merge sources into one spec, the weakest first and the overrides last.

    Raises: ConfigError as `load_spec` does.
    """
    winners, notices = merge_sources(sources)
    origins = {dotted(leaf.path): leaf.origin for leaf in winners.values()}
    spec = _validate(winners, origins)
    notices += note_unused(spec, origins)
    every = {setting.key: origins.get(setting.key, DEFAULT) for setting in settings_of(spec)}
    return ResolvedSpec(spec=spec, origins=every | origins, notices=tuple(notices))


def merge_sources(sources: Sequence[Leaves]) -> tuple[Leaves, list[str]]:
    """Let later sources win, setting by setting."""
    winners: Leaves = {}
    notices: list[str] = []
    for source in sources:
        for selector, table in SELECTORS.items():
            if selector in source and selector in winners:
                notices += _start_anew(winners, source, selector, table)
        winners.update(source)
    return winners, notices


def _start_anew(winners: Leaves, source: Leaves, selector: KeyPath, table: KeyPath) -> list[str]:
    """Drop weaker sources' values of a table if this source selects different content for it."""
    new, old = source[selector], winners[selector]
    if new.value == old.value:
        return []
    stale = [path for path in winners if path[: len(table)] == table and path != selector]
    # A file that extends another and names its own task means to; an override may not know the file.
    notices = [
        f"{dotted(path)}={show_value(winners[path].value)} ({winners[path].origin}) is not used:"
        f" {dotted(selector)}={show_value(new.value)} ({new.origin}) starts the table {dotted(table)} anew"
        for path in stale
        if new.origin == OVERRIDE and path not in source
    ]
    for path in stale:
        del winners[path]
    return notices


def _validate(winners: Leaves, origins: Mapping[str, str]) -> RunSpec:
    tree: dict[str, Any] = {}
    for path, leaf in winners.items():
        if leaf.value is None and is_part_setting(path):
            # No value is the default of all that may be without one, and TOML could not give it back.
            continue
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf.value
    for path in PATH_SETTINGS:
        _set_default_path(tree, path)
    try:
        return RunSpec.model_validate(tree)
    except ValidationError as error:
        task = tree.get("task", {}).get("name")
        raise _refusal(error, task, origins) from error


def _set_default_path(tree: dict[str, Any], path: KeyPath) -> None:
    """Make a relative default absolute against the current folder, as if it were in the file."""
    if path[0] == "task":
        return
    default = find_settings(path)[0].info.default
    if not isinstance(default, str) or path[1] in tree.get(path[0], {}):
        return
    absolute = absolute_path(path, default, os.getcwd(), DEFAULT)
    if absolute != default:
        tree.setdefault(path[0], {})[path[1]] = absolute


def _refusal(
    error: ValidationError, task: str | None, origins: Mapping[str, str], section: KeyPath = ()
) -> ConfigError:
    """Return the error for a user, one line per mistake. `section`: the path of the validated model."""
    details = error.errors(include_url=False)
    problems = [
        _explain_error({**detail, "loc": (*section, *detail["loc"])}, task, origins) for detail in details
    ]
    return ConfigError("\n".join(dict.fromkeys(problems)))


def _explain_error(detail: ErrorDetails, task: str | None, origins: Mapping[str, str]) -> str:
    """Turn one pydantic error into a three-part message."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecConflict):
        return cause.located(origins)
    if isinstance(cause, ConfigError):
        return str(cause)
    # The setting that the position in the models speaks of.
    parts = [str(part) for part in detail["loc"]]
    limit = 3 if tuple(parts[:2]) in FREE_TABLES else 2
    path = tuple(parts[:limit])
    kind = detail["type"]
    if kind in {"missing", "union_tag_not_found"}:
        path = ("task", "name") if path == ("task",) else path
        return format_error(
            f"{dotted(path)} is missing",
            allowed="; ".join(dict.fromkeys(_allowed(path, None))),
            next_step=f"add it to the run file; `strop explain {dotted(path)}` says what it means",
        )
    if kind == "extra_forbidden":
        return _foreign_key(path, task, origins)
    if kind == "union_tag_invalid":
        return _wrong_value(("task", "name"), task, None, origins)
    return _wrong_value(path, detail["input"], task, origins)


def _allowed(path: KeyPath, task: str | None) -> list[str]:
    return [setting.allowed_text for setting in find_settings(path, task)]


def _foreign_key(path: KeyPath, task: str | None, origins: Mapping[str, str]) -> str:
    """Refuse a setting of another task."""
    if not find_settings(path):
        return unknown_key(path, origins.get(dotted(path), DEFAULT))
    names = [
        one.path[1] for one in settings() if one.path[0] == "task" and one.variant in (None, variant_of(task))
    ]
    near = [key for key in near_keys(path) if key != dotted(path) and key.removeprefix("task.") in names]
    return format_error(
        f"{dotted(path)} ({origins.get(dotted(path), DEFAULT)}) is no setting of task {show_value(task)}",
        allowed=", ".join(names) + " in task",
        next_step=f"did you mean {' or '.join(near)}?" if near else "remove it, or name another task",
    )


def _wrong_value(path: KeyPath, value: Any, task: str | None, origins: Mapping[str, str]) -> str:
    key = dotted(path)
    origin = origins.get(key, DEFAULT)
    allowed = _allowed(path, task) or ["texts, finite numbers, true, false, lists and tables"]
    shown = NULL_WORD if value is None else show_value(value)
    return format_error(
        f"{key}={shown} ({origin}) is not allowed",
        allowed="; ".join(dict.fromkeys(allowed)),
        next_step=_advice(path, value, task),
    )


def _advice(path: KeyPath, value: Any, task: str | None) -> str:
    """Suggest a fix for this value, if one is known."""
    found = find_settings(path, task)
    key = dotted(path)
    if isinstance(value, str) and found and found[0].type_text.startswith(("integer", "number")):
        return f"write {key} as a number, without quotes"
    if not isinstance(value, str) and found and found[0].type_text.startswith(("text", "choice")):
        return f"write {key} as a text, in quotes"
    if path == ("task", "name") and isinstance(value, str):
        near = get_close_matches(value, built_in_tasks(), n=2)
        if near:
            return f"did you mean {' or '.join(near)}?"
    if found and found[0].default_text != "required":
        return f"correct it, or remove it for the default {format_value(found[0].info.default)}"
    return f"correct it; `strop explain {key}` says what it means"


# Settings that were given and play no part, because the run's terms do not ask for them.
_SIZES_OF_RL: tuple[KeyPath, ...] = (("train", "prompts_per_step"), ("train", "group_size"))
_OF_EVALUATIONS: tuple[KeyPath, ...] = (("eval", "baselines"),)
_TERMS_OF: Mapping[str, set[str]] = {
    "algorithm": {"rl", "rl+sft"},
    "dpo": {"dpo"},
    "teacher": {"rl", "rl+sft", "distill"},
    "reference": {"rl", "rl+sft", "dpo"},
    "harness": set(),
}
"""Section, and the terms that it has a part in."""


def note_unused(spec: RunSpec, origins: Mapping[str, str]) -> list[str]:
    """Return a notice for every setting that differs from its default and has no effect.

    A file that is extended, or the record of another run, may well hold them: no reason to refuse.
    """
    notices = []
    for setting in plain_settings():
        section = setting.path[0]
        is_unread = (
            (not spec.train.has_rl and setting.path in _SIZES_OF_RL)
            or setting.path in _OF_EVALUATIONS
            or (not spec.has_demonstrations and section == "sft")
            or spec.train.terms not in _TERMS_OF.get(section, {spec.train.terms})
        )
        if not is_unread:
            continue
        value = getattr(getattr(spec, section), setting.path[1])
        origin = origins.get(setting.key, DEFAULT)
        if origin != DEFAULT and value != setting.info.default:
            notices.append(
                f"{setting.key}={show_value(value)} ({origin}) is not used: train.terms={spec.train.terms!r}"
                f" ({origins.get('train.terms', DEFAULT)})"
            )
    return notices
