"""How keys, values and places are shown in messages, comments and explanations.

Nothing that passes through here breaks a line, moves a cursor or shows a credential.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_SHOWN_CHARS = 60
"""Characters of a value that a message shows."""
MAX_DIFFERENCES = 8
"""Differing values that a message shows."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MAX_SHOWN_BITS = 256
KeyPath = tuple[str, ...]
NULL_WORD = "none"
"""Stands for 'no value' in TOML and overrides, which have no null."""


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
        return quote_text(NULL_WORD)
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


def list_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the values in which two trees differ: 'optimizer.lr=0.001 there and 1e-05 here; ...'."""
    there, here = dict(walk_values(before)), dict(walk_values(now))
    paths = [path for path in there | here if there.get(path) != here.get(path)]
    shown = [
        f"{dotted(path)}={_show(there.get(path))} there and {_show(here.get(path))} here" for path in paths
    ]
    more = len(shown) - MAX_DIFFERENCES
    return "; ".join(shown[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _show(value: Any) -> str:
    """As `show_value`, with the members of a list."""
    return f"[{', '.join(map(_show, value))}]" if isinstance(value, list | tuple) else show_value(value)


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


# Texts that look like credentials: the forms that are pasted into run files of this field, not all secrets.
# A credential belongs into the environment or a protected file, where a run finds it by name.
_FORMS = {
    "a model hub token": r"\bhf_[A-Za-z0-9]{16,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{30,}",
    "a Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a signed web token": r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a password in an address": r"://[^/\s:@]+:[^/\s@]+@",
}
# One pattern, compiled once: the reader asks about every text of a file.
_ANY = re.compile("|".join(f"(?P<f{index}>{form})" for index, form in enumerate(_FORMS.values())))
_NAMES = re.compile(
    r"(?:^|[_-])(?:api_?key|access_?key|secret|secret_?key|password|passwd|auth_?token)$", re.IGNORECASE
)


def credential_form(text: str) -> str | None:
    """Return what kind of credential a text looks like, or None if it looks like none."""
    match = _ANY.search(text)
    if match is None or match.lastgroup is None:
        return None
    return list(_FORMS)[int(match.lastgroup[1:])]


def is_credential_name(name: str) -> bool:
    """Whether a key by its name holds a credential, for example 'api_key'."""
    return _NAMES.search(name) is not None
