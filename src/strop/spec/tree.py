"""One TOML file as a tree of values, with the line of every key. Knows no settings."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.spec.display import KeyPath, show_path

MAX_FILE_BYTES = 256 * 1024
"""A run file is written by a person; anything larger is another kind of file."""
SUFFIX = ".toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """The content of a file."""

    shown: str
    """The file as messages name it."""
    folder: str
    """Absolute folder that its relative paths start from."""
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """Return 'file:line' of a key, or of the nearest table above it that has a line."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.shown}:{self.lines[path[:length]]}"
        return self.shown


def read_tree(path: str) -> Tree:
    """Read one file.

    Raises: ConfigError if the file is missing, unreadable, too large, not UTF-8, or no valid TOML.
        Its `extends` is not followed here.
    """
    shown = show_path(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix != SUFFIX:
        raise ConfigError(
            f"run file {shown} has the suffix {suffix or '(none)'}",
            allowed=f"a TOML file, which ends in {SUFFIX}",
            next_step="write it as TOML"
            if suffix in (".yaml", ".yml")
            else "name the run file first, then key=value overrides",
        )
    text = _read_text(path, shown)
    folder = os.path.dirname(os.path.abspath(path))
    return Tree(shown=shown, folder=folder, values=_parse_toml(text, shown), lines=locate_keys(text))


def _read_text(path: str, shown: str) -> str:
    """Return the text of a file with plain line ends and no byte-order mark."""
    try:
        if os.path.isfile(path) and os.path.getsize(path) > MAX_FILE_BYTES:
            raise ConfigError(
                f"run file {shown} has {os.path.getsize(path)} bytes",
                allowed=f"at most {MAX_FILE_BYTES} bytes",
                next_step="name the run file, not its data",
            )
        data = Path(path).read_bytes() if not os.path.isdir(path) else None
    except FileNotFoundError as error:
        folder = os.path.dirname(path) or "."
        try:
            names = [name for name in os.listdir(folder) if name.lower().endswith(SUFFIX)]
        except OSError:
            names = []
        # Compared without the suffix, which is alike in all of them.
        stems = {os.path.splitext(name)[0]: name for name in sorted(names)}
        wanted = os.path.splitext(os.path.basename(path))[0]
        near = [stems[stem] for stem in difflib.get_close_matches(wanted, list(stems), n=3, cutoff=0.6)]
        hint = f"did you mean {', '.join(map(show_path, near))}?" if near else "check the path"
        raise ConfigError(
            f"run file {shown} does not exist", allowed="an existing file", next_step=hint
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"run file {shown} cannot be read ({reason})",
            allowed="a readable file",
            next_step="check the path and its permissions",
        ) from error
    if data is None:
        raise ConfigError(
            f"run file {shown} is a folder", allowed="a file", next_step="name a run file inside it"
        )
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"run file {shown} is not UTF-8 (line {line}, byte {error.start})",
            allowed="UTF-8 text",
            next_step="save the file as UTF-8",
        ) from error


def _parse_toml(text: str, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"^(.*) \(at line (\d+), column (\d+)\)$", str(error), re.DOTALL)
        line = int(match.group(2)) if match else text.count("\n") + 1
        reason = match.group(1) if match else str(error)
        if re.match("Cannot (overwrite|declare|mutate)|Duplicate", reason):
            reason = "a key or table is written twice"
        raise _unparsable(shown, reason, line) from error
    except (ValueError, RecursionError) as error:
        # The standard library lets two through: integers of thousands of digits, and deep nesting.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else "a number is too long"
        raise _unparsable(shown, reason, None) from error


def _unparsable(shown: str, reason: str, line: int | None) -> ConfigError:
    where = shown if line is None else f"{shown}:{line}"
    return ConfigError(
        f"run file {where} cannot be read as TOML: {show_path(reason)}",
        allowed="valid TOML in which every key is written once",
        next_step="correct that line" if line is not None else "correct the file",
    )


# The line of every key, which `tomllib` does not tell. Only for texts that it has accepted: nothing is
# validated here, and a value is skipped by its brackets and quotes alone.
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[^\s\[\]{},#=]+")
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")' + r"|'''.*?'{3,5}(?!')" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'",
    re.DOTALL,
)
_REST = re.compile(r"[^\n]*")
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}


def locate_keys(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key and table header; the first if there are several.

    Keys of inline tables are included, those inside lists are not.
    """
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.lines


class _Scanner:
    """One pass over a valid text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[KeyPath, int] = {}
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def scan(self) -> None:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self.position < len(self.text):
            if self._peek() == "[":
                self.position += 2 if self.text.startswith("[[", self.position) else 1
                table = self._key(())
                self._skip(_REST)
            else:
                path = self._key(table)
                self.position += 1  # the '='
                self._value(path)
                self._skip(_REST)
            self._skip(_BLANK)

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()

    def _key(self, prefix: KeyPath) -> KeyPath:
        """Read a dotted key, record its line, and stop after the following space."""
        path = prefix
        line = bisect_right(self._line_starts, self.position)
        while True:
            self._skip(_SPACE)
            match = _KEY_PART.match(self.text, self.position)
            assert match is not None, "the standard library accepted a key that this scanner does not know"
            self.position = match.end()
            path = (*path, _unquote(match.group()))
            self.lines.setdefault(path, line)
            self._skip(_SPACE)
            if self._peek() != ".":
                return path
            self.position += 1

    def _value(self, path: KeyPath | None) -> None:
        """Skip one value; `path` is None inside a list, where keys have no address."""
        self._skip(_SPACE)
        if self._peek() == "{":
            self._members("}", path)
        elif self._peek() == "[":
            self._members("]", None)
        elif self._peek() in {'"', "'"}:
            self._skip(_STRING)
        else:
            self._skip(_BARE)

    def _members(self, closing: str, path: KeyPath | None) -> None:
        """Skip a list or an inline table, recording the lines of the table's keys."""
        self.position += 1
        self._skip(_BLANK)
        while self._peek() != closing:
            assert self.position < len(self.text), "the standard library accepted an open bracket"
            if closing == "}":
                noted = dict(self.lines)
                inside = self._key(path or ())
                if path is None:
                    self.lines = noted
                self.position += 1  # the '='
                self._value(None if path is None else inside)
            else:
                self._value(None)
            self._skip(_BLANK)
            # A date and a time may be joined by a space; the second half is skipped like a value.
            if self._peek() not in {",", closing}:
                self._skip(_BARE)
                self._skip(_BLANK)
            if self._peek() == ",":
                self.position += 1
                self._skip(_BLANK)
        self.position += 1


def _unquote(part: str) -> str:
    if part[0] == "'":
        return part[1:-1]
    if part[0] != '"':
        return part

    def unescape(match: re.Match[str]) -> str:
        code = match.group(1)
        return chr(int(code[1:], 16)) if code[0] in "uU" else _ESCAPES[code]

    return _ESCAPE.sub(unescape, part[1:-1])
