"""From files and overrides to one value per setting, each with its origin.

Refuses, for each source alone: unknown keys, tables where values belong and the reverse, values
that no setting can have, credentials. Types are the models' business.
"""

from __future__ import annotations

import datetime as dt
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.errors import ConfigError, format_error
from strop.spec.base import MAX_DEPTH
from strop.spec.display import (
    NULL_WORD,
    KeyPath,
    credential_form,
    dotted,
    is_credential_name,
    quote_text,
    show_path,
    show_text,
    show_value,
)
from strop.spec.offline import is_data_path
from strop.spec.schema import (
    CONFIG_TABLE,
    EXTENDS,
    FREE_TABLES,
    PARTS_TABLE,
    find_settings,
    free_table,
    near_keys,
    section_names,
    valid_names,
)
from strop.spec.tree import Tree, read_tree
from strop.user_code import is_code

ENVIRONMENT = "environment"
"""Another name of the table `task`, for tasks of several turns."""
SELECTORS: dict[KeyPath, KeyPath] = {("task", "name"): ("task",), ("task", "dataset"): CONFIG_TABLE}
"""A setting that selects a table's content, and the table that is reset when it changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One value of one setting in a source."""

    path: KeyPath
    value: Any
    origin: str
    """'run.toml:7' or 'override'."""


Leaves = dict[KeyPath, Leaf]


def read_sources(path: str | None, overrides: Sequence[str]) -> list[Leaves]:
    """Read each source, weakest first: extended files, the file, the overrides.

    `path` None: there is no file.

    Raises: ConfigError, with one line per mistake of the first source that has any.
    """
    # Those that a file extends, before it. One that two of them extend counts once, below both.
    trees: dict[str, Tree] = {}
    if path is not None:
        _read_file(path, (), trees)
    found: list[tuple[list[Leaf], str]] = []
    for tree in trees.values():
        if ENVIRONMENT in tree.values and "task" in tree.values:
            raise ConfigError(
                f"both a task ({tree.origin(('task',))}) and an environment ({tree.origin((ENVIRONMENT,))})",
                allowed="[task], or [environment] for one of several turns",
                next_step="remove one of the two",
            )
        given = {key: value for key, value in tree.values.items() if key != EXTENDS}
        leaves = [
            Leaf(path=_as_task(at), value=value, origin=tree.origin(at)) for at, value in _flatten(given, ())
        ]
        found.append((leaves, tree.folder))
    found.append((_read_overrides(overrides), os.getcwd()))
    sources = [_finish(leaves, folder) for leaves, folder in found]
    # The same setting twice is fine only with one value.
    winners: Leaves = {}
    for leaf in found[-1][0]:
        earlier = winners.setdefault(leaf.path, leaf)
        if not _is_same(earlier.value, leaf.value):
            key = dotted(leaf.path)
            raise ConfigError(
                f"override {key}={show_value(earlier.value)} and override {key}={show_value(leaf.value)}"
                " contradict each other",
                allowed="one value per setting",
                next_step="remove one of the two",
            )
    return sources


def _read_file(path: str, way: tuple[tuple[str, str], ...], trees: dict[str, Tree]) -> None:
    """Read a file after its parents. `way`: identity and shown name of the files that led to it."""
    identity = os.path.realpath(path) if "\0" not in path else path
    if identity in trees:
        return
    tree = read_tree(path)
    way = (*way, (identity, tree.shown))
    for name, parent in _extended_paths(path, tree):
        if os.path.realpath(parent) in dict(way):
            raise ConfigError(
                f"extends={show_text(name)} ({tree.origin((EXTENDS,))}) leads back to a file"
                f" that was read already: {' -> '.join(shown for _, shown in way)}",
                allowed="a chain of files that ends",
                next_step="remove one of the extends",
            )
        _read_file(parent, way, trees)
    trees[identity] = tree


def _extended_paths(path: str, tree: Tree) -> list[tuple[str, str]]:
    """Return the files that a file extends, weakest first: the name in the file, and the path."""
    if EXTENDS not in tree.values:
        return []
    given, origin = tree.values[EXTENDS], tree.origin((EXTENDS,))
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name and name.isprintable() for name in names):
        raise ConfigError(
            f"{EXTENDS}={show_value(given)} ({origin}) is not the name of a file",
            allowed="one run file or a list of them, relative to the file that names it",
            next_step='write it like extends = "base.toml" or extends = ["base.toml", "site.toml"]',
        )
    found = []
    for name in names:
        extended = os.path.normpath(os.path.join(os.path.dirname(path), os.path.expanduser(name)))
        if not os.path.exists(extended):
            raise ConfigError(
                f"{EXTENDS}={show_text(name)} ({origin}) does not exist: looked for {show_path(extended)}",
                allowed="an existing run file, relative to the file that names it",
                next_step="correct the name",
            )
        found.append((name, extended))
    twice = [name for name, extended in found if [other for _, other in found].count(extended) > 1]
    if twice:
        raise ConfigError(
            f"{EXTENDS}={show_value(given)} ({origin}) names {show_text(twice[0])} twice",
            allowed="each file once: the later of two is the stronger one",
            next_step="remove one of the two",
        )
    return found


def _read_overrides(overrides: Sequence[str]) -> list[Leaf]:
    found: list[Leaf] = []
    for text in overrides:
        path, value = parse_override(text)
        tree: dict[str, Any] = {path[-1]: value}
        for part in reversed(path[:-1]):
            tree = {part: tree}
        found += [Leaf(path=inner, value=item, origin=OVERRIDE) for inner, item in _flatten(tree, ())]
    return found


def _as_task(path: KeyPath) -> KeyPath:
    return ("task", *path[1:]) if path[0] == ENVIRONMENT else path


def is_table(path: KeyPath) -> bool:
    """Whether the reader descends into a path."""
    path = _as_task(path)
    is_part = len(path) == len(PARTS_TABLE) + 1 and free_table(path) == PARTS_TABLE
    return is_part or path in FREE_TABLES or (len(path) == 1 and path[0] in section_names())


def is_part_setting(path: KeyPath) -> bool:
    """Whether a path is a setting of a part: task.parts.LABEL.source."""
    return len(path) == len(PARTS_TABLE) + 2 and free_table(path) == PARTS_TABLE


def _flatten(values: dict[str, Any], prefix: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of a tree. An empty table yields nothing; that of a part yields its label as task."""
    for key, value in values.items():
        path = (*prefix, key)
        if value == {} and prefix == PARTS_TABLE:
            yield (*path, "name"), key
        elif isinstance(value, dict) and is_table(path):
            yield from _flatten(value, path)
        else:
            yield path, value


def _finish(found: list[Leaf], folder: str) -> Leaves:
    """Refuse invalid leaves; turn the word none into None and relative paths into absolute ones."""
    problems = [problem for leaf in found if (problem := _problem(leaf)) is not None]
    if problems:
        raise ConfigError("\n".join(problems))
    leaves: Leaves = {}
    for leaf in found:
        value = leaf.value
        # A setting of a part is one of its task.
        path = ("task", leaf.path[-1]) if is_part_setting(leaf.path) else leaf.path
        if value == NULL_WORD and any(setting.is_nullable for setting in find_settings(path)):
            value = None
        if isinstance(value, str):
            value = absolute_path(leaf.path, value, folder, leaf.origin)
        elif isinstance(value, list):
            value = [
                absolute_path(leaf.path, item, folder, leaf.origin) if isinstance(item, str) else item
                for item in value
            ]
        leaves[leaf.path] = replace(leaf, value=value)
    return leaves


def _problem(leaf: Leaf) -> str | None:
    """Return why no setting accepts this leaf, or None."""
    if _is_too_deep(leaf.value):
        return format_error(
            f"a value is nested more than {MAX_DEPTH} deep ({leaf.origin})",
            allowed=f"tables and lists of depth {MAX_DEPTH} at most",
            next_step="flatten the value",
        )
    credential = _credential(leaf.path, leaf.value)
    if credential is not None:
        # Neither key nor value is shown: either may be the secret.
        return format_error(
            f"{leaf.origin} holds {credential}",
            allowed="no credentials in a run file, because it is copied into every run's records",
            next_step="remove it, withdraw it if the file was shared, and set it in the environment",
        )
    if is_table(leaf.path):
        is_free = leaf.path[:2] in FREE_TABLES
        names = "" if is_free else ": " + ", ".join(valid_names((*leaf.path, "")))
        return format_error(
            f"{_shown(leaf)} is no table",
            allowed="a table of settings" + names,
            next_step=f"write [{dotted(leaf.path)}] with its settings below",
        )
    # Which settings a task has is known when its section is read, and its module alone is imported for that.
    is_of_task = leaf.path[0] == "task" and len(leaf.path) == 2
    if free_table(leaf.path) is not None or is_of_task or find_settings(leaf.path):
        return None
    if leaf.path == (EXTENDS,):
        return format_error(
            f"{_shown(leaf)} came too late",
            allowed=f"{EXTENDS} inside a run file only",
            next_step="write it into the file",
        )
    return unknown_key(leaf.path, leaf.origin)


def _shown(leaf: Leaf) -> str:
    return f"{dotted(leaf.path)}={show_value(leaf.value)} ({leaf.origin})"


def unknown_key(path: KeyPath, origin: str) -> str:
    """Return the message for an unknown key."""
    near = near_keys(path)
    place = f" in {path[0]}" if len(path) > 1 and path[0] in section_names() else ""
    return format_error(
        f"unknown key {show_path(dotted(path))} ({origin})",
        allowed=", ".join(valid_names(path)) + place,
        next_step=f"did you mean {' or '.join(near)}?" if near else "remove it",
    )


def _credential(path: KeyPath, value: Any) -> str | None:
    """Return the kind of credential in a leaf's key or value, or None."""
    for part in path:
        if (form := credential_form(part)) is not None:
            return form
    if isinstance(value, str):
        named = is_credential_name(path[-1]) and bool(value)
        return credential_form(value) or ("a credential by its name" if named else None)
    if isinstance(value, dict):
        inner = [_credential((*path, key), item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [_credential(path, item) for item in value]
    else:
        return None
    return next((form for form in inner if form is not None), None)


def _is_too_deep(value: Any, depth: int = 0) -> bool:
    if depth > MAX_DEPTH:
        return True
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return any(_is_too_deep(item, depth + 1) for item in items)
    return False


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are written alike: in a run file true, 1 and 1.0 are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    # A NaN is not even equal to itself.
    return bool(one == other) or (one != one and other != other)


# Overrides, `key=value`: the key is dotted; the value is read as TOML and, where it is none, taken as text.
_OTHER_NULL_WORD = "null"
OVERRIDE = "override"
"""Origin of a value that an override set."""


def add_override(overrides: Sequence[str] | None, key: str, value: str | None, option: str) -> list[str]:
    """Return overrides with the value of an option of the command line that stands for a setting.

    Raises: ConfigError if an override gives the setting, too.
    """
    words = list(overrides or ())
    if value is None:
        return words
    if any(word.partition("=")[0].strip() == key for word in words):
        raise ConfigError(
            f"{option} together with {key}=", allowed="one of them", next_step=f"leave {option} out"
        )
    return [*words, f"{key}={quote_text(value)}"]


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """Split one override into its path and value.

    Raises: ConfigError if there is no '=', the key is no dotted key, or the text is not Unicode.
    """
    key, equals, value = text.partition("=")
    if not equals or any("\ud800" <= character <= "\udfff" for character in text):
        raise _malformed(text)
    path = _parse_key(key.strip())
    if path is None:
        raise _malformed(text)
    given = value.strip()
    return _as_task(path), NULL_WORD if given == _OTHER_NULL_WORD else _parse_value(given)


def _parse_key(key: str) -> KeyPath | None:
    if "\n" in key or "\r" in key:
        return None
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return None
    path: KeyPath = ()
    while isinstance(node, dict):
        if len(node) != 1:
            return None
        ((part, node),) = node.items()
        path = (*path, part)
    return path


def _parse_value(value: str) -> Any:
    try:
        values = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return value
    # A value with a line break could smuggle in further keys; it is a text then. No setting is a
    # date, so that what looks like one is a text too.
    if list(values) != ["value"] or isinstance(values["value"], dt.date | dt.time):
        return value
    return values["value"]


def _malformed(text: str) -> ConfigError:
    return ConfigError(
        f"override {show_text(text)} is not understood",
        allowed="key=value with a dotted key, for example train.steps=10",
        next_step="correct it; `strop explain train` lists the settings of a section",
    )


# Paths become absolute when a run file is read, because workers start in other folders. Whether one exists is
# not asked here: a run file is valid on a machine that does not have its data yet.


def _is_marked_path(text: str) -> bool:
    return text.startswith(("/", "~", "."))


def _is_model_path(text: str) -> bool:
    # org/name is a hub's, unless a folder of that name is here: jobs start in other folders.
    return _is_marked_path(text) or ("://" not in text and os.path.isdir(text))


def _is_any_text(text: str) -> bool:
    return True


def _is_no_address(text: str) -> bool:
    return "://" not in text


_PART_DEPTH = 4
"""Keys down to a setting of a mixture's part: task.parts.LABEL.source."""
PATH_SETTINGS: Mapping[KeyPath, Callable[..., bool]] = {
    ("model", "uri"): _is_model_path,
    ("reference", "model"): _is_model_path,
    ("teacher", "model"): _is_model_path,
    ("algorithm", "name"): is_code,
    ("task", "name"): is_code,
    ("task", "source"): is_data_path,
    ("task", "reward"): is_code,
    ("task", "judge_model"): _is_model_path,
    ("task", "order_file"): _is_no_address,
    ("task", "salt_file"): _is_any_text,
    ("task", "rubric"): lambda text: (
        _is_marked_path(text) or (text.lower().endswith((".txt", ".md")) and "://" not in text)
    ),
    ("sft", "source"): _is_no_address,
    ("dpo", "source"): _is_no_address,
    ("output", "root"): _is_any_text,
    ("output", "dir"): _is_any_text,
    ("store", "uri"): _is_marked_path,
    ("harness", "include"): _is_no_address,
}
"""Setting, and whether a text of it is a path (or else the id of something remote)."""


def absolute_path(path: KeyPath, text: str, folder: str, origin: str) -> str:
    """Return a setting's text, made absolute against `folder` if it is a path.

    An empty text is left to the model's own check.
    Raises: ConfigError if a path holds control characters.
    """
    path = ("task", path[-1]) if path[:2] == ("task", "parts") and len(path) == _PART_DEPTH else path
    is_path = PATH_SETTINGS.get(path)
    if (
        not text
        or is_path is None
        or not (is_path(text) or (is_path is is_data_path and is_path(text, folder)))
    ):
        return text
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ConfigError(
            f"{dotted(path)}={show_text(text)} ({origin}) holds a control character",
            allowed="a path of printable characters",
            next_step="correct the path",
        )
    if is_path is _is_model_path and not _is_marked_path(text):
        # As a model's name is looked up: from where the command is given.
        folder = os.getcwd()
    return os.path.abspath(os.path.join(folder, os.path.expanduser(text)))
