"""`key=value` on the command line: the last word over every file.

The key is dotted; the value is read as a TOML value and, where it is none, taken as text.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from typing import Any

from strop.errors import ConfigError, explain_refusal
from strop.spec.display import KeyPath, show_text

OVERRIDE = "override"
"""Origin of a value that an override set."""


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """Split one override into its path and value.

    Raises: ConfigError if there is no '=', the key is no dotted key, or the text is not Unicode.
    """
    key, equals, value = text.partition("=")
    if not equals or any("\ud800" <= character <= "\udfff" for character in text):
        raise _malformed(text)
    path = _parse_key(key.strip())
    if path is None:
        raise _malformed(text)
    return path, _parse_value(value.strip())


def _parse_key(key: str) -> KeyPath | None:
    if "\n" in key or "\r" in key:
        return None
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return None
    path: KeyPath = ()
    while isinstance(node, dict):
        if len(node) != 1:
            return None
        ((part, node),) = node.items()
        path = (*path, part)
    return path


def _parse_value(value: str) -> Any:
    try:
        values = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return value
    # A value with a line break could smuggle in further keys; it is a text then. No setting is a
    # date, so that what looks like one is a text too.
    if list(values) != ["value"] or isinstance(values["value"], dt.date | dt.time):
        return value
    return values["value"]


def _malformed(text: str) -> ConfigError:
    return ConfigError(
        explain_refusal(
            f"override {show_text(text)} is not understood",
            allowed="key=value with a dotted key, for example train.steps=10",
            next_step="correct it; `strop explain train` lists the settings of a section",
        )
    )
