"""A resolved spec as a TOML file that reads back to the same spec, and its digest.

Every setting is written, defaults included, so that the file means the same under a later strop
with other defaults. TOML has no null: a setting without a value is written as the word none,
which the reader takes back for every setting that may be without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from strop.spec.base import DEFAULT
from strop.spec.display import NULL_WORD, dotted, format_value
from strop.spec.reader import ResolvedSpec
from strop.spec.run import RunSpec
from strop.spec.schema import FREE_TABLES, Setting, section_names, settings_of
from strop.spec.sources import ENVIRONMENT
from strop.spec.task import EnvironmentSection


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
    """Return the value that a spec has for a setting of its own."""
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


NOT_ASKED = frozenset({"output", "store", "job", "runtime", "trackers"})
"""Sections that say where and how a run lives, and nothing of what was asked for."""


def spec_digest(spec: RunSpec) -> str:
    """Return a hash over what was asked for: equal specs have equal digests, on every machine.

    The sections of `NOT_ASKED` are left out: moving a run elsewhere does not change it, nor does showing it.
    """
    left_out = set(NOT_ASKED)
    if spec.harness == type(spec.harness)():
        # Runs have none: their digests stay those of before there was one.
        left_out.add("harness")
    content = spec.model_dump(mode="json", exclude=left_out)
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
