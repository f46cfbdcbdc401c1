"""All settings: one walk over the models, shared by reader, writer and `explain`.

A setting is a leaf such as `train.steps`. The keys below `task.config` belong to the data set, those
below `task.parts` are labels with a task's settings each: the walk stops at these tables.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from strop.spec.algorithm import ALGORITHM_NAMES
from strop.spec.base import Section
from strop.spec.built_in import built_in_tasks, import_section
from strop.spec.display import NULL_WORD, KeyPath, dotted, format_value
from strop.spec.run import RunSpec
from strop.spec.task import (
    USER_SECTIONS,
    USER_TASK,
    TaskSection,
    UserCodeSection,
    find_section,
)
from strop.user_code import find_task

EXTENDS = "extends"
"""The one key of a file that is no setting: the file, or files, whose values this one starts from."""
EXTENDS_HELP = (
    "Run file whose settings this one starts from, or a list of several, relative to the file that names it."
    " The order is: default, then the extended files as they are listed, then the file, then key=value"
    " overrides; the later wins."
)
CONFIG_TABLE: KeyPath = ("task", "config")
PARTS_TABLE: KeyPath = ("task", "parts")
FREE_TABLES = (CONFIG_TABLE, PARTS_TABLE)
"""Tables whose keys are not settings: a data set's own, and the labels of a mixture's parts."""
_VOWELS = "aeiou"
_LIMITS: tuple[tuple[type, str, str], ...] = (
    (at.Ge, "ge", "at least {}"),
    (at.Gt, "gt", "above {}"),
    (at.Le, "le", "at most {}"),
    (at.Lt, "lt", "below {}"),
    (at.MinLen, "min_length", "not empty"),
    (at.MaxLen, "max_length", "of at most {} characters"),
)


def free_table(path: KeyPath) -> KeyPath | None:
    """Return the free table that a path is inside of (for mixtures also a part's setting), or None."""
    deepest = 4 if path[:2] == PARTS_TABLE else 3
    return path[:2] if path[:2] in FREE_TABLES and 2 < len(path) <= deepest else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One public setting."""

    path: KeyPath
    variant: str | None
    """The task that has this setting; None outside `task`."""
    info: FieldInfo

    @property
    def key(self) -> str:
        """Its name in run files."""
        return dotted(self.path)

    @property
    def reason(self) -> str | None:
        """Why an expert setting exists, after "It exists because"; None for an everyday setting."""
        extra = self.info.json_schema_extra
        return str(extra["expert"]) if isinstance(extra, dict) and "expert" in extra else None

    @property
    def is_nullable(self) -> bool:
        """Whether 'no value' is allowed."""
        return type(None) in get_args(self.info.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, or () if it is not a choice."""
        kind = _kinds(self.info.annotation)[0]
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def type_text(self) -> str:
        """Its type in words: 'integer', 'number or none'."""
        kind = _kinds(self.info.annotation)[0]
        if get_origin(kind) is Literal:
            name = "choice"
        elif get_origin(kind) is dict:
            name = "table"
        elif get_origin(kind) is tuple:
            name = "list of numbers" if float in get_args(kind) else "list of texts"
        else:
            name = {int: "integer", float: "number", str: "text", bool: "true or false"}[kind]
        return f"{name} or none" if self.is_nullable else name

    @property
    def allowed_text(self) -> str:
        """Its allowed values, in words."""
        words = self.type_text.removesuffix(" or none")
        article = "an" if words[0] in _VOWELS else "a"
        # Beside the choices: code of the user's.
        further = ["FILE.py:NAME"] if str in _kinds(self.info.annotation)[1:] else []
        limits = {type(limit): limit for limit in self.info.metadata}
        low, high = limits.get(at.Ge), limits.get(at.Le)
        parts = [part for limit in self.info.metadata if (part := _limit_text(limit))]
        bounds = " " * bool(parts) + ", ".join(parts)
        if low is not None and high is not None:
            bounds = f" from {_bound(low.ge)} to {_bound(high.le)}"
        choices = ", ".join([*map(repr, self.choices), *further])
        text = choices if self.choices else f"{article} {words}{bounds}"
        return f'{text}; or "{NULL_WORD}"' if self.is_nullable else text

    @property
    def default_text(self) -> str:
        """Its default as a run file would write it, or 'required'."""
        if self.info.is_required():
            return "required"
        default = self.info.get_default(call_default_factory=True, validated_data={})
        return format_value(list(default) if isinstance(default, tuple) else default)


def _limit_text(limit: Any) -> str:
    """Describe one constraint of the models, or return '' for one that needs no words."""
    for kind, name, words in _LIMITS:
        if isinstance(limit, kind):
            return words.format(_bound(getattr(limit, name)))
    pattern = getattr(limit, "pattern", None)
    return f"matching {pattern}" if pattern else ""


def _bound(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kinds(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, nested ones included, without None."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for one in get_args(annotation) for kind in _kinds(one) if kind is not type(None)]
    return [annotation]


def sections_of(info: FieldInfo) -> list[type[Section]]:
    """Return the section models behind a field of the run spec; [] for a plain setting."""
    return [kind for kind in _kinds(info.annotation) if isinstance(kind, type) and issubclass(kind, Section)]


@cache
def settings() -> tuple[Setting, ...]:
    """Return all settings, in the order of the models; a shared task setting once per task.

    Imports the modules of all tasks; a run is read without.
    """
    found: list[Setting] = []
    for name in RunSpec.model_fields:
        if name == "task":
            variants = (*built_in_tasks(), *USER_SECTIONS)
            found += [_name_of_task(), *(one for variant in variants for one in _settings_of_task(variant))]
        else:
            found += _plain_settings(name)
    return tuple(found)


@cache
def plain_settings() -> tuple[Setting, ...]:
    """Return the settings of every run: all but those of tasks, `task.name` included."""
    found: list[Setting] = []
    for name in RunSpec.model_fields:
        found += [_name_of_task()] if name == "task" else _plain_settings(name)
    return tuple(found)


def _plain_settings(name: str) -> tuple[Setting, ...]:
    """Return a top-level setting, or the settings of a section."""
    info = RunSpec.model_fields[name]
    models = sections_of(info)
    if not models:
        return (Setting(path=(name,), variant=None, info=info),)
    fields = models[0].model_fields.items()
    found = {key: Setting(path=(name, key), variant=None, info=info) for key, info in fields}
    if name == "algorithm":
        known = found["name"].info
        # The catalog's, or code of the user's.
        choice = Literal[ALGORITHM_NAMES] | str  # type: ignore[valid-type]
        named = FieldInfo(annotation=choice, default=known.default, description=known.description)
        found["name"] = replace(found["name"], info=named)
    return tuple(found.values())


def _name_of_task() -> Setting:
    names = (*built_in_tasks(), USER_TASK)
    # Each section allows its own name only; a user chooses among all.
    meaning = " ".join(f"'{name}': {listed['summary']}" for name, listed in built_in_tasks().items())
    meaning += f" '{USER_TASK}': {UserCodeSection.__doc__}"
    info = FieldInfo(annotation=Literal[names], description=meaning)  # type: ignore[arg-type]
    return Setting(path=("task", "name"), variant=None, info=info)


@cache
def _settings_of_task(variant: str) -> tuple[Setting, ...]:
    """Return the settings of one task; imports only its module."""
    section = USER_SECTIONS.get(variant) or import_section(variant)
    return tuple(
        Setting(path=("task", name), variant=variant, info=info)
        for name, info in section.model_fields.items()
        if name != "name"
    )


@cache
def section_names() -> tuple[str, ...]:
    """Return the names of the tables of a run file."""
    return tuple(name for name, info in RunSpec.model_fields.items() if sections_of(info))


def section_description(name: str) -> str:
    """Return the description of a section."""
    return RunSpec.model_fields[name].description or ""


def all_keys() -> tuple[str, ...]:
    """Return every setting by its dotted name, each once, in the order of the models."""
    return tuple(dict.fromkeys(setting.key for setting in settings()))


def find_settings(path: KeyPath, variant: str | None = None) -> tuple[Setting, ...]:
    """Return the settings at a path: one, or one per task that has it, or () if there is none.

    `variant`: the name of a task, whose own setting alone is meant.
    """
    if path[0] != "task" or path == ("task", "name"):
        known = plain_settings()
    elif variant is not None and find_section(variant) is not None:
        known = _settings_of_task(variant_of(variant) or "")
    else:
        known = settings()
        if variant is not None:
            return ()
    return tuple(setting for setting in known if setting.path == path)


def variant_of(task: str | None) -> str | None:
    """Return the variant of a task's settings: its name, or the common variant of user-defined tasks."""
    if task is None or find_task(task) is None:
        return task
    section = find_section(task)
    return next(variant for variant, kind in USER_SECTIONS.items() if kind is section)


def settings_of(spec: RunSpec) -> tuple[Setting, ...]:
    """Return the settings of a spec, with those of its own task, user-defined ones included."""
    variant = variant_of(spec.task.name) or ""
    return plain_settings() + _settings_of_task(variant) + own_settings(spec.task)


def own_settings(task: TaskSection) -> tuple[Setting, ...]:
    """Return the settings of a user-defined class; none for a built-in task."""
    if not isinstance(task, UserCodeSection):
        return ()
    known = task.inspect().schema if task.ref.is_here else {}
    properties = known.get("properties") or {key: {} for key in task.__pydantic_extra__}
    return tuple(
        Setting(
            path=("task", name), variant=variant_of(task.name), info=to_field(schema, known.get("$defs", {}))
        )
        for name, schema in properties.items()
    )


def valid_names(path: KeyPath) -> tuple[str, ...]:
    """Return the valid names for the last part of an unknown path."""
    if len(path) > 1 and path[0] in section_names():
        inside = (setting.path[1] for setting in settings() if setting.path[0] == path[0])
        return tuple(dict.fromkeys(inside))
    return (EXTENDS, *RunSpec.model_fields)


def near_keys(path: KeyPath) -> list[str]:
    """Return up to three settings or sections that resemble an unknown key, best first."""
    keys = [*all_keys(), *section_names(), EXTENDS]
    by_name = {key: key.rpartition(".")[2] for key in keys}
    same_name = [key for key in keys if by_name[key] == path[-1] and key != dotted(path)]
    inside = {name: dotted((*path[:-1], name)) for name in valid_names(path)}
    names = difflib.get_close_matches(path[-1], list(inside), n=3, cutoff=0.75)
    near = same_name + [inside[name] for name in names]
    if not near:
        near = difflib.get_close_matches(dotted(path), keys, n=3, cutoff=0.6)
    if not near:
        near = [key for key in keys if difflib.get_close_matches(path[-1], [by_name[key]], cutoff=0.75)]
    return list(dict.fromkeys(near))[:3]


_JSON_TYPES: Mapping[str, Any] = {"integer": int, "number": float, "string": str, "boolean": bool}
_JSON_LIMITS: Mapping[str, Any] = {
    "minimum": at.Ge,
    "exclusiveMinimum": at.Gt,
    "maximum": at.Le,
    "exclusiveMaximum": at.Lt,
    "minLength": at.MinLen,
    "maxLength": at.MaxLen,
}


def to_field(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> FieldInfo:
    """Convert a JSON Schema into a field as strop's sections have it: type, limits, default, description."""
    listed = schema.get("anyOf", [schema])
    choices = [definitions.get(str(one.get("$ref", "")).rpartition("/")[2], one) for one in listed]
    kinds = [one for one in choices if one.get("type") != "null"]
    kind = kinds[0] if kinds else {}
    annotation = _to_type(kind)
    if len(kinds) < len(choices):
        annotation = annotation | None
    info = FieldInfo(
        annotation=annotation,
        default=schema.get("default", PydanticUndefined),
        description=schema.get("description", ""),
    )
    info.metadata = [limit(kind[name]) for name, limit in _JSON_LIMITS.items() if name in kind]
    return info


def _to_type(kind: Mapping[str, Any]) -> Any:
    if "enum" in kind or "const" in kind:
        return Literal[tuple(kind.get("enum", [kind.get("const")]))]
    if kind.get("type") == "array":
        is_numbers = kind.get("items", {}).get("type") in ("number", "integer")
        return tuple[float, ...] if is_numbers else tuple[str, ...]
    return _JSON_TYPES.get(kind.get("type", ""), dict[str, Any])
