"""How keys, values and places are written in messages, comments and explanations.

Nothing that passes through here breaks a line, moves a cursor or shows a credential.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from strop.spec.credentials import credential_form

MAX_SHOWN_CHARS = 60
"""Characters of a value that a message shows."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MAX_SHOWN_BITS = 256

KeyPath = tuple[str, ...]


def walk_values(values: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of a tree of values, each with the keys that lead to it."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from walk_values(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def dotted(path: KeyPath) -> str:
    """Return a key as a run file would write it: parts joined by dots, odd ones in quotes."""
    return ".".join(_quote_key(part) for part in path)


def _quote_key(part: str) -> str:
    return part if _BARE_KEY.fullmatch(part) else quote_text(part)


def quote_text(text: str) -> str:
    """Return a text as a TOML basic string. JSON's escapes are TOML's, except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_value(value: Any) -> str:
    """Return a value as TOML writes it; None becomes the word none in quotes.

    Raises: TypeError if the value has no form in TOML, which the models rule out.
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quote_text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        items = ", ".join(f"{_quote_key(key)} = {format_value(item)}" for key, item in value.items())
        return "{ " + items + " }" if items else "{}"
    raise TypeError(f"{type(value).__name__} has no form in TOML")


def show_value(value: Any) -> str:
    """Return a value for a message: one line, cut at 60 characters, without credentials."""
    if isinstance(value, str):
        return show_text(value)
    if value is None or isinstance(value, bool):
        # As a run file writes them: none, true, false.
        return str(value).lower()
    if isinstance(value, dict | list | tuple):
        return (
            f"a table of {len(value)} keys" if isinstance(value, dict) else f"a list of {len(value)} values"
        )
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def show_text(text: str) -> str:
    """Return a text for a message, in quotes."""
    if credential_form(text) is not None:
        return "'<redacted>'"
    shown = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
    return ascii(shown) if not shown.isprintable() else repr(shown)


def show_path(path: str) -> str:
    """Return a path for a message or a comment: as it is, unless it holds odd characters."""
    return path if path.isprintable() else ascii(path)
