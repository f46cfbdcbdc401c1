"""A resolved spec in words: as a TOML file that reads back to the same spec, and setting by setting.

Every setting is written, defaults included, so that the file means the same under a later strop
with other defaults. TOML has no null: a setting without a value is written as the word none,
which the reader takes back for every setting that may be without one. An explanation says what a setting
means, what it may be, and what it is in a given run and why.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.errors import ConfigError
from strop.spec.base import DEFAULT
from strop.spec.display import NULL_WORD, KeyPath, dotted, format_value, list_differences, show_text
from strop.spec.reader import ResolvedSpec
from strop.spec.run import RunSpec
from strop.spec.schema import (
    EXTENDS,
    EXTENDS_HELP,
    FREE_TABLES,
    Setting,
    find_settings,
    free_table,
    near_keys,
    own_settings,
    section_description,
    section_names,
    settings,
    settings_of,
    valid_names,
)
from strop.spec.sources import ENVIRONMENT, parse_override
from strop.spec.task import EnvironmentSection, UserCodeSection


def write_spec(resolved: ResolvedSpec) -> str:
    """Return the text of a TOML run file that `load_spec` reads to an equal spec.

    Each line ends in a comment that says where its value came from.
    """
    spec, origins = resolved.spec, resolved.origins
    lines = [f'# The run as asked for: every setting and where it came from. "{NULL_WORD}" is no value.']
    mine = settings_of(spec)
    lines += [_line(spec, setting, origins) for setting in mine if len(setting.path) == 1]
    for section in section_names():
        inside = [setting for setting in mine if setting.path[0] == section and len(setting.path) > 1]
        is_world = section == "task" and isinstance(spec.task, EnvironmentSection)
        lines += ["", f"[{ENVIRONMENT if is_world else section}]"]
        lines += [_line(spec, setting, origins) for setting in inside if setting.path not in FREE_TABLES]
        for setting in inside:
            if setting.path in FREE_TABLES:
                lines += _free_table(spec, setting, origins)
    return "\n".join(lines) + "\n"


def value_of(spec: RunSpec, setting: Setting) -> Any:
    """Return the value of a setting in a spec."""
    value: Any = spec
    for part in setting.path:
        value = getattr(value, part)
    return value


def _line(spec: RunSpec, setting: Setting, origins: Mapping[str, str]) -> str:
    origin = origins.get(setting.key, DEFAULT)
    return f"{setting.path[-1]} = {format_value(value_of(spec, setting))}  # {origin}"


def _free_table(spec: RunSpec, setting: Setting, origins: Mapping[str, str]) -> list[str]:
    table: dict[str, Any] = value_of(spec, setting)
    lines = ["", f"[{setting.key}]"]
    for key, value in table.items():
        full_key = dotted((*setting.path, key))
        # A part of a mixture is one value here, and its settings may come from several places.
        found = [origin for name, origin in origins.items() if (name + ".").startswith(full_key + ".")]
        origin = ", ".join(dict.fromkeys(found)) or DEFAULT
        lines.append(f"{dotted((key,))} = {format_value(value)}  # {origin}")
    return lines


NOT_ASKED = {"output", "store", "job", "runtime", "trackers"}
"""Sections about where and how a run executes, which do not change what it computes."""


def spec_digest(spec: RunSpec) -> str:
    """Return a hash of the spec: equal specs have equal digests, on every machine.

    The sections of `NOT_ASKED` are left out: moving a run elsewhere does not change it, nor does showing it.
    """
    content = spec.model_dump(mode="json", exclude=NOT_ASKED)
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def list_spec_differences(before: str, now: str) -> str:
    """Return the settings in which two texts of `write_spec` differ, but for those of `NOT_ASKED`."""
    then, here = (
        {key: value for key, value in tomllib.loads(text).items() if key not in NOT_ASKED}
        for text in (before, now)
    )
    return list_differences(then, here)


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Everything known about a setting or a section."""

    key: str
    type: str
    """'integer', 'number or none', 'choice', 'text', 'table'."""
    default: str
    """As a run file would write it, 'required', or one per task where tasks differ."""
    allowed: str
    description: str
    reason: str | None = None
    """Why an expert setting exists; None of an everyday one, and of a section."""
    value: Any = None
    """In the given run; None too where that is the value or no run was given."""
    origin: str | None = None
    """Where the value was written; None where no run was given or its task lacks the setting."""
    keys: tuple[str, ...] = ()
    """Dotted settings of a section; () for a setting."""


def explain(key: str, resolved: ResolvedSpec | None = None) -> Explanation:
    """Explain a setting or a section; with `resolved`, also its value there and its origin.

    Raises: ConfigError with near matches and all valid names if there is no such key.
    """
    try:
        path, _ = parse_override(f"{key}=0")
    except ConfigError:
        raise _unknown((key,)) from None
    if path == (EXTENDS,):
        return Explanation(
            key=EXTENDS, type="text", default='"none"', allowed="run files", description=EXTENDS_HELP
        )
    if len(path) == 1 and path[0] in section_names():
        name = path[0]
        is_own = resolved is not None and name == "task" and isinstance(resolved.spec.task, UserCodeSection)
        known = settings_of(resolved.spec) if resolved is not None and is_own else settings()
        keys = tuple(dict.fromkeys(setting.key for setting in known if setting.path[0] == name))
        return Explanation(
            key=name,
            type="section",
            default="every setting its own",
            allowed="a table of " + ", ".join(one.partition(".")[2] for one in keys),
            description=section_description(name),
            keys=keys,
        )
    if free_table(path) is not None:
        return _explain_free_key(path, resolved)
    own = own_settings(resolved.spec.task) if resolved is not None else ()
    found = find_settings(path) or tuple(setting for setting in own if setting.path == path)
    if not found:
        raise _unknown(path)
    if resolved is None:
        return describe_settings(found)
    mine = tuple(setting for setting in settings_of(resolved.spec) if setting.path == path)
    if not mine:
        return describe_settings(found)
    value, origin = value_of(resolved.spec, mine[0]), resolved.origins.get(mine[0].key, DEFAULT)
    return describe_settings(mine, value, origin)


def _unknown(path: KeyPath) -> ConfigError:
    near = near_keys(path)
    return ConfigError(
        f"unknown key {show_text(dotted(path))}",
        allowed=", ".join(valid_names(path)),
        next_step=f"did you mean {' or '.join(near)}?" if near else "choose one of these",
    )


def describe_settings(
    found: tuple[Setting, ...], value: Any = None, origin: str | None = None
) -> Explanation:
    """Explain a setting that exists once, or once per task."""
    reasons = [setting.reason or "" for setting in found]
    return Explanation(
        key=found[0].key,
        type=_join([(setting.type_text, setting.variant) for setting in found]),
        default=_join([(setting.default_text, setting.variant) for setting in found]),
        allowed=_join([(setting.allowed_text, setting.variant) for setting in found]),
        description=_join([(setting.info.description or "", setting.variant) for setting in found]),
        reason=None
        if "" in reasons
        else _join([(text, one.variant) for text, one in zip(reasons, found, strict=True)]),
        value=value,
        origin=origin,
    )


def _join(texts: list[tuple[str, str | None]]) -> str:
    """Return one text, or one per task where they differ; a setting of a single task names it."""
    distinct = list(dict.fromkeys(text for text, _ in texts))
    if len(distinct) == 1:
        return distinct[0]
    tasks = {text: [str(task) for other, task in texts if other == text] for text in distinct}
    return "; ".join(f"{', '.join(tasks[text])}: {text}" for text in distinct)


def _explain_free_key(path: KeyPath, resolved: ResolvedSpec | None) -> Explanation:
    """Explain a key of a free table: strop knows its value, not its meaning."""
    table: Any = getattr(resolved.spec.task, path[1], {}) if resolved is not None else {}
    for part in path[2:-1]:
        table = table.get(part, {})
    origin = None
    if resolved is not None and path[-1] in table:
        origin = resolved.origins.get(dotted(path), DEFAULT)
    return Explanation(
        key=dotted(path),
        type="any",
        default="the data set's own" if path[1] == "config" else "that of the part's task",
        allowed="what the data set takes" if path[1] == "config" else "what the part's task takes",
        description=find_settings(path[:2])[0].info.description or "",
        value=table.get(path[-1]),
        origin=origin,
    )
