"""Names of user code in run files: `FILE.py:NAME`, or what an installed package announces."""

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
"""In a job: `FROM:TO`, the project's folder where it was submitted and where its snapshot lies here."""
TASKS_GROUP = "strop.tasks"
ALGORITHMS_GROUP = "strop.algorithms"


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRef:
    """A class or a function of the user's."""

    place: str
    """An absolute path of a file, or the dotted name of a module of an installed package."""
    name: str

    @classmethod
    def parse(cls, text: str) -> CodeRef:
        """Read `FILE.py:NAME`.

        Raises: ConfigError if it has another form.
        """
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
        """Whether it is in a file of its own, rather than in an installed package."""
        return self.place.endswith(".py")

    @property
    def path(self) -> Path:
        """Where the file is on this machine."""
        return find_moved(Path(self.place))

    @property
    def is_here(self) -> bool:
        """Whether it can be looked at on this machine."""
        return not self.is_file or self.path.is_file()

    def __str__(self) -> str:
        """Return it as messages name it: the file without its folders."""
        return f"{os.path.basename(self.place)}:{self.name}"


def find_moved(path: Path) -> Path:
    """Return where a file of the project is: in a job, in the copy that was submitted, if it is there."""
    came_from, _, moved_to = os.environ.get(MOVED_VARIABLE, "").partition(":")
    if not came_from or not path.is_relative_to(came_from):
        return path
    moved = Path(moved_to) / path.relative_to(came_from)
    return moved if moved.exists() else path


def is_code(text: str) -> bool:
    """Whether a text of a run file names code in a file."""
    return _IN_FILE.fullmatch(text) is not None


@cache
def announced(group: str) -> Mapping[str, CodeRef]:
    """Return what the installed packages announce in an entry point group, by name.

    Raises: ConfigError if two of them announce the same name.
    """
    found: dict[str, CodeRef] = {}
    for point in entry_points(group=group):
        ref = CodeRef(place=point.module, name=point.attr)
        other = found.setdefault(point.name, ref)
        if other != ref:
            raise ConfigError(
                f"two installed packages announce {point.name!r} in {group}: {other.place}:{other.name}"
                f" and {ref.place}:{ref.name}",
                allowed="one package for each name",
                next_step="uninstall one of them, or name the class by its file",
            )
    return found


def find_task(name: str) -> CodeRef | None:
    """Return the code of a task of the user's or of an installed package; None for another name.

    Raises: ConfigError like `announced`.
    """
    return CodeRef.parse(name) if is_code(name) else announced(TASKS_GROUP).get(name)


def find_algorithm(name: str) -> CodeRef | None:
    """Return the code of an algorithm of the user's or of an installed package; None for another name.

    Raises: ConfigError like `announced`.
    """
    return CodeRef.parse(name) if is_code(name) else announced(ALGORITHMS_GROUP).get(name)
