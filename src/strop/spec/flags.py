"""Flags of the launcher: the strongest source of the settings that a launcher owns, and what they beat.

The order for every setting: default, file, override, flag. A flag that was not given owns nothing. The GPUs
of a job are one group: once a flag gives one of them, all come from flags and defaults, never a mixture.
A value that lost against another one is reported, because a launcher that dropped it silently would start
another run than the one that was asked for. Equal values are no conflict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.spec.base import DEFAULT
from strop.spec.display import KeyPath, dotted, show_value
from strop.spec.job import GPU_SPLIT
from strop.spec.schema import find_settings
from strop.spec.sources import Leaf, Leaves

OWNED_SECTIONS = ("job", "output")
"""The sections whose settings flags may give."""
_GROUP: tuple[KeyPath, ...] = tuple(("job", name) for name in GPU_SPLIT)
_SPLIT: tuple[KeyPath, ...] = (("job", "train_gpus"), ("job", "infer_gpus"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A setting that an option of the command line gives."""

    key: str
    """Dotted, for example `job.train_gpus`."""
    value: Any
    name: str
    """How it was typed: `--train-gpus`."""

    @property
    def path(self) -> KeyPath:
        """The key's parts."""
        return tuple(self.key.split("."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """A value that a launcher uses, and the ones that it does not."""

    key: str
    value: Any
    source: str
    ignored: tuple[tuple[Any, str], ...]
    """Value and source of each."""
    has_flag: bool
    """Whether a flag won: then `--strict` refuses."""

    def __str__(self) -> str:
        """Say it in one line."""
        losers = " and ".join(f"{show_value(value)} ({source})" for value, source in self.ignored)
        return f"conflict: {self.key}: using {show_value(self.value)} ({self.source}), ignoring {losers}"


def apply_flags(sources: Sequence[Leaves], flags: Sequence[Flag]) -> tuple[list[Leaves], list[Conflict]]:
    """Add flags as the strongest source; return all sources and what lost.

    `sources`: those of files, weakest first, and the overrides as the last one.
    """
    *files, overrides = sources
    given = {flag.path: Leaf(path=flag.path, value=flag.value, origin=flag.name) for flag in flags}
    completed = given | _complete_group(given)
    in_files: Leaves = {path: leaf for source in files for path, leaf in source.items()}
    owned = sorted(
        {path for source in (in_files, overrides, completed) for path in source if _is_owned(path)}
    )
    has_split = any(path in given for path in _SPLIT)
    layers = (in_files, overrides, completed)
    conflicts = [
        conflict for path in owned if (conflict := _find_conflict(path, layers, has_split=has_split))
    ]
    return [*sources, completed], conflicts


def _complete_group(given: Leaves) -> Leaves:
    """Return defaults for the rest of the GPU group, where a flag gives a part of it."""
    named = [given[path].origin for path in _GROUP if path in given]
    if not named:
        return {}
    origin = f"{DEFAULT} beside {', '.join(named)}"
    return {
        path: Leaf(path=path, value=find_settings(path)[0].info.default, origin=origin)
        for path in _GROUP
        if path not in given
    }


def _is_owned(path: KeyPath) -> bool:
    return path[0] in OWNED_SECTIONS


def _find_conflict(path: KeyPath, layers: Sequence[Leaves], *, has_split: bool) -> Conflict | None:
    found = [layer[path] for layer in layers if path in layer]
    winner = found[-1]
    # Where a flag gives one half of the split, a half that nobody gives is one GPU.
    value = 1 if has_split and path in _SPLIT and winner.value is None else winner.value
    ignored = tuple((leaf.value, leaf.origin) for leaf in reversed(found[:-1]) if leaf.value != value)
    if not ignored:
        return None
    return Conflict(
        key=dotted(path),
        value=value,
        source=winner.origin,
        ignored=ignored,
        has_flag=path in layers[-1],
    )
