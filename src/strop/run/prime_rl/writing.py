"""A run file from the configuration of PRIME-RL: what is understood, and a notice for each key that is not.

Read are one file for the whole run (`rl.toml`, `sft.toml`), those of the trainer, the orchestrator and the
inference apart, what they extend by `toml_files`, and settings that win over them. What a key means is in
`keys`. Defaults of PRIME-RL that differ from strop's are written out. The run file is written
only if it loads; nothing is guessed: an environment without a task of strop's is refused unless one is named.
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
from strop.run.prime_rl.translation import Given, Translation, take_settings
from strop.spec import load_spec
from strop.spec.display import KeyPath, dotted, format_value
from strop.spec.sources import OVERRIDE
from strop.spec.tree import Tree, read_tree
from strop.tasks import build_task

ROLES = ("trainer", "orchestrator", "inference")
"""What may have a configuration of its own."""
_STEMS = frozenset({"rl", "sft", "train", "trainer", "orch", "orchestrator", "infer", "inference", "config"})
_MAX_NAME = 40
_EXTENDS = "toml_files"
_SECTIONS = ("model", "task", "sampling", "algorithm", "lora", "optimizer", "train", "sft", "eval", "engine")
_LAST_SECTIONS = ("placement", "teacher", "output", "store", "job")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest:
    """What is imported, and what the command line adds."""

    config: Path | None
    roles: Mapping[str, Path] = field(default_factory=dict)
    """Files of one role each, by its name."""
    words: Sequence[str] = ()
    """Settings that win over the configuration, `key=value`; `task.name` stands for its environments."""
    out: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """The run file, and what of the configuration is not in it."""

    path: Path
    notices: tuple[str, ...]


def import_prime_rl(request: ImportRequest) -> Imported:
    """Write the run file of a configuration.

    Raises: ConfigError if a file cannot be read, nothing says what is trained on, or the run file is there or
        would not load.
    """
    files = {"": request.config} if request.config is not None else {}
    given = [
        leaf
        for role, path in {**files, **request.roles}.items()
        for tree in _read_chain(path, ())
        for leaf in _flatten(tree, tree.values, (), role)
    ]
    if not given:
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
    for one in given:
        _translate(one, translation)
    fixed = take_settings(translation, request.words)
    translation.finish()
    for key, value in fixed.items():
        translation.set(key, value, OVERRIDE)
    stem = first.stem if first.stem not in _STEMS else f"{first.absolute().parent.name}-{first.stem}"
    named, origin = next(iter(translation.names), (stem, "name of the file"))
    name = re.sub(r"[^a-z0-9]+", "-", named.lower()).strip("-")[:_MAX_NAME].rstrip("-") or "imported"
    translation.settings.setdefault("name", (name, origin))
    _write_checked(translation, out, first)
    return Imported(path=out, notices=tuple(dict.fromkeys(translation.notices)))


def _read_chain(path: Path, seen: tuple[str, ...]) -> Iterator[Tree]:
    """Yield a file after those that it extends, so that it wins."""
    identity = os.path.realpath(path)
    if identity in seen:
        raise ConfigError(f"{path} extends itself", allowed="files that end", next_step=f"correct {_EXTENDS}")
    tree = read_tree(str(path))
    for name in tree.values.get(_EXTENDS, ()):
        yield from _read_chain(path.parent / str(name), (*seen, identity))
    yield tree


def _flatten(tree: Tree, values: Mapping[str, Any], prefix: KeyPath, role: str) -> Iterator[Given]:
    """Yield the leaves of a file; tables without a key are leaves too, as are lists of tables."""
    for key, value in values.items():
        path = (*prefix, key)
        if path == (_EXTENDS,):
            continue
        if isinstance(value, dict) and value and path[-1] not in ("args", "kwargs", "extra_body"):
            yield from _flatten(tree, value, path, role)
            continue
        name = ".".join(part.replace("-", "_") for part in path)
        # In a file of its own a role's keys have no prefix.
        full = name if not role or name.startswith(f"{role}.") else f"{role}.{name}"
        place = os.path.basename(tree.origin(path))
        yield Given(key=full, value=value, origin=f"{dotted(path)}, {place}")


def _translate(given: Given, translation: Translation) -> None:
    for pattern, rule in RULES.items():
        if re.fullmatch(pattern, given.key):
            rule(given, translation)
            return
    if any(re.fullmatch(pattern, given.key) for pattern in NEEDS_NO_EQUIVALENT) and not given.value:
        return
    reason = next((why for pattern, why in REASONS.items() if re.fullmatch(pattern, given.key)), None)
    translation.note(given, reason or "strop has no such setting")


def _write_checked(translation: Translation, out: Path, source: Path) -> None:
    """Write the run file if it loads; a reply limit above the task's own is left out, with a notice.

    Raises: ConfigError as `load_spec`.
    """
    # Beside its place, because relative paths start there; with the suffix that a run file has.
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
    """Return the text of the run file; each line says which key it comes from."""
    settings = translation.settings
    lines = [f"# Imported from {source.name} of PRIME-RL. Each line names the key that it comes from."]
    lines += [_line(key, *settings[key]) for key in ("name", "seed") if key in settings]
    for section in (*_SECTIONS, *_LAST_SECTIONS):
        plain = {key: found for key, found in settings.items() if key.partition(".")[0] == section}
        tables: dict[str, list[str]] = {}
        for key, (value, origin) in plain.items():
            table, _, name = key.rpartition(".")
            tables.setdefault(table, []).append(_line(name, value, origin))
        for table in sorted(tables):
            lines += ["", f"[{table}]", *tables[table]]
    if translation.notices:
        lines += ["", "# Not in this file:", *(f"# {one}" for one in dict.fromkeys(translation.notices))]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any, origin: str) -> str:
    return f"{name} = {format_value(value)}  # {origin}"
