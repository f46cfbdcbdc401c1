r"""`.env` files, read as data: nothing in them is ever run or expanded.

Covered: `NAME=value`, a leading `export`, comments, single quotes (all literal), double quotes (with \n, \t,
\r, \\, \", \$ and \`), quoted values over several lines, CRLF, a byte order mark. The last value of a
repeated name counts, as in a shell.
Refused, because shells and the usual `.env` readers disagree on them: a variable or command outside single
quotes (`$HOME`, `$(date)`), and quotes or backslashes inside an unquoted value. Messages name the line and
the variable, never the value: it may be a secret.
"""

from __future__ import annotations

import re

from strop.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_START = re.compile(r"[ \t]*(?:export[ \t]+)?(?P<name>[^=\n]*?)[ \t]*=[ \t]*")
_REST = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_EXPANSION = re.compile(r"\$[A-Za-z_{(]|`")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "$": "$", "`": "`"}


def is_variable_name(name: str) -> bool:
    """Whether a shell accepts this as the name of a variable."""
    return _NAME.match(name) is not None


def parse_dotenv(text: str, *, source: str = ".env") -> dict[str, str]:
    """Return the variables of a `.env` file in the order of their last assignments.

    `source` names the file in messages.

    Raises: ConfigError naming the line if it is ambiguous.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    variables: dict[str, str] = {}
    position = 0
    while position < len(text):
        blank = _REST.match(text, position)
        if blank is not None:
            position = blank.end()
            continue
        line = text.count("\n", 0, position) + 1
        start = _START.match(text, position)
        if start is None or not is_variable_name(start["name"]):
            raise _refuse(f"{source} line {line} is no assignment", "NAME=value, # comment, or nothing")
        name = start["name"]
        value, position = _read_value(text, start.end(), f"{source} line {line}: {name}")
        variables.pop(name, None)
        variables[name] = value
    return variables


def _read_value(text: str, position: int, place: str) -> tuple[str, int]:
    quote = text[position : position + 1]
    if quote == "'":
        end = text.find("'", position + 1)
        if end < 0:
            raise _refuse(f"{place} has a quote that nothing closes", "a closing '")
        return _close(text, end + 1, text[position + 1 : end], place)
    if quote != '"':
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        value = re.split(r"(?:^|[ \t])#", text[position:end], maxsplit=1)[0].strip()
        if _EXPANSION.search(value) or any(mark in value for mark in "\"'\\\0"):
            raise _refuse(
                f"{place} has $, a quote or a backslash in a value without quotes",
                "such a value in single quotes, where every character stands for itself",
            )
        return value, end + 1
    parts: list[str] = []
    position += 1
    while position < len(text):
        character = text[position]
        if character == '"':
            return _close(text, position + 1, "".join(parts), place)
        if _EXPANSION.match(text, position):
            raise _refuse(
                f"{place} has a variable or a command in double quotes, and nothing is expanded here",
                "\\$ for the sign itself, or single quotes",
            )
        if character == "\\":
            following = text[position + 1 : position + 2]
            parts.append(_ESCAPES.get(following, "\\" + following))
            position += 2
        else:
            parts.append(character)
            position += 1
    raise _refuse(f"{place} has a quote that nothing closes", 'a closing "')


def _close(text: str, position: int, value: str, place: str) -> tuple[str, int]:
    rest = _REST.match(text, position)
    if rest is None:
        raise _refuse(
            f"{place} goes on behind its closing quote", "one quoted value, then a comment or nothing"
        )
    if "\0" in value:
        raise _refuse(f"{place} has a NUL character", "any other character")
    return value, rest.end()


def _refuse(problem: str, allowed: str) -> ConfigError:
    return ConfigError(problem, allowed=allowed, next_step="change that line of the file")
