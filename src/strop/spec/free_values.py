"""Checks on tables that strop hands on without knowing their keys (`task.config`)."""

from __future__ import annotations

import math

from pydantic import JsonValue

from strop.errors import ConfigError, explain_refusal

MAX_DEPTH = 16
"""Tables and lists inside each other, at most; far above any real data set."""


def check_free_table(key: str, value: JsonValue, depth: int = 0) -> None:
    """Refuse values that a TOML file could not give back: null and numbers that are not finite.

    Raises: ConfigError naming the setting.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(
            explain_refusal(
                f"{key} is nested more than {MAX_DEPTH} deep",
                allowed=f"tables and lists of depth {MAX_DEPTH} at most",
                next_step="flatten the value",
            )
        )
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(
            explain_refusal(
                f"{key}={'null' if value is None else value} cannot be handed on",
                allowed="texts, finite numbers, true, false, lists and tables",
                next_step="leave the key out to get the data set's own default",
            )
        )
    if isinstance(value, dict):
        for name, item in value.items():
            check_free_table(f"{key}.{name}", item, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_free_table(f"{key}[{index}]", item, depth + 1)
