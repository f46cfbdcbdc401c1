"""`key=value` on the command line: the last word over every file.

The key is dotted; the value is read as a TOML value and, where it is none, taken as text. What other
launchers of this field accept is understood too: `--key value` and `--key=value`, dashes for underscores,
null for none.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Sequence
from typing import Any

from strop.errors import ConfigError, explain_refusal
from strop.spec.display import KeyPath, show_text
from strop.spec.schema import NULL_WORD

_OTHER_NULL_WORD = "null"
OVERRIDE = "override"
"""Origin of a value that an override set."""


def join_words(words: Sequence[str]) -> list[str]:
    """Return overrides as `key=value`, whatever form each was given in: `--a.b-c 1` is `a.b_c=1`.

    Raises: ConfigError if a flag has no value.
    """
    overrides, left = [], list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            overrides.append(word)
            continue
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals and not left:
            raise _malformed(word)
        overrides.append(f"{key.replace('-', '_')}={value if equals else left.pop(0)}")
    return overrides


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
    return path, NULL_WORD if value.strip() == _OTHER_NULL_WORD else _parse_value(value.strip())


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
