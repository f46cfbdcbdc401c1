"""From the trees of files and the overrides to one value per setting, each with its origin.

Refuses, for each source alone: unknown keys, tables where values belong and the reverse, values
that no setting can have, credentials. Types are the models' business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.errors import ConfigError, explain_refusal
from strop.spec.credentials import credential_form, is_credential_name
from strop.spec.display import KeyPath, dotted, show_path, show_text, show_value
from strop.spec.free_values import MAX_DEPTH
from strop.spec.overrides import OVERRIDE, join_words, parse_override
from strop.spec.paths import absolute_path
from strop.spec.schema import (
    CONFIG_TABLE,
    EXTENDS,
    FREE_TABLES,
    NULL_WORD,
    PARTS_TABLE,
    find_settings,
    free_table,
    near_keys,
    section_names,
    valid_names,
)
from strop.spec.tree import Tree, read_tree
from strop.user_code import find_task

SELECTORS: dict[KeyPath, KeyPath] = {("task", "name"): ("task",), ("task", "dataset"): CONFIG_TABLE}
"""A setting that picks what a table is about, and the table that starts anew with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One value that a source gives to one setting."""

    path: KeyPath
    value: Any
    origin: str
    """'run.toml:7' or 'override'."""


Leaves = dict[KeyPath, Leaf]


def read_sources(path: str | None, overrides: Sequence[str]) -> list[Leaves]:
    """Return what each source says, weakest first: extended files, the file, the overrides.

    `path` None: there is no file.

    Raises: ConfigError, with one line per mistake of the first source that has any.
    """
    trees = _read_chain(path) if path is not None else []
    found = [(_leaves_of(tree), tree.folder) for tree in reversed(trees)]
    found.append((_read_overrides(overrides), os.getcwd()))
    # Which settings a class of the user's takes is its own business.
    is_open = any(_names_code(leaf) for leaves, _ in found for leaf in leaves)
    sources = [_finish(leaves, folder, is_open=is_open) for leaves, folder in found]
    _refuse_contradictions(found[-1][0])
    return sources


def _names_code(leaf: Leaf) -> bool:
    is_name = leaf.path == ("task", "name") and isinstance(leaf.value, str)
    return is_name and find_task(leaf.value) is not None


def _read_chain(path: str) -> list[Tree]:
    """Return a file's tree and those of the files it extends, nearest first."""
    trees: list[Tree] = []
    seen: list[str] = []
    next_path: str | None = path
    while next_path is not None:
        identity = os.path.realpath(next_path) if "\0" not in next_path else next_path
        if identity in seen:
            origin = trees[-1].origin((EXTENDS,))
            raise ConfigError(
                explain_refusal(
                    f"extends={show_text(trees[-1].values[EXTENDS])} ({origin}) leads back to a file"
                    f" that was read already: {' -> '.join(tree.shown for tree in trees)}",
                    allowed="a chain of files that ends",
                    next_step="remove one of the extends",
                )
            )
        seen.append(identity)
        trees.append(read_tree(next_path))
        next_path = _extended_path(next_path, trees[-1])
    return trees


def _extended_path(path: str, tree: Tree) -> str | None:
    if EXTENDS not in tree.values:
        return None
    given, origin = tree.values[EXTENDS], tree.origin((EXTENDS,))
    if not isinstance(given, str) or not given or not given.isprintable():
        raise ConfigError(
            explain_refusal(
                f"{EXTENDS}={show_value(given)} ({origin}) is not the name of a file",
                allowed="one run file, relative to the file that names it",
                next_step='write it like extends = "base.toml"',
            )
        )
    extended = os.path.normpath(os.path.join(os.path.dirname(path), os.path.expanduser(given)))
    if not os.path.exists(extended):
        raise ConfigError(
            explain_refusal(
                f"{EXTENDS}={show_text(given)} ({origin}) does not exist: looked for {show_path(extended)}",
                allowed="an existing run file, relative to the file that names it",
                next_step="correct the name",
            )
        )
    return extended


def _leaves_of(tree: Tree) -> list[Leaf]:
    given = {key: value for key, value in tree.values.items() if key != EXTENDS}
    return [Leaf(path=path, value=value, origin=tree.origin(path)) for path, value in _flatten(given, ())]


def _read_overrides(overrides: Sequence[str]) -> list[Leaf]:
    found: list[Leaf] = []
    for text in join_words(overrides):
        path, value = parse_override(text)
        tree: dict[str, Any] = {path[-1]: value}
        for part in reversed(path[:-1]):
            tree = {part: tree}
        found += [Leaf(path=inner, value=item, origin=OVERRIDE) for inner, item in _flatten(tree, ())]
    return found


def _refuse_contradictions(found: list[Leaf]) -> None:
    """The same setting twice is fine only with one value."""
    winners: Leaves = {}
    for leaf in found:
        earlier = winners.setdefault(leaf.path, leaf)
        if not _is_same(earlier.value, leaf.value):
            key = dotted(leaf.path)
            raise ConfigError(
                explain_refusal(
                    f"override {key}={show_value(earlier.value)} and override {key}={show_value(leaf.value)}"
                    " contradict each other",
                    allowed="one value per setting",
                    next_step="remove one of the two",
                )
            )


def is_table(path: KeyPath) -> bool:
    """Whether a path is a table that the reader looks into."""
    is_part = len(path) == len(PARTS_TABLE) + 1 and free_table(path) == PARTS_TABLE
    return is_part or path in FREE_TABLES or (len(path) == 1 and path[0] in section_names())


def is_part_setting(path: KeyPath) -> bool:
    """Whether a path is a setting of a part: task.parts.LABEL.source."""
    return len(path) == len(PARTS_TABLE) + 2 and free_table(path) == PARTS_TABLE


def _flatten(values: dict[str, Any], prefix: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of a tree. An empty known table says nothing and yields nothing."""
    for key, value in values.items():
        path = (*prefix, key)
        if isinstance(value, dict) and is_table(path):
            yield from _flatten(value, path)
        else:
            yield path, value


def _finish(found: list[Leaf], folder: str, *, is_open: bool) -> Leaves:
    """Refuse what no setting takes; turn the word none into None and relative paths absolute.

    `is_open`: the table `task` may have settings of the user's own.
    """
    problems = [problem for leaf in found if (problem := _problem(leaf, is_open=is_open)) is not None]
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


def _problem(leaf: Leaf, *, is_open: bool) -> str | None:
    """Return why no setting takes this leaf, or None."""
    if _is_too_deep(leaf.value):
        return explain_refusal(
            f"a value is nested more than {MAX_DEPTH} deep ({leaf.origin})",
            allowed=f"tables and lists of depth {MAX_DEPTH} at most",
            next_step="flatten the value",
        )
    credential = _credential(leaf.path, leaf.value)
    if credential is not None:
        # Neither key nor value is shown: either may be the secret.
        return explain_refusal(
            f"{leaf.origin} holds {credential}",
            allowed="no credentials in a run file, because it is copied into every run's records",
            next_step="remove it, withdraw it if the file was shared, and set it in the environment",
        )
    if is_table(leaf.path):
        return explain_refusal(
            f"{_shown(leaf)} is no table",
            allowed="a table of settings" + _names_text(leaf.path),
            next_step=f"write [{dotted(leaf.path)}] with its settings below",
        )
    is_users = is_open and leaf.path[0] == "task" and len(leaf.path) == 2
    if free_table(leaf.path) is None and not find_settings(leaf.path) and not is_users:
        return _unknown_key(leaf)
    return None


def _shown(leaf: Leaf) -> str:
    return f"{dotted(leaf.path)}={show_value(leaf.value)} ({leaf.origin})"


def _names_text(path: KeyPath) -> str:
    return "" if path[:2] in FREE_TABLES else ": " + ", ".join(valid_names((*path, "")))


def _unknown_key(leaf: Leaf) -> str:
    key = dotted(leaf.path)
    if leaf.path == (EXTENDS,):
        return explain_refusal(
            f"{_shown(leaf)} came too late",
            allowed=f"{EXTENDS} inside a run file only",
            next_step="write it into the file",
        )
    near = near_keys(leaf.path)
    place = f" in {leaf.path[0]}" if len(leaf.path) > 1 and leaf.path[0] in section_names() else ""
    return explain_refusal(
        f"unknown key {show_path(key)} ({leaf.origin})",
        allowed=", ".join(valid_names(leaf.path)) + place,
        next_step=f"did you mean {' or '.join(near)}?" if near else "remove it",
    )


def _credential(path: KeyPath, value: Any) -> str | None:
    """Return which kind of credential a leaf holds, in its key or anywhere in its value."""
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
