"""Names of user code in run files: `FILE.py:NAME`, or an entry point of an installed package."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from strop.errors import ConfigError

_IN_FILE = re.compile(r"(?P<place>.+\.py):(?P<name>[A-Za-z_]\w*)")
MOVED_VARIABLE = "STROP_MOVED_CODE"
"""`FROM:TO` in a job: the project's folder at submission, and its snapshot on this machine."""
TASKS_GROUP = "strop.tasks"
ALGORITHMS_GROUP = "strop.algorithms"


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRef:
    """A reference to a user's class or function."""

    place: str
    """The absolute path of a file, or the dotted name of a module in an installed package."""
    name: str

    @classmethod
    def parse(cls, text: str) -> CodeRef:
        """Parse `FILE.py:NAME`. Raises: ConfigError for another format."""
        match = _IN_FILE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{text!r} names no code",
                allowed="FILE.py:NAME, for example reward.py:score",
                next_step="write the file, a colon, and the name of a class or function in it",
            )
        return cls(place=os.path.abspath(os.path.expanduser(match["place"])), name=match["name"])

    @property
    def is_file(self) -> bool:
        """Whether it is in a single file, not in an installed package."""
        return self.place.endswith(".py")

    @property
    def path(self) -> Path:
        """The file's path on this machine."""
        return find_moved(Path(self.place))

    @property
    def is_here(self) -> bool:
        """Whether it can be inspected on this machine."""
        return not self.is_file or self.path.is_file()

    def __str__(self) -> str:
        """Format it for messages: the file without its folders."""
        return f"{os.path.basename(self.place)}:{self.name}"


def find_moved(path: Path) -> Path:
    """Return the path of a project's file: in a job that in the submitted snapshot, if it exists there."""
    came_from, _, moved_to = os.environ.get(MOVED_VARIABLE, "").partition(":")
    if not came_from or not path.is_relative_to(came_from):
        return path
    moved = Path(moved_to) / path.relative_to(came_from)
    return moved if moved.exists() else path


def is_code(text: str) -> bool:
    """Whether a text in a run file names code in a file."""
    return _IN_FILE.fullmatch(text) is not None


@cache
def announced(group: str) -> Mapping[str, CodeRef]:
    """Return the entry points of the installed packages in a group, by name.

    Raises: ConfigError if two packages have the same name.
    """
    refs: dict[str, CodeRef] = {}
    for point in entry_points(group=group):
        ref = CodeRef(place=point.module, name=point.attr)
        other = refs.setdefault(point.name, ref)
        if other != ref:
            raise ConfigError(
                f"two installed packages announce {point.name!r} in {group}: {other.place}:{other.name}"
                f" and {ref.place}:{ref.name}",
                allowed="one package for each name",
                next_step="uninstall one of them, or name the class by its file",
            )
    return refs


def find_task(name: str) -> CodeRef | None:
    """Return the code of a task in a user's file or an installed package; None for another name.

    Raises: ConfigError like `announced`.
    """
    return CodeRef.parse(name) if is_code(name) else announced(TASKS_GROUP).get(name)


def find_algorithm(name: str) -> CodeRef | None:
    """Return the code of an algorithm in a user's file or an installed package; None for another name.

    Raises: ConfigError like `announced`.
    """
    return CodeRef.parse(name) if is_code(name) else announced(ALGORITHMS_GROUP).get(name)
