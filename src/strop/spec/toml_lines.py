"""On which line of a TOML file each key stands. Python's own reader does not tell.

Only for texts that the standard library has accepted: nothing is validated here, so a value is
skipped by its brackets and quotes alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from strop.spec.display import KeyPath

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
    """Return the line (from 1) of every key and table header; the first one if there are several.

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
        """Read a dotted key, note its line, and stop behind the space that follows it."""
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
        """Skip a list or an inline table, noting the lines of the table's keys."""
        self.position += 1
        self._skip(_BLANK)
        while self._peek() != closing:
            assert self.position < len(self.text), "the standard library accepted an open bracket"
            if closing == "}":
                inside = self._member_key(path)
                self.position += 1  # the '='
                self._value(inside)
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

    def _member_key(self, path: KeyPath | None) -> KeyPath | None:
        if path is not None:
            return self._key(path)
        noted = dict(self.lines)
        self._key(())
        self.lines = noted
        return None


def _unquote(part: str) -> str:
    if part[0] == "'":
        return part[1:-1]
    if part[0] != '"':
        return part
    return _ESCAPE.sub(_unescape, part[1:-1])


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    return chr(int(code[1:], 16)) if code[0] in "uU" else _ESCAPES[code]
