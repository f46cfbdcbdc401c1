"""Write a run file from a configuration of PRIME-RL, with a notice for each key that has no setting.

The input is one file for the whole run (`rl.toml`, `sft.toml`), or one each for trainer, orchestrator and
inference; files that they extend by `toml_files`; and settings that win over them. `keys` has the meaning of
each key. Defaults of PRIME-RL that differ from strop's are written out. The run file is written only if it
loads. Nothing is guessed: an environment without a task of strop's is refused unless the user names a task.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, split_error
from strop.io.atomic import write_bytes_atomically
from strop.io.leftovers import partial_path_of
from strop.run.prime_rl.keys import NEEDS_NO_EQUIVALENT, REASONS, RULES
from strop.run.prime_rl.translation import Entry, Translation, take_settings
from strop.spec import load_spec
from strop.spec.display import KeyPath, dotted, format_value
from strop.spec.sources import OVERRIDE
from strop.spec.tree import Tree, read_tree
from strop.tasks import build_task

ROLES = ("trainer", "orchestrator", "inference")
"""Roles that may have a configuration file each."""
_STEMS = frozenset({"rl", "sft", "train", "trainer", "orch", "orchestrator", "infer", "inference", "config"})
_MAX_NAME = 40
_EXTENDS = "toml_files"
_SECTIONS = ("model", "task", "sampling", "algorithm", "lora", "optimizer", "train", "sft", "eval", "engine")
_LAST_SECTIONS = ("placement", "teacher", "output", "store", "job")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest:
    """The files to import, and the settings of the command line."""

    config: Path | None
    roles: Mapping[str, Path] = field(default_factory=dict)
    """Files of one role each, by its name."""
    words: Sequence[str] = ()
    """Settings `key=value` that win over the configuration; `task.name` replaces its environments."""
    out: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """The run file, and notices about what of the configuration is not in it."""

    path: Path
    notices: tuple[str, ...]


def import_prime_rl(request: ImportRequest) -> Imported:
    """Write the run file of a configuration.

    Raises: ConfigError if a file cannot be read, no task is known, or the run file exists or would not load.
    """
    files = {"": request.config} if request.config is not None else {}
    leaves = [
        leaf
        for role, path in {**files, **request.roles}.items()
        for tree in _read_chain(path, ())
        for leaf in _flatten(tree, tree.values, (), role)
    ]
    if not leaves:
        raise ConfigError(
            "there is nothing to import",
            allowed="CONFIG.toml, or trainer=FILE, orchestrator=FILE and inference=FILE",
            next_step="name a configuration of PRIME-RL",
        )
    first = request.config or next(iter(request.roles.values()))
    out = request.out or first.with_name(f"{first.stem}-strop.toml")
    if out.exists():
        raise ConfigError(f"{out} exists already", allowed="a new file", next_step="name one with --out")
    translation = Translation(folder=out.absolute().parent)
    for leaf in leaves:
        _translate(leaf, translation)
    fixed = take_settings(translation, request.words)
    translation.finish()
    for key, value in fixed.items():
        translation.set(key, value, OVERRIDE)
    stem = first.stem if first.stem not in _STEMS else f"{first.absolute().parent.name}-{first.stem}"
    wanted, origin = next(iter(translation.names), (stem, "name of the file"))
    name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:_MAX_NAME].rstrip("-") or "imported"
    translation.settings.setdefault("name", (name, origin))
    _write_checked(translation, out, first)
    return Imported(path=out, notices=tuple(dict.fromkeys(translation.notices)))


def _read_chain(path: Path, seen: tuple[str, ...]) -> Iterator[Tree]:
    """Yield the files that a file extends, then the file, which wins."""
    identity = os.path.realpath(path)
    if identity in seen:
        raise ConfigError(f"{path} extends itself", allowed="files that end", next_step=f"correct {_EXTENDS}")
    tree = read_tree(str(path))
    for name in tree.values.get(_EXTENDS, ()):
        yield from _read_chain(path.parent / str(name), (*seen, identity))
    yield tree


def _flatten(tree: Tree, values: Mapping[str, Any], prefix: KeyPath, role: str) -> Iterator[Entry]:
    """Yield the leaves of a file, which include empty tables and lists of tables."""
    for key, value in values.items():
        path = (*prefix, key)
        if path == (_EXTENDS,):
            continue
        if isinstance(value, dict) and value and path[-1] not in ("args", "kwargs", "extra_body"):
            yield from _flatten(tree, value, path, role)
            continue
        name = ".".join(part.replace("-", "_") for part in path)
        # In the file of a role, keys have no prefix.
        full = name if not role or name.startswith(f"{role}.") else f"{role}.{name}"
        place = os.path.basename(tree.origin(path))
        yield Entry(key=full, value=value, origin=f"{dotted(path)}, {place}")


def _translate(entry: Entry, translation: Translation) -> None:
    for pattern, rule in RULES.items():
        if re.fullmatch(pattern, entry.key):
            rule(entry, translation)
            return
    if any(re.fullmatch(pattern, entry.key) for pattern in NEEDS_NO_EQUIVALENT) and not entry.value:
        return
    reason = next((why for pattern, why in REASONS.items() if re.fullmatch(pattern, entry.key)), None)
    translation.note(entry, reason or "strop has no such setting")


def _write_checked(translation: Translation, out: Path, source: Path) -> None:
    """Write the run file if it loads; a reply limit above the task's maximum is left out, with a notice.

    Raises: ConfigError as `load_spec`.
    """
    # In the same folder, to which its paths are relative, and with the suffix of a run file.
    trial_path = partial_path_of(out).with_suffix(".toml")
    try:
        trial_path.write_text(_render(translation, source), "utf-8")
        section = load_spec(trial_path).spec.task
        if _REPLY_LIMIT in translation.settings:
            try:
                build_task(section)
            except ConfigError as error:
                wanted, origin = translation.settings.pop(_REPLY_LIMIT)
                shown = f"{_REPLY_LIMIT} = {wanted} ({origin})"
                translation.notices.append(f"{shown} is left out: {split_error(str(error))[1]}")
        trial_path.write_text(_render(translation, source), "utf-8")
        load_spec(trial_path)
    finally:
        trial_path.unlink(missing_ok=True)
    write_bytes_atomically(out, _render(translation, source).encode())


_REPLY_LIMIT = "task.max_reply_tokens"


def _render(translation: Translation, source: Path) -> str:
    """Return the text of the run file; each line names the key that it comes from."""
    settings = translation.settings
    lines = [f"# Imported from {source.name} of PRIME-RL. Each line names the key that it comes from."]
    lines += [_line(key, *settings[key]) for key in ("name", "seed") if key in settings]
    for section in (*_SECTIONS, *_LAST_SECTIONS):
        tables: dict[str, list[str]] = {}
        for key, (value, origin) in settings.items():
            if key.partition(".")[0] == section:
                table, _, name = key.rpartition(".")
                tables.setdefault(table, []).append(_line(name, value, origin))
        for table in sorted(tables):
            lines += ["", f"[{table}]", *tables[table]]
    if translation.notices:
        lines += [
            "",
            "# Not in this file:",
            *(f"# {notice}" for notice in dict.fromkeys(translation.notices)),
        ]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any, origin: str) -> str:
    return f"{name} = {format_value(value)}  # {origin}"
