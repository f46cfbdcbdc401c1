"""Reading a run file: sources in, one validated spec out, with the origin of every value.

The order, weakest first: default, the file named by `extends` (and what that extends), the run
file, `key=value` overrides. The later wins, setting by setting. A source that names another task
starts the `task` table anew; where an override does that, a notice says what it dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from strop.errors import ConfigError, explain_refusal
from strop.spec.base import DEFAULT, SpecConflict
from strop.spec.display import KeyPath, dotted, format_value, show_value
from strop.spec.flags import Conflict, Flag, apply_flags
from strop.spec.overrides import OVERRIDE
from strop.spec.paths import PATH_SETTINGS, absolute_path
from strop.spec.run import RunSpec
from strop.spec.schema import (
    FREE_TABLES,
    NULL_WORD,
    find_settings,
    near_keys,
    settings,
    settings_of,
    variant_of,
)
from strop.spec.sources import SELECTORS, Leaves, is_part_setting, read_sources
from strop.spec.unused import note_unused
from strop.spec.user_task import BUILT_IN, USER_TASK


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSpec:
    """A run spec and where each of its values was written."""

    spec: RunSpec
    origins: Mapping[str, str]
    """Dotted setting to 'default', 'run.toml:7' or 'override'. Keys of `task.config` have their own."""
    notices: tuple[str, ...] = ()
    """What was read and is not used, and why; for the user to see."""
    conflicts: tuple[Conflict, ...] = ()
    """Values of the settings that a launcher owns which lost against others."""


def load_spec(
    path: str | os.PathLike[str] | None, overrides: Sequence[str] = (), flags: Sequence[Flag] = ()
) -> ResolvedSpec:
    """Read a TOML or YAML run file with everything that it extends, and apply overrides and flags.

    `path` None: there is no file, the overrides say everything.

    Raises: ConfigError naming file, line, value and what is allowed; one line per mistake.
    """
    sources = read_sources(None if path is None else os.fspath(path), overrides)
    sources, conflicts = apply_flags(sources, flags)
    winners, notices = merge_sources(sources)
    origins = {dotted(leaf.path): leaf.origin for leaf in winners.values()}
    spec = _validate(winners, origins)
    notices += note_unused(spec, origins)
    return ResolvedSpec(
        spec=spec,
        origins=_all_origins(spec, origins),
        notices=tuple(notices),
        conflicts=tuple(conflicts),
    )


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
    """Drop what weaker sources said about a table, if this source selects another content for it."""
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
        problems = [_explain_error(detail, task, origins) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


def _set_default_path(tree: dict[str, Any], path: KeyPath) -> None:
    """Make a relative default absolute against the current folder, as if it were written out."""
    setting = find_settings(path)[0]
    default = setting.info.default
    if path[0] == "task" or not isinstance(default, str) or path[1] in tree.get(path[0], {}):
        return
    absolute = absolute_path(path, default, os.getcwd(), DEFAULT)
    if absolute != default:
        tree.setdefault(path[0], {})[path[1]] = absolute


def _all_origins(spec: RunSpec, origins: Mapping[str, str]) -> dict[str, str]:
    """Return an origin for every setting that this spec has."""
    complete = {setting.key: origins.get(setting.key, DEFAULT) for setting in settings_of(spec)}
    return complete | dict(origins)


def _explain_error(detail: ErrorDetails, task: str | None, origins: Mapping[str, str]) -> str:
    """Turn one finding of the models into a message of this house."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecConflict):
        return cause.located(origins)
    if isinstance(cause, ConfigError):
        return str(cause)
    path = _setting_path(detail["loc"], task)
    kind = detail["type"]
    if kind in {"missing", "union_tag_not_found"}:
        return _missing(path)
    if kind == "extra_forbidden":
        return _foreign_key(path, task, origins)
    if kind == "union_tag_invalid":
        return _wrong_value(("task", "name"), task, None, origins)
    return _wrong_value(path, detail["input"], task, origins)


def _setting_path(location: tuple[int | str, ...], task: str | None) -> KeyPath:
    """Return the setting that a position of the models speaks of: without the name of the task."""
    parts = [str(part) for part in location]
    while len(parts) > 1 and parts[0] == "task" and parts[1] in (task, BUILT_IN, USER_TASK):
        del parts[1]
    limit = 3 if tuple(parts[:2]) in FREE_TABLES else 2
    return tuple(parts[:limit])


def _missing(path: KeyPath) -> str:
    path = ("task", "name") if path == ("task",) else path
    allowed = "; ".join(dict.fromkeys(_allowed(path, None)))
    return explain_refusal(
        f"{dotted(path)} is missing",
        allowed=allowed,
        next_step=f"add it to the run file; `strop explain {dotted(path)}` says what it means",
    )


def _allowed(path: KeyPath, task: str | None) -> list[str]:
    return [setting.allowed_text for setting in find_settings(path, task)]


def _foreign_key(path: KeyPath, task: str | None, origins: Mapping[str, str]) -> str:
    """Refuse a setting that belongs to another task than the one named."""
    names = [s.path[1] for s in settings() if s.path[0] == "task" and s.variant in (None, variant_of(task))]
    near = [key for key in near_keys(path) if key != dotted(path) and key.removeprefix("task.") in names]
    return explain_refusal(
        f"{dotted(path)} ({origins.get(dotted(path), DEFAULT)}) is no setting of task {show_value(task)}",
        allowed=", ".join(names) + " in task",
        next_step=f"did you mean {' or '.join(near)}?" if near else "remove it, or name another task",
    )


def _wrong_value(path: KeyPath, value: Any, task: str | None, origins: Mapping[str, str]) -> str:
    key = dotted(path)
    origin = origins.get(key, DEFAULT)
    allowed = _allowed(path, task) or ["texts, finite numbers, true, false, lists and tables"]
    shown = NULL_WORD if value is None else show_value(value)
    return explain_refusal(
        f"{key}={shown} ({origin}) is not allowed",
        allowed="; ".join(dict.fromkeys(allowed)),
        next_step=_advice(path, value, task),
    )


def _advice(path: KeyPath, value: Any, task: str | None) -> str:
    """Propose a change that works for this value, as far as one can be told."""
    found = find_settings(path, task)
    key = dotted(path)
    if isinstance(value, str) and found and found[0].type_text.startswith(("integer", "number")):
        return f"write {key} as a number, without quotes"
    if not isinstance(value, str) and found and found[0].type_text.startswith(("text", "choice")):
        return f"write {key} as a text, in quotes"
    if found and found[0].default_text != "required":
        return f"correct it, or remove it for the default {format_value(found[0].info.default)}"
    return f"correct it; `strop explain {key}` says what it means"
